"""Protections, each with a replacement that takes it out and the test that must fail then."""

from __future__ import annotations

import dataclasses
import math
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import yaml
from transformers.modeling_utils import AttentionInterface

from reliability.record import Part


@dataclass(frozen=True)
class Mutation:
    """A protection that is taken out.

    Attributes:
        part: the promise that it keeps.
        protection: what it is, in a few words.
        target: what is replaced, as "module:name" or "module:Class.name". A function or class that is named in the
            module that defines it is replaced in every module that imports it; otherwise in the named module alone.
        replace: takes what stands there and returns what takes its place.
        red: the test below tests/ that must fail, as pytest names it. It has to run in one process, or apply the
            mutation in its others.
    """

    part: Part
    protection: str
    target: str
    replace: Callable[[Any], Any]
    red: str

    def apply(self) -> None:
        """Take the protection out of this process, for good."""
        path, _, name = self.target.rpartition(":")
        outer, _, name = name.rpartition(".")
        owner = resolve_name(f"{path}:{outer}" if outer else path)
        original = getattr(owner, name)
        replacement = self.replace(original)
        setattr(owner, name, replacement)
        if getattr(original, "__module__", None) == path and not outer:
            for module in [module for key, module in sys.modules.items() if key.startswith("rsa_hf")]:
                if vars(module).get(name) is original:
                    setattr(module, name, replacement)


def by(replacement: Any) -> Callable[[Any], Any]:
    return lambda original: replacement


def first(before: Callable[..., Any]) -> Callable[[Any], Any]:
    """Call `before` with the same arguments first."""
    return lambda original: lambda *args, **keywords: (before(*args, **keywords), original(*args, **keywords))[1]


def nothing(*_: Any, **__: Any) -> None:
    pass


def no_context(*_: Any, **__: Any) -> nullcontext[None]:
    return nullcontext()


# --- larger replacements -------------------------------------------------------------------------------------------


def _ignored_by_pattern(model, key):
    return any(re.search(pattern, key) for pattern in model._keys_to_ignore_on_load_unexpected or ())


def _floating_point_only(original):
    return lambda name, parameter: original(name, parameter) if parameter.is_floating_point() else None


def _with_rates_behind_shut_gates(original):
    def rems_and_gate(self, heads_per_value):
        rems, gate = original(self, heads_per_value)
        return dataclasses.replace(rems, decay=self.per_head(self.rates(torch.float64))[0]), gate

    return rems_and_gate


def _left_in_place(original):
    @contextmanager
    def record_attention_calls():
        with original() as calls:
            recording = AttentionInterface.get_interface
            yield calls
        AttentionInterface.get_interface = recording

    return record_attention_calls


def _named_before_it_is_whole(original):
    def put_in_place(folder):
        progress = folder.with_name(f".{folder.name}.tmp") / "progress.json"
        text = progress.read_text()
        progress.unlink()
        original(folder)
        (folder / progress.name).write_text(text)

    return put_in_place


def _without_random_state(original):
    def load(*args):
        before = torch.get_rng_state()
        progress = original(*args)
        torch.set_rng_state(before)
        return progress

    return load


def _without_optimizer_state(original):
    def load(self, *args):
        progress = original(self, *args)
        self.accelerator._optimizers[0].state.clear()
        return progress

    return load


def _save_without_cleaning(original):
    def save(self, progress, carried=None):
        with resolve_name("rsa_hf.utils.files:storage_errors")(self.path):
            self._write(self.path / f"step-{progress.step}", progress, carried)

    return save


def _with_losses_kept(original):
    def log(self, progress, *args):
        before = progress.losses
        original(self, progress, *args)
        progress.losses = before

    return log


class _NeverForgets(list):
    remove = nothing


def _any_parameters(original):
    return lambda row: original(dataclasses.replace(row, parameters=()))


CHECKPOINTS = "rsa_hf.training.checkpoints"
LOADING = "rsa_hf.integration.loading"
WHAT_IS_REFUSED = "reliability/test_hostile_checkpoints.py::test_what_is_refused"
DAMAGED = "reliability/test_crash.py::test_a_damaged_checkpoint_is_passed_over"
OWN_THREAD = "reliability/test_many_models.py::test_a_probe_looks_at_its_own_thread_alone"

