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
]
