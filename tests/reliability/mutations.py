"""Protections, each with a replacement that takes it out and the test that must fail then."""

from __future__ import annotations

import dataclasses
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import torch
import yaml

from reliability.record import Part
from rsa_hf.integration import attention


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


def _with_rates_behind_shut_gates(original):
    def rems_and_gate(self, heads_per_value):
        rems, gate = original(self, heads_per_value)
        return dataclasses.replace(rems, decay=self.per_head(self.rates(torch.float64))[0]), gate

    return rems_and_gate


def _left_in_place(original):
    @contextmanager
    def record_attention_calls():
        with original() as calls:
            yield calls
        attention._recording.calls = calls

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


CHECKPOINTS = "rsa_hf.training.checkpoints"
LOADING = "rsa_hf.integration.loading"
WHAT_IS_REFUSED = "reliability/test_hostile_checkpoints.py::test_what_is_refused"
DAMAGED = "reliability/test_crash.py::test_a_damaged_checkpoint_is_passed_over"
OWN_THREAD = "reliability/test_many_models.py::test_a_probe_looks_at_its_own_thread_alone"

ROWS = {
    Part.CRASH: [
        (
            "a checkpoint gets its name after everything in it is written",
            f"{CHECKPOINTS}:put_in_place",
            _named_before_it_is_whole,
            "reliability/test_crash.py::test_a_checkpoint_has_its_name_only_while_it_is_whole",
        ),
        (
            "a checkpoint loses its name before it is deleted",
            f"{CHECKPOINTS}:discard",
            by(lambda folder: shutil.rmtree(folder)),
            "reliability/test_crash.py::test_a_checkpoint_has_its_name_only_while_it_is_whole",
        ),
        (
            "an old checkpoint that a killed run did not come to delete is deleted",
            f"{CHECKPOINTS}:CheckpointFolder.clear",
            by(nothing),
            "reliability/test_crash.py::test_what_a_killed_run_left_is_cleared[an old checkpoint]",
        ),
        (
            "checkpoints of an abandoned course are dropped",
            f"{CHECKPOINTS}:CheckpointFolder.clear",
            by(nothing),
            "reliability/test_crash.py::test_an_older_checkpoint_is_gone_on_from",
        ),
        ("only a whole checkpoint is gone on from", f"{CHECKPOINTS}:_fault", by(nothing), f"{DAMAGED}[torn]"),
        (
            "the random generators go on where they were",
            f"{CHECKPOINTS}:CheckpointFolder.load",
            _without_random_state,
            DAMAGED,
        ),
        (
            "the optimiser goes on where it was",
            f"{CHECKPOINTS}:CheckpointFolder.load",
            _without_optimizer_state,
            DAMAGED,
        ),
        (
            "lines after the checkpoint are dropped from the log",
            "rsa_hf.training.trackers:MetricsLog.keep_until",
            by(nothing),
            DAMAGED,
        ),
        (
            "what a killed run left is cleared",
            f"{CHECKPOINTS}:CheckpointFolder.recover",
            by(nothing),
            "reliability/test_crash.py::test_what_a_killed_run_left_is_cleared[half written]",
        ),
        (
            "what was moved aside is put back",
            "rsa_hf.utils.files:recover",
            first(lambda folder: shutil.rmtree(folder.with_name(f".{folder.name}.old"), ignore_errors=True)),
            "reliability/test_storage.py::test_what_was_moved_aside_comes_back",
        ),
        (
            "files are on the disk before they get their name",
            "rsa_hf.utils.files:_flush",
            by(nothing),
            "reliability/test_storage.py::test_files_are_on_the_disk_before_they_get_their_name",
        ),
        (
            "the Trainer goes on from a whole checkpoint",
            "rsa_hf.training.trainer:_fault",
            by(nothing),
            "reliability/test_crash.py::test_a_torn_checkpoint_of_the_trainer_is_passed_over",
        ),
    ],
    Part.STORAGE: [
        (
            "what could not be completed is deleted",
            f"{CHECKPOINTS}:CheckpointFolder.save",
            _save_without_cleaning,
            "reliability/test_storage.py::test_file_size_limit",
        ),
        (
            "a saved model stays until the next one is whole",
            "rsa_hf.utils.files:put_in_place",
            first(lambda folder: shutil.rmtree(folder)),
            "reliability/test_storage.py::test_a_folder_is_never_gone_while_it_is_replaced",
        ),
    ],
    Part.HOSTILE_FILES: [
        (
            "what PEFT has put in before it fails is taken out",
            "rsa_hf.peft:_restored_on_error",
            by(no_context),
            "reliability/test_hostile_checkpoints.py::test_what_peft_refuses_late_leaves_the_base_as_it_was",
        ),
        (
            "heads that no plan names are not ignored as buffers of transformers'",
            f"{LOADING}:_is_ignored",
            by(_ignored_by_pattern),
            f"{WHAT_IS_REFUSED}[a gate with the name of a buffer]",
        ),
        (
            "YAML is read by a safe loader",
            "rsa_hf.training.arguments:_Loader",
            by(yaml.UnsafeLoader),
            "reliability/test_no_code_runs.py::test_yaml_runs_nothing",
        ),
        (
            "no token on a card",
            "rsa_hf.hub.card:without_credentials",
            by(str),
            "reliability/test_no_token_leaks.py::test_it_is_on_no_card",
        ),
        (
            "no token in a message of the command line",
            "rsa_hf.utils.text:without_credentials",
            by(str),
            "reliability/test_no_token_leaks.py::test_the_command_line",
        ),
    ],
    Part.NUMBERS: [
        (
            "powers of the rates are computed in float64",
            "rsa_hf.rem:widest_dtype",
            by(lambda device: torch.bfloat16),
            "reliability/test_numbers_long.py::test_long_texts",
        ),
        (
            "rates come from the parameters in float64",
            "rsa_hf.heads:widest_dtype",
            by(lambda device: torch.float32),
            "reliability/test_numbers_heads.py::test_a_rate_that_float32_cannot_tell_from_one_still_learns",
        ),
        (
            "P is nothing behind a shut gate",
            "rsa_hf.heads:RSAHeads._rems_and_gate",
            _with_rates_behind_shut_gates,
            "reliability/test_numbers_heads.py::test_behind_a_shut_gate_nothing_overflows",
        ),
        (
            "hidden values are cleared, not multiplied by zero",
            "torch:Tensor.masked_fill_",
            by(lambda self, mask, value: self.mul_(~mask)),
            "reliability/test_numbers_product.py::test_eager",
        ),
        (
            "16-bit values are computed with in float32",
            "rsa_hf.ops.chunked:working_dtype",
            by(lambda value: value.dtype),
            "reliability/test_numbers_product.py::test_gradients_of_shared_values_are_rounded_once",
        ),
    ],
    Part.MANY_MODELS: [
        (
            "unpatching takes the plan out of the config",
            "rsa_hf.patching:configs_with_plans",
            by(lambda model: []),
            "test_patching.py::test_open_gate_acts_and_unpatch_is_exact",
        ),
        (
            "calls are recorded in a trial run alone",
            "rsa_hf.integration.attention:record_attention_calls",
            _left_in_place,
            OWN_THREAD,
        ),
        (
            "a probe looks at its own thread alone",
            "rsa_hf.integration.attention:_recording",
            by(SimpleNamespace(calls=None)),
            OWN_THREAD,
        ),
        (
            "no number has the default dtype of the process",
            "rsa_hf.models.attention:sinusoids",
            lambda original: lambda *args: original(*args).to(torch.get_default_dtype()).float(),
            "reliability/test_many_models.py::test_the_default_dtype_of_the_process_changes_nothing",
        ),
    ],
    Part.SOAK: [
        (
            "losses are forgotten once they are logged",
            "rsa_hf.training.run:_Run._log",
            _with_losses_kept,
            "reliability/test_soak.py::test_a_long_run_stays_flat",
        ),
        (
            "the log is closed after each line",
            "rsa_hf.training.trackers:MetricsLog.append",
            first(lambda self, *_: vars(self).setdefault("left open", []).append(self.path.open("a"))),
            "reliability/test_soak.py::test_a_long_run_stays_flat",
        ),
    ],
}
MUTATIONS = [Mutation(part, *row) for part, rows in ROWS.items() for row in rows]