MUTATIONS = [
    Mutation(
        Part.CRASH,
        "a checkpoint gets its name after everything in it is written",
        f"{CHECKPOINTS}:put_in_place",
        _named_before_it_is_whole,
        "reliability/test_crash.py::test_a_checkpoint_has_its_name_only_while_it_is_whole",
    ),
    Mutation(
        Part.CRASH,
        "a checkpoint loses its name before it is deleted",
        f"{CHECKPOINTS}:discard",
        by(lambda folder: shutil.rmtree(folder)),
        "reliability/test_crash.py::test_a_checkpoint_has_its_name_only_while_it_is_whole",
    ),
    Mutation(
        Part.CRASH,
        "an old checkpoint that a killed run did not come to delete is deleted",
        f"{CHECKPOINTS}:CheckpointFolder.clear",
        by(nothing),
        "reliability/test_crash.py::test_what_a_killed_run_left_is_cleared[an old checkpoint]",
    ),
    Mutation(
        Part.CRASH,
        "checkpoints of an abandoned course are dropped",
        f"{CHECKPOINTS}:CheckpointFolder.clear",
        by(nothing),
        "reliability/test_crash.py::test_an_older_checkpoint_is_gone_on_from",
    ),
    Mutation(
        Part.CRASH, "only a whole checkpoint is gone on from", f"{CHECKPOINTS}:_fault", by(nothing), f"{DAMAGED}[torn]"
    ),
    Mutation(
        Part.CRASH,
        "the random generators go on where they were",
        f"{CHECKPOINTS}:CheckpointFolder.load",
        _without_random_state,
        DAMAGED,
    ),
    Mutation(
        Part.CRASH,
        "the optimiser goes on where it was",
        f"{CHECKPOINTS}:CheckpointFolder.load",
        _without_optimizer_state,
        DAMAGED,
    ),
    Mutation(
        Part.CRASH,
        "lines after the checkpoint are dropped from the log",
        "rsa_hf.training.metrics_log:MetricsLog.keep_until",
        by(nothing),
        DAMAGED,
    ),
    Mutation(
        Part.CRASH,
        "what a killed run left is cleared",
        f"{CHECKPOINTS}:CheckpointFolder.recover",
        by(nothing),
        "reliability/test_crash.py::test_what_a_killed_run_left_is_cleared[half written]",
    ),
    Mutation(
        Part.CRASH,
        "what was moved aside is put back",
        "rsa_hf.utils.files:recover",
        first(lambda folder: shutil.rmtree(folder.with_name(f".{folder.name}.old"), ignore_errors=True)),
        "reliability/test_storage.py::test_what_was_moved_aside_comes_back",
    ),
    Mutation(
        Part.CRASH,
        "files are on the disk before they get their name",
        "rsa_hf.utils.files:_flush",
        by(nothing),
        "reliability/test_storage.py::test_files_are_on_the_disk_before_they_get_their_name",
    ),
    Mutation(
        Part.CRASH,
        "the Trainer goes on from a whole checkpoint",
        "rsa_hf.training.trainer:_fault",
        by(nothing),
        "reliability/test_crash.py::test_a_torn_checkpoint_of_the_trainer_is_passed_over",
    ),
    Mutation(
        Part.STORAGE,
        "one process at a time writes into a folder",
        "rsa_hf.utils.files:FileLock",
        by(MagicMock()),
        "reliability/test_storage.py::test_one_writer_at_a_time",
    ),
    Mutation(
        Part.STORAGE,
        "an error of writing says what to do",
        "rsa_hf.utils.files:storage_errors",
        by(no_context),
        "reliability/test_storage.py::test_file_size_limit",
    ),
    Mutation(
        Part.STORAGE,
        "what could not be completed is deleted",
        f"{CHECKPOINTS}:CheckpointFolder.save",
        _save_without_cleaning,
        "reliability/test_storage.py::test_file_size_limit",
    ),
    Mutation(
        Part.STORAGE,
        "a saved model stays until the next one is whole",
        "rsa_hf.utils.files:put_in_place",
        first(lambda folder: shutil.rmtree(folder)),
        "reliability/test_storage.py::test_a_folder_is_never_gone_while_it_is_replaced",
    ),
    Mutation(
        Part.HOSTILE_FILES,
        "what PEFT has put in before it fails is taken out",
        "rsa_hf.peft:_restored_on_error",
        by(no_context),
        "reliability/test_hostile_checkpoints.py::test_what_peft_refuses_late_leaves_the_base_as_it_was",
    ),
    Mutation(
        Part.HOSTILE_FILES,
        "heads that no plan names are not ignored as buffers of transformers'",
        f"{LOADING}:_is_ignored",
        by(_ignored_by_pattern),
        f"{WHAT_IS_REFUSED}[a gate with the name of a buffer]",
    ),
    Mutation(
        Part.HOSTILE_FILES,
        "YAML is read by a safe loader",
        "rsa_hf.training.arguments:_Loader",
        by(yaml.UnsafeLoader),
        "reliability/test_no_code_runs.py::test_yaml_runs_nothing",
    ),
    Mutation(
        Part.HOSTILE_FILES,
        "the values of RSA tensors are checked",
        "rsa_hf.saved_plan:require_number",
        by(nothing),
        f"{WHAT_IS_REFUSED}[NaN in a gate]",
    ),
    Mutation(
        Part.HOSTILE_FILES,
        "a stored rate is not vast",
        "rsa_hf.saved_plan:MAX_STORED",
        by(math.inf),
        f"{WHAT_IS_REFUSED}[a vast angle]",
    ),
    Mutation(
        Part.HOSTILE_FILES,
        "RSA tensors hold floating-point numbers",
        "rsa_hf.saved_plan:require_number",
        _floating_point_only,
        f"{WHAT_IS_REFUSED}[whole numbers]",
    ),
    Mutation(
        Part.HOSTILE_FILES,
        "heads are put on self-attention alone",
        "rsa_hf.integration.attach:is_self_attention",
        by(lambda name, module: True),
        f"{WHAT_IS_REFUSED}[a feed-forward layer]",
    ),
    Mutation(
        Part.HOSTILE_FILES,
        "cross-attention is told from self-attention",
        "rsa_hf.integration.attention_modules:_CROSS",
        by(re.compile("(?!)")),
        f"{WHAT_IS_REFUSED}[cross-attention]",
    ),
    Mutation(
        Part.HOSTILE_FILES,
        "names in a plan are checked",
        "rsa_hf.saved_plan:_MODULE_NAME",
        by(re.compile(".*", re.DOTALL)),
        "integration/test_saving.py::test_plans_that_do_not_fit",
    ),
    Mutation(
        Part.HOSTILE_FILES,
        "every module of a plan is there",
        f"{LOADING}:_require_planned_heads",
        by(nothing),
        f"{WHAT_IS_REFUSED}[one module more]",
    ),
    Mutation(
        Part.HOSTILE_FILES,
        "the number of RSA heads is bounded",
        "rsa_hf.config:MAX_HEADS",
        by(10**18),
        "hub/test_hub.py::test_a_hostile_plan_is_refused_before_anything_is_built[heads without end]",
    ),
    Mutation(
        Part.HOSTILE_FILES,
        "the plan is read before anything is built",
        "rsa_hf.integration.locks:read_plan",
        by(nothing),
        "hub/test_hub.py::test_a_hostile_plan_is_refused_before_anything_is_built[heads without end]",
    ),
    Mutation(
        Part.HOSTILE_FILES,
        "RSA tensors and plan match",
        f"{LOADING}:_require_matching_keys",
        by(nothing),
        "integration/test_saving.py::test_weights_that_do_not_fit_the_plan",
    ),
    Mutation(
        Part.HOSTILE_FILES,
        "shapes are compared before memory is taken",
        f"{LOADING}:_require_matching_shapes",
        by(nothing),
        f"{WHAT_IS_REFUSED}[a vocabulary without end]",
    ),
    Mutation(
        Part.HOSTILE_FILES,
        "files outside of the folder are not read",
        f"{LOADING}:_require_inside",
        by(nothing),
        f"{WHAT_IS_REFUSED}[a file outside]",
    ),
    Mutation(
        Part.HOSTILE_FILES,
        "pickles are refused by any name, and a tensor in two files",
        f"{LOADING}:_check_files",
        by(nothing),
        f"{WHAT_IS_REFUSED}[a tensor in two files]",
    ),
    Mutation(
        Part.HOSTILE_FILES,
        "a locked config has a plan",
        "rsa_hf.integration.locks:_remove_locks",
        lambda original: lambda content: original(content) and False,
        f"{WHAT_IS_REFUSED}[no plan]",
    ),
    Mutation(
        Part.HOSTILE_FILES,
        "no token in an address",
        "rsa_hf.hub.push:holds_credentials",
        by(lambda text: False),
        "reliability/test_no_token_leaks.py::test_a_token_in_another_place_is_refused",
    ),
    Mutation(
        Part.HOSTILE_FILES,
        "no token in what is uploaded",
        "rsa_hf.hub.push:holds_credentials",
        by(lambda text: False),
        "reliability/test_no_token_leaks.py::test_a_file_that_holds_it_is_not_uploaded",
    ),
    Mutation(
        Part.HOSTILE_FILES,
        "no token on a card",
        "rsa_hf.hub.card:without_credentials",
        by(str),
        "reliability/test_no_token_leaks.py::test_it_is_on_no_card",
    ),
    Mutation(
        Part.HOSTILE_FILES,
        "no token in a message of the command line",
        "rsa_hf.utils.credentials:without_credentials",
        by(str),
        "reliability/test_no_token_leaks.py::test_the_command_line",
    ),
    Mutation(
        Part.NUMBERS,
        "powers of the rates are computed in float64",
        "rsa_hf.ops.powers:widest_dtype",
        by(lambda device: torch.bfloat16),
        "reliability/test_numbers_long.py::test_long_texts",
    ),
    Mutation(
        Part.NUMBERS,
        "rates come from the parameters in float64",
        "rsa_hf.heads:widest_dtype",
        by(lambda device: torch.float32),
        "reliability/test_numbers_heads.py::test_a_rate_that_float32_cannot_tell_from_one_still_learns",
    ),
    Mutation(
        Part.NUMBERS,
        "P is nothing behind a shut gate",
        "rsa_hf.heads:RSAHeads._rems_and_gate",
        _with_rates_behind_shut_gates,
        "reliability/test_numbers_heads.py::test_behind_a_shut_gate_nothing_overflows",
    ),
    Mutation(
        Part.NUMBERS,
        "hidden values are cleared, not multiplied by zero",
        "torch:Tensor.masked_fill_",
        by(lambda self, mask, value: self.mul_(~mask)),
        "reliability/test_numbers_product.py::test_eager",
    ),
    Mutation(
        Part.NUMBERS,
        "16-bit values are computed with in float32",
        "rsa_hf.ops.chunked:working_dtype",
        by(lambda value: value.dtype),
        "reliability/test_numbers_product.py::test_gradients_of_shared_values_are_rounded_once",
    ),
    Mutation(
        Part.NUMBERS,
        "position_ids that take every token apart are named",
        "rsa_hf.ops.mask:warn_single_token_segments",
        by(nothing),
        "reliability/test_numbers_models.py::test_position_ids_that_take_every_token_apart_are_named",
    ),
    Mutation(
        Part.MANY_MODELS,
        "unpatching takes the plan out of the config",
        "rsa_hf.patching:configs_with_plans",
        by(lambda model: []),
        "test_patching.py::test_open_gate_acts_and_unpatch_is_exact",
    ),
    Mutation(
        Part.MANY_MODELS,
        "the attention interface is put back after a probe",
        "rsa_hf.integration.attention:record_attention_calls",
        _left_in_place,
        OWN_THREAD,
    ),
    Mutation(
        Part.MANY_MODELS,
        "a probe looks at its own thread alone",
        "rsa_hf.integration.attention:threading",
        by(SimpleNamespace(get_ident=nothing)),
        OWN_THREAD,
    ),
    Mutation(
        Part.MANY_MODELS,
        "watchers of connected modules are a thread's own",
        "rsa_hf.integration.architectures.mixing:_watching",
        by(SimpleNamespace(watchers=[])),
        OWN_THREAD,
    ),
    Mutation(
        Part.MANY_MODELS,
        "watchers are forgotten after a probe",
        "rsa_hf.integration.architectures.mixing:_watching",
        by(SimpleNamespace(watchers=_NeverForgets())),
        "reliability/test_memory_flat.py::test_patching_and_unpatching",
    ),
    Mutation(
        Part.MANY_MODELS,
        "no number has the default dtype of the process",
        "rsa_hf.models.attention:sinusoids",
        lambda original: lambda *args: original(*args).to(torch.get_default_dtype()).float(),
        "reliability/test_many_models.py::test_the_default_dtype_of_the_process_changes_nothing",
    ),
    Mutation(
        Part.MOVING_TRANSFORMERS,
        "the version of transformers is checked",
        "rsa_hf.utils.versions:require_transformers",
        by(lambda: ""),
        "integration/test_hooks.py::test_a_version_outside_the_range_is_named",
    ),
    Mutation(
        Part.MOVING_TRANSFORMERS,
        "the parameters of each hooked function are checked",
        "rsa_hf.integration.hooks:_replacement",
        _any_parameters,
        "integration/test_hooks.py::test_a_hook_that_is_not_essential_is_left_out_with_a_warning[a parameter]",
    ),
    Mutation(
        Part.MOVING_TRANSFORMERS,
        "what was replaced is put back where a later hook fails",
        "rsa_hf.integration.hooks:_put_back",
        by(nothing),
        "integration/test_hooks.py::test_a_function_that_cannot_be_replaced_undoes_the_others",
    ),
    Mutation(
        Part.MOVING_TRANSFORMERS,
        "the parameters of each method of the table of architectures are checked",
        "rsa_hf.integration.architectures.table:_wrap_class",
        _any_parameters,
        "integration/test_architectures.py::test_a_moved_method_is_named_and_nothing_is_installed[other parameters]",
    ),
    Mutation(
        Part.SOAK,
        "losses are forgotten once they are logged",
        "rsa_hf.training.loop:_Run._log",
        _with_losses_kept,
        "reliability/test_soak.py::test_a_long_run_stays_flat",
    ),
    Mutation(
        Part.SOAK,
        "the log is closed after each line",
        "rsa_hf.training.metrics_log:MetricsLog.append",
        first(lambda self, *_: vars(self).setdefault("left open", []).append(self.path.open("a"))),
        "reliability/test_soak.py::test_a_long_run_stays_flat",
    ),
]
