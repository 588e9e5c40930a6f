"""Protections, each with a replacement that disables it and the test that must then fail."""

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
from rsa_hf.integration import trial


@dataclass(frozen=True)
class Mutation:
    """A replacement that disables a protection.

    Attributes:
        part: the promise that the protection keeps.
        protection: the protection in a few words.
        target: the attribute to replace, as "module:name" or "module:Class.name". A function or class of the module
            that defines it is replaced in every module that imports it, others only in the named module.
        replace: takes the original and returns its replacement.
        red: the test in tests/ that must fail, as pytest names it. It must run in one process, or apply the mutation
            in its other processes.
    """

    part: Part
    protection: str
    target: str
    replace: Callable[[Any], Any]
    red: str

    def apply(self) -> None:
        """Disable the protection in this process for good."""
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
    """Call `before` with the same arguments, then the original."""
    return lambda original: lambda *args, **keywords: (before(*args, **keywords), original(*args, **keywords))[1]


def nothing(*_: Any, **__: Any) -> None:
    pass


def no_context(*_: Any, **__: Any) -> nullcontext[None]:
    return nullcontext()


# --- larger replacements -------------------------------------------------------------------------------------------


def _ignored_by_pattern(model, key):
    return any(re.search(pattern, key) for pattern in model._keys_to_ignore_on_load_unexpected or ())


def _keep_rates_behind_shut_gates(original):
    def rems_and_gate(self, heads_per_value):
        rems, gate = original(self, heads_per_value)
        return dataclasses.replace(rems, decay=self.per_head(self.rates(torch.float64))[0]), gate

    return rems_and_gate


def _multiply_hidden_by_zero(original):
    def seen_keys(value, mask):
        keys = original(value, dataclasses.replace(mask, key_mask=None))
        return keys if mask.key_mask is None else keys * mask.key_mask[:, None, : keys.shape[2], None]

    return seen_keys


def _keep_recording(original):
    @contextmanager
    def record_attention_calls():
        with original() as calls:
            yield calls
        trial._state.calls = calls

    return record_attention_calls


def _name_before_it_is_complete(original):
    def put_in_place(folder):
        progress = folder.with_name(f".{folder.name}.tmp") / "progress.json"
        text = progress.read_text()
        progress.unlink()
        original(folder)
        (folder / progress.name).write_text(text)

    return put_in_place


def _skip_random_state(original):
    def load(*args):
        before = torch.get_rng_state()
        progress = original(*args)
        torch.set_rng_state(before)
        return progress

    return load


def _skip_optimizer_state(original):
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


def _keep_losses(original):
    def log(self, progress, *args):
        before = progress.losses
        original(self, progress, *args)
        progress.losses = before

    return log


CHECKPOINTS = "rsa_hf.training.checkpoints"
LOADING = "rsa_hf.integration.loading"
REFUSED = "reliability/test_hostile_checkpoints.py::test_a_hostile_checkpoint_is_refused"
DAMAGED = "reliability/test_crash.py::test_a_damaged_checkpoint_is_skipped"
NAMED = "reliability/test_crash.py::test_a_checkpoint_has_its_name_only_while_it_is_complete"
LEFTOVERS = "reliability/test_crash.py::test_leftovers_of_a_killed_run_are_deleted"
OWN_THREAD = "reliability/test_many_models.py::test_a_probe_records_only_its_own_thread"

