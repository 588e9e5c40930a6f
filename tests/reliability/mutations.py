"""Protections, each with the edit that takes it out and the test that must go red then."""

from __future__ import annotations

from dataclasses import dataclass

from reliability.record import Part


@dataclass(frozen=True)
class Mutation:
    """A protection that is taken out.

    Attributes:
        part: the promise that it keeps.
        protection: what it is, in a few words.
        file: where it is, below the project's root.
        old: the text that is replaced; it must stand there once.
        new: the text in its place.
        red: the test that must fail, as pytest names it.
    """

    part: Part
    protection: str
    file: str
    old: str
    new: str
    red: str


MUTATIONS = [
    Mutation(
        Part.HOSTILE_FILES,
        "YAML is read by a safe loader",
        "rsa_hf/plain_yaml.py",
        "class _Loader(yaml.SafeLoader)",
        "class _Loader(yaml.UnsafeLoader)",
        "tests/reliability/test_no_code_runs.py::test_yaml_runs_nothing",
    ),
    Mutation(
        Part.MOVING_TRANSFORMERS,
        "the version of transformers is checked",
        "rsa_hf/versions.py",
        "if not Version(low) <= Version(transformers.__version__) < Version(high):",
        "if False:",
        "tests/test_hooks.py::test_a_version_outside_the_range_is_named",
    ),
    Mutation(
        Part.CRASH,
        "a checkpoint gets its name after everything in it is written",
        "rsa_hf/training/checkpoints.py",
        '            (temporary / _PROGRESS_FILE).write_text(json.dumps(content, indent=1), encoding="utf-8")\n            put_in_place(folder)\n',
        '            put_in_place(folder)\n            (folder / _PROGRESS_FILE).write_text(json.dumps(content, indent=1), encoding="utf-8")\n',
        "tests/reliability/test_crash.py::test_a_checkpoint_has_its_name_only_while_it_is_whole",
    ),
    Mutation(
        Part.CRASH,
        "a checkpoint loses its name before it is deleted",
        "rsa_hf/training/checkpoints.py",
        "                discard(old)",
        "                shutil.rmtree(old)",
        "tests/reliability/test_crash.py::test_a_checkpoint_has_its_name_only_while_it_is_whole",
    ),
    Mutation(
        Part.CRASH,
        "only a whole checkpoint is gone on from",
        "rsa_hf/training/checkpoints.py",
        "            if fault is None:\n                for damaged",
        "            if True:\n                for damaged",
        "tests/reliability/test_crash.py::test_a_damaged_checkpoint_is_passed_over",
    ),
    Mutation(
        Part.CRASH,
        "the random generators go on where they were",
        "rsa_hf/training/checkpoints.py",
        "        self.accelerator.load_state(str(folder))",
        "        before = __import__('torch').get_rng_state()\n        self.accelerator.load_state(str(folder))\n"
        "        __import__('torch').set_rng_state(before)",
        "tests/reliability/test_crash.py::test_an_older_checkpoint_is_gone_on_from",
    ),
    Mutation(
        Part.CRASH,
        "the optimiser goes on where it was",
        "rsa_hf/training/checkpoints.py",
        "        self.accelerator.load_state(str(folder))",
        "        self.accelerator.load_state(str(folder))\n        self.accelerator._optimizers[0].state.clear()",
        "tests/reliability/test_crash.py::test_an_older_checkpoint_is_gone_on_from",
    ),
    Mutation(
        Part.CRASH,
        "lines after the checkpoint are dropped from the log",
        "rsa_hf/training/metrics_log.py",
        'if record["step"] <= step:',
        "if True:",
        "tests/reliability/test_crash.py::test_the_loop_is_killed_before_its_file_events",
    ),
    Mutation(
        Part.CRASH,
        "what a killed run left is cleared",
        "rsa_hf/training/loop.py",
        "        self.checkpoints.recover()\n",
        "",
        "tests/reliability/test_crash.py::test_what_a_killed_run_left_is_cleared",
    ),
    Mutation(
        Part.CRASH,
        "what was moved aside is put back",
        "rsa_hf/training/storage.py",
        "        old.rename(folder)\n    _remove(old)",
        "        pass\n    _remove(old)",
        "tests/reliability/test_storage.py::test_what_was_moved_aside_comes_back",
    ),
    Mutation(
        Part.CRASH,
        "files are on the disk before they get their name",
        "rsa_hf/training/storage.py",
        "        _flush(path)\n    if folder",
        "        pass\n    if folder",
        "tests/reliability/test_storage.py::test_files_are_on_the_disk_before_they_get_their_name",
    ),
    Mutation(
        Part.CRASH,
        "checkpoints of an abandoned course are dropped",
        "rsa_hf/training/loop.py",
        "        self.checkpoints.clear(after=progress.step)\n",
        "",
        "tests/reliability/test_crash.py::test_an_older_checkpoint_is_gone_on_from",
    ),
    Mutation(
        Part.CRASH,
        "the Trainer goes on from a whole checkpoint",
        "rsa_hf/training/trainer_checkpoints.py",
        "        if fault is None:\n            return",
        "        if True:\n            return",
        "tests/reliability/test_crash.py::test_a_torn_checkpoint_of_the_trainer_is_passed_over",
    ),
    Mutation(
        Part.STORAGE,
        "one process at a time writes into a folder",
        "rsa_hf/training/storage.py",
        "            lock.acquire(blocking=False)",
        "            pass",
        "tests/reliability/test_storage.py::test_two_processes_and_one_folder",
    ),
    Mutation(
        Part.STORAGE,
        "an error of writing says what to do",
        "rsa_hf/training/storage.py",
        "        raise StorageError(_in_words(folder, code)) from error",
        "        raise",
        "tests/reliability/test_storage.py::test_file_size_limit",
    ),
    Mutation(
        Part.STORAGE,
        "what could not be completed is deleted",
        "rsa_hf/training/checkpoints.py",
        "            shutil.rmtree(temporary, ignore_errors=True)  # it may fill the disk\n",
        "            pass\n",
        "tests/reliability/test_storage.py::test_file_size_limit",
    ),
    Mutation(
        Part.STORAGE,
        "a saved model stays until the next one is whole",
        "rsa_hf/training/storage.py",
        "    if folder.exists():\n        _remove(old)\n        folder.rename(old)",
        "    if folder.exists():\n        _remove(folder)",
        "tests/reliability/test_storage.py::test_a_folder_is_never_gone_while_it_is_replaced",
    ),
    Mutation(
        Part.MOVING_TRANSFORMERS,
        "the parameters of each hooked function are checked",
        "rsa_hf/hooks/replacing.py",
        "if found is None or [name for name in hook.parameters if name not in found]:",
        "if found is None:",
        "tests/test_hooks.py::test_other_parameters_are_named_and_nothing_is_half_installed[False-PreTrainedModel.post_init]",
    ),
    Mutation(
        Part.MOVING_TRANSFORMERS,
        "a function that is missing is named",
        "rsa_hf/hooks/replacing.py",
        "if found is None or [name for name in hook.parameters if name not in found]:",
        "if found is None:\n            continue\n        if [name for name in hook.parameters if name not in found]:",
        "tests/test_hooks.py::test_what_is_renamed_is_named_and_nothing_is_half_installed[False-post_init]",
    ),
    Mutation(
        Part.MOVING_TRANSFORMERS,
        "what was replaced is put back where a later hook fails",
        "rsa_hf/hooks/replacing.py",
        "for done, before in reversed(replaced):",
        "for done, before in []:",
        "tests/test_hooks.py::test_a_function_that_cannot_be_replaced_undoes_the_others",
    ),
    Mutation(
        Part.MOVING_TRANSFORMERS,
        "a class that is missing is told with the versions that fit",
        "rsa_hf/arming.py",
        "except ImportError as error:",
        "except ZeroDivisionError as error:",
        "tests/test_hooks.py::test_what_is_renamed_is_named_and_nothing_is_half_installed[False-ContinuousMixin]",
    ),
    Mutation(
        Part.MOVING_TRANSFORMERS,
        "a PEFT that has moved is a warning where adapters are not used",
        "rsa_hf/peft_hooks.py",
        "    try:\n        install()\n    except ImportError as error:",
        "    try:\n        install()\n    except ZeroDivisionError as error:",
        "tests/test_hooks.py::test_what_is_renamed_is_named_and_nothing_is_half_installed[True-inject_adapter]",
    ),
    Mutation(
        Part.MOVING_TRANSFORMERS,
        "the parameters of each method with an adapter are checked",
        "rsa_hf/adapters.py",
        "if not callable(original) or missing:",
        "if not callable(original):",
        "tests/test_adapters.py::test_a_moved_method_is_named_and_nothing_is_installed[other parameters]",
    ),
    Mutation(
        Part.SOAK,
        "losses are forgotten once they are logged",
        "rsa_hf/training/loop.py",
        "progress.losses = []",
        "progress.losses = progress.losses[:]",
        "tests/reliability/test_soak.py::test_a_long_run_stays_flat",
    ),
    Mutation(
        Part.SOAK,
        "the log is closed after each line",
        "rsa_hf/training/metrics_log.py",
        'with self.path.open("a", encoding="utf-8") as file:\n            file.write(line + "\\n")',
        'file = self.path.open("a", encoding="utf-8")\n        file.write(line + "\\n")\n        vars(self).setdefault("files", []).append(file)',
        "tests/reliability/test_soak.py::test_a_long_run_stays_flat",
    ),
    Mutation(
        Part.DOCTOR,
        "identity compares shut gates with the plain model",
        "rsa_hf/cli/doctor_model/identity.py",
        'Finding("ok" if same else "FAIL", "identity", words)',
        'Finding("ok", "identity", words)',
        "tests/test_doctor_model.py::test_what_is_broken_is_found[not quite shut-False]",
    ),
    Mutation(
        Part.DOCTOR,
        "unpatching is compared with the model before",
        "rsa_hf/cli/doctor_model/identity.py",
        'Finding("FAIL" if problem else "ok", "unpatching"',
        'Finding("ok", "unpatching"',
        "tests/test_doctor_model.py::test_what_is_broken_is_found[one left behind-False]",
    ),
    Mutation(
        Part.DOCTOR,
        "reload moves rates off their starts before it saves",
        "rsa_hf/cli/doctor_model/reload.py",
        "            parameter.add_(0.01 * (1 + i % 7))",
        "            pass",
        "tests/test_doctor_model.py::test_what_is_broken_is_found[rates lost-False]",
    ),
    Mutation(
        Part.DOCTOR,
        "effect requires RSA heads to do something",
        "rsa_hf/cli/doctor_model/effect.py",
        'Finding("ok" if works else "FAIL"',
        'Finding("ok"',
        "tests/test_doctor_model.py::test_what_is_broken_is_found[does nothing-False]",
    ),
    Mutation(
        Part.DOCTOR,
        "causality compares outputs before a changed token",
        "rsa_hf/cli/doctor_model/causality.py",
        "if found <= NOTHING:",
        "if True:",
        "tests/test_doctor_model.py::test_what_is_broken_is_found[other direction-False]",
    ),
    Mutation(
        Part.DOCTOR,
        "causality reports a plain model that breaks its word",
        "rsa_hf/cli/doctor_model/causality.py",
        "        if causal:",
        "        if False:",
        "tests/test_doctor_model.py::test_attention_that_ignores_causality_is_found[False]",
    ),
    Mutation(
        Part.DOCTOR,
        "cache compares pieces with the whole",
        "rsa_hf/cli/doctor_model/cache.py",
        'Finding("ok" if off <= TOLERANCE else "FAIL"',
        'Finding("ok"',
        "tests/test_doctor_model.py::test_what_is_broken_is_found[offset forgotten-False]",
    ),
    Mutation(
        Part.DOCTOR,
        "padding compares a row in a batch with the row alone",
        "rsa_hf/cli/doctor_model/padding.py",
        'Finding("ok" if off <= TOLERANCE else "FAIL"',
        'Finding("ok"',
        "tests/test_doctor_model.py::test_what_is_broken_is_found[mask ignored-False]",
    ),
    Mutation(
        Part.DOCTOR,
        "a check that breaks off is a failure",
        "rsa_hf/cli/findings.py",
        'yield Finding("FAIL", subject',
        'yield Finding("note", subject',
        "tests/test_doctor_model.py::test_a_check_that_breaks_off_is_a_failure",
    ),
]