ROWS = {
    Part.CRASH: [
        (
            "a checkpoint gets its name after all its files are written",
            f"{CHECKPOINTS}:put_in_place",
            _name_before_it_is_complete,
            NAMED,
        ),
        (
            "a checkpoint loses its name before it is deleted",
            f"{CHECKPOINTS}:discard",
            by(lambda folder: shutil.rmtree(folder)),
            NAMED,
        ),
        (
            "an old checkpoint that a killed run did not delete is deleted",
            f"{CHECKPOINTS}:CheckpointFolder.clear",
            by(nothing),
            f"{LEFTOVERS}[an old checkpoint]",
        ),
        (
            "checkpoints newer than the step resumed from are deleted",
            f"{CHECKPOINTS}:CheckpointFolder.clear",
            by(nothing),
            "reliability/test_crash.py::test_a_run_resumes_from_an_older_checkpoint",
        ),
        (
            "a run resumes only from a complete checkpoint",
            f"{CHECKPOINTS}:_fault",
            by(nothing),
            f"{DAMAGED}[truncated]",
        ),
        (
            "the states of the random generators are restored",
            f"{CHECKPOINTS}:CheckpointFolder.load",
            _skip_random_state,
            DAMAGED,
        ),
        (
            "the state of the optimiser is restored",
            f"{CHECKPOINTS}:CheckpointFolder.load",
            _skip_optimizer_state,
            DAMAGED,
        ),
        (
            "lines of the log after the checkpoint are deleted",
            "rsa_hf.training.trackers:MetricsLog.keep_until",
            by(nothing),
            DAMAGED,
        ),
        (
            "partial folders of a killed run are deleted",
            f"{CHECKPOINTS}:CheckpointFolder.recover",
            by(nothing),
            f"{LEFTOVERS}[partial folders]",
        ),
        (
            "a folder that was moved aside is moved back",
            "rsa_hf.utils.files:recover",
            first(lambda folder: shutil.rmtree(folder.with_name(f".{folder.name}.old"), ignore_errors=True)),
            "reliability/test_storage.py::test_a_folder_that_was_moved_aside_is_moved_back",
        ),
        (
            "files are flushed to the disk before they get their name",
            "rsa_hf.utils.files:_flush",
            by(nothing),
            "reliability/test_storage.py::test_files_are_flushed_before_they_get_their_name",
        ),
        (
            "the Trainer resumes only from a complete checkpoint",
            "rsa_hf.training.trainer:_fault",
            by(nothing),
            "reliability/test_crash.py::test_a_truncated_checkpoint_of_the_trainer_is_skipped",
        ),
    ],
    Part.STORAGE: [
        (
            "a checkpoint that cannot be completed is deleted",
            f"{CHECKPOINTS}:CheckpointFolder.save",
            _save_without_cleaning,
            "reliability/test_storage.py::test_a_run_stopped_by_a_file_size_limit_resumes_bit_for_bit",
        ),
        (
            "a saved model stays until the next one is complete",
            "rsa_hf.utils.files:put_in_place",
            first(lambda folder: shutil.rmtree(folder)),
            "reliability/test_storage.py::test_a_folder_exists_at_all_times_while_it_is_replaced",
        ),
    ],
    Part.HOSTILE_FILES: [
        (
            "layers that PEFT has added before it fails are removed",
            "rsa_hf.peft:_restored_on_error",
            by(no_context),
            "reliability/test_hostile_checkpoints.py::test_a_late_refusal_by_peft_leaves_the_base_unchanged",
        ),
        (
            "heads outside the plan are not ignored as buffers of transformers",
            f"{LOADING}:_is_ignored",
            by(_ignored_by_pattern),
            f"{REFUSED}[a gate with the name of a buffer]",
        ),
        (
            "YAML is read by a safe loader",
            "rsa_hf.training.arguments:_Loader",
            by(yaml.UnsafeLoader),
            "reliability/test_no_code_runs.py::test_yaml_runs_nothing",
        ),
        (
            "a model card has no token",
            "rsa_hf.hub.card:without_credentials",
            by(str),
            "reliability/test_no_token_leaks.py::test_a_token_is_not_written_on_a_card",
        ),
    ],
    Part.NUMBERS: [
        (
            "powers of the rates are computed in float64",
            "rsa_hf.rem:widest_dtype",
            by(lambda device: torch.bfloat16),
            "reliability/test_numbers_long.py::test_long_texts_agree_with_a_digital_filter",
        ),
        (
            "rates are computed from the parameters in float64",
            "rsa_hf.heads:widest_dtype",
            by(lambda device: torch.float32),
            "reliability/test_numbers_heads.py::test_a_rate_that_float32_cannot_tell_from_one_still_learns",
        ),
        (
            "P is zero behind a shut gate",
            "rsa_hf.heads:RSAHeads._rems_and_gate",
            _keep_rates_behind_shut_gates,
            "reliability/test_numbers_heads.py::test_nothing_overflows_behind_a_shut_gate",
        ),
        (
            "hidden values are set to zero, not multiplied by it",
            "rsa_hf.ops.chunked:seen_keys",
            _multiply_hidden_by_zero,
            "ops/test_rem_product.py::test_padding_contributes_nothing",
        ),
        (
            "P V of 16-bit values is computed in float32",
            "rsa_hf.ops.chunked:working_dtype",
            by(lambda value: value.dtype),
            "reliability/test_numbers_product.py::test_gradients_of_shared_values_are_rounded_once",
        ),
    ],
    Part.MANY_MODELS: [
        (
            "unpatching removes the plan from the config",
            "rsa_hf.patching:configs_with_plans",
            by(lambda model: []),
            "test_patching.py::test_an_open_gate_acts_and_unpatching_is_exact",
        ),
        (
            "calls are recorded only in a trial run",
            "rsa_hf.integration.trial:record_attention_calls",
            _keep_recording,
            OWN_THREAD,
        ),
        (
            "a probe records only its own thread",
            "rsa_hf.integration.trial:_state",
            by(SimpleNamespace(calls=None)),
            OWN_THREAD,
        ),
        (
            "results do not depend on the default dtype of the process",
            "rsa_hf.models.attention:sinusoids",
            lambda original: lambda *args: original(*args).to(torch.get_default_dtype()).float(),
            "reliability/test_many_models.py::test_the_default_dtype_of_the_process_changes_nothing",
        ),
    ],
    Part.SOAK: [
        (
            "losses are deleted once they are logged",
            "rsa_hf.training.run:_Run._log",
            _keep_losses,
            "reliability/test_soak.py::test_a_long_run_leaks_nothing_and_keeps_its_pace",
        ),
        (
            "the log is closed after each line",
            "rsa_hf.training.trackers:MetricsLog.append",
            first(lambda self, *_: vars(self).setdefault("left open", []).append(self.path.open("a"))),
            "reliability/test_soak.py::test_a_long_run_leaks_nothing_and_keeps_its_pace",
        ),
    ],
}
MUTATIONS = [Mutation(part, *row) for part, rows in ROWS.items() for row in rows]
