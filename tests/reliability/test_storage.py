"""A full disk, a file-size limit, a read-only folder or a second writer loses nothing, and errors say what to do."""

import os
import resource
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Trainer

from reliability import runs
from reliability.record import Part, note
from reliability.runs import SERVER, bitwise, run_in_process
from rsa_hf import RSAConfig, cli, patch_model
from rsa_hf.training.checkpoints import CheckpointFolder
from rsa_hf.training.trainer import newest_whole_checkpoint
from rsa_hf.utils.files import StorageError, put_in_place, recover, sole_writer, written_whole

RESUMED = {"error with a remedy, then resumed bitwise": 1}


@pytest.fixture
def disk(tmp_path):
    """A folder on a disk of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1M", "tmpfs", folder], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounts a small disk, which this user may not do")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)  # a traceback may still hold a file


@contextmanager
def file_size_limit(size=None):
    """Restore the file-size limit (`ulimit -f`) afterwards; with a size, set it first."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if size is not None:
            limit_file_sizes(size)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def limit_file_sizes(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.fixture
def before_third_save(monkeypatch):
    """Call a function before a run writes its third checkpoint, until `monkeypatch.undo`."""

    def install(function):
        original, count = CheckpointFolder._write, 0

        def write(self, *arguments):
            nonlocal count
            count += 1
            if count == 3:
                function()
            return original(self, *arguments)

        monkeypatch.setattr(CheckpointFolder, "_write", write)

    return install


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    runs.train_loop(folder)
    return runs.result(folder)


# --- the loop of the scripts ---------------------------------------------------------------------------------------


def require_two_checkpoints(folder, error):
    assert f"can continue from {folder / 'checkpoints' / 'step-2'}" in str(error.value)
    assert [path.name for path in folder.rglob(".*") if path.name != ".lock"] == []  # no partial folder takes space
    assert [path.name for path in runs.checkpoints(folder)] == ["step-1", "step-2"]
    runs.require_whole(folder)


@pytest.mark.parametrize("left", [0, 8_000, 20_000, 40_000])
def test_a_run_stopped_by_a_full_disk_resumes_bit_for_bit(disk, left, before_third_save, monkeypatch, expected):
    """The disk is filled during the run. What is left determines how far the third checkpoint gets."""
    folder, filler = disk / "run", disk / "filler"
    before_third_save(lambda: filler.write_bytes(bytes(max(shutil.disk_usage(disk).free - left, 0))))
    with pytest.raises(StorageError, match="Free some disk space") as error:
        runs.train_loop(folder)
    assert str(folder / "checkpoints") in str(error.value)
    require_two_checkpoints(folder, error)
    filler.unlink()
    monkeypatch.undo()
    runs.train_loop(folder)
    assert runs.result(folder) == expected
    note(Part.STORAGE, f"full disk, {left:,} bytes left", RESUMED)


@pytest.mark.parametrize("size", [1_000, 6_000, 12_000])
def test_a_run_stopped_by_a_file_size_limit_resumes_bit_for_bit(
    tmp_path, size, before_third_save, monkeypatch, expected
):
    before_third_save(lambda: limit_file_sizes(size))
    with file_size_limit(), pytest.raises(StorageError, match="raise the limit on file sizes .ulimit -f.") as error:
        runs.train_loop(tmp_path)
    require_two_checkpoints(tmp_path, error)
    monkeypatch.undo()
    runs.train_loop(tmp_path)
    assert runs.result(tmp_path) == expected
    note(Part.STORAGE, f"files of at most {size:,} bytes", RESUMED)


def test_an_error_before_the_first_checkpoint_says_so(tmp_path):
    with file_size_limit(500), pytest.raises(StorageError, match=r"No checkpoint was saved yet\.$"):
        runs.train_loop(tmp_path / "run")


def test_a_file_in_place_of_the_folder_is_an_error(tmp_path):
    (tmp_path / "run").write_text("something else")
    with pytest.raises(StorageError, match=r"cannot write to .*/run: .*; or choose another folder"):
        runs.train_loop(tmp_path / "run")
    with pytest.raises(StorageError, match="run is a file"), written_whole(tmp_path / "run"):
        pass
    assert snapshot(tmp_path) == {"run": b"something else"}
    note(Part.STORAGE, "a file where the folder should be", {"error with a remedy": 1})


def test_a_run_stopped_by_a_read_only_disk_resumes_bit_for_bit(disk, before_third_save, monkeypatch, expected):
    """The disk of an interrupted run becomes read-only, and then writable again."""
    folder = disk / "run"

    def stop():
        raise KeyboardInterrupt

    before_third_save(stop)
    with pytest.raises(KeyboardInterrupt):
        runs.train_loop(folder)
    monkeypatch.undo()
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    try:
        with pytest.raises(StorageError, match=r"Read-only file system\. .*make the folder writable; or choose"):
            runs.train_loop(folder)
    finally:
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    runs.train_loop(folder)
    assert runs.result(folder) == expected
    note(Part.STORAGE, "read-only folder", RESUMED)


# --- two processes -------------------------------------------------------------------------------------------------


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow  # trains in another process
def test_a_second_process_is_kept_out_of_the_folder_of_a_run(tmp_path, expected):
    """The first process waits during its run. The second fails and changes nothing. Then the first continues."""
    folder, waits, go = (tmp_path / name for name in ("run", "waits", "go"))
    first = SERVER.Process(target=_train_and_wait, args=(folder, waits, go), daemon=True)
    first.start()
    wait_for(waits, first)
    before = snapshot(folder)
    with pytest.raises(StorageError, match=r"another process is writing into .*/run \(it holds .*\)\. Wait until"):
        runs.train_loop(folder)
    with pytest.raises(StorageError, match="another process"):
        runs.train_loop(folder, resume="never")
    assert snapshot(folder) == before
    go.touch()
    first.join(60)
    assert first.exitcode == 0
    assert runs.result(folder) == expected
    note(Part.STORAGE, "a second process in the folder of a run", {"error with a remedy, nothing mixed": 2})


def wait_for(path: Path, process) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.002)


def _train_and_wait(folder, waits, go):
    original = CheckpointFolder._write

    def write(self, *arguments):
        if len(runs.checkpoints(folder)) == 2 and not waits.exists():
            waits.touch()
            while not go.exists():
                time.sleep(0.002)
        return original(self, *arguments)

    CheckpointFolder._write = write
    runs.train_loop(folder)


def test_a_run_needs_the_lock_of_its_folder(tmp_path):
    with sole_writer(tmp_path), pytest.raises(StorageError, match="another process is writing into"):
        runs.train_loop(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] in ([], [".lock"])
    runs.train_loop(tmp_path)


# --- the scripts, the command line -----------------------------------------------------------------------------------


def limited(size, target, *arguments):
    limit_file_sizes(size)
    target(*arguments)


def run_command(arguments):
    sys.argv = ["rsa-hf", *arguments]
    cli.main()


@pytest.mark.slow  # starts processes
@pytest.mark.parametrize("command", ["train_language_model.py", "train_defect_detection.py", "rsa-hf train lm"])
def test_a_storage_error_is_one_line_without_a_traceback(tmp_path, command):
    run, log = (runs.defect_detection if "defect" in command else runs.language_model)(tmp_path), tmp_path / "log.txt"
    name, options = run.arguments(tmp_path / "out")
    called = (run_command, ["train", "lm", *options]) if " " in command else (run.target, name, options)
    assert run_in_process(limited, (20_000, *called), log) == 2
    last = log.read_text().splitlines()[-1]
    assert last.startswith(f"error: cannot write to {tmp_path / 'out'}")
    assert "raise the limit on file sizes (ulimit -f)" in last
    assert "Traceback" not in log.read_text()
    note(Part.STORAGE, f"{command} with a limit on file sizes", {"one line, exit code 2": 1})


# --- the Trainer, save_pretrained ------------------------------------------------------------------------------------


def test_a_trainer_stopped_by_a_file_size_limit_resumes_bit_for_bit(tmp_path, monkeypatch):
    """transformers writes in place and raises its own error. The checkpoint before is found and resumed from."""
    steps = {"max_steps": 12, "save_steps": 4, "save_total_limit": None, "eval_strategy": "no"}
    runs.train_with_trainer(tmp_path / "whole", **steps)
    original = Trainer._save_checkpoint

    def save(self, *arguments, **keywords):
        if self.state.global_step == 8:
            limit_file_sizes(120_000)  # the weights fit, the optimiser does not
        return original(self, *arguments, **keywords)

    monkeypatch.setattr(Trainer, "_save_checkpoint", save)
    with file_size_limit(), pytest.raises((RuntimeError, OSError, SafetensorError)):
        runs.train_with_trainer(tmp_path / "parts", **steps)
    monkeypatch.undo()
    assert (tmp_path / "parts" / "checkpoint-8").exists()  # partial
    assert newest_whole_checkpoint(tmp_path / "parts") == str(tmp_path / "parts" / "checkpoint-4")
    runs.train_with_trainer(tmp_path / "parts", **steps)
    found, whole = (runs.trainer_content(tmp_path / name / "checkpoint-12") for name in ("parts", "whole"))
    assert found == whole
    note(Part.STORAGE, "the Trainer at a file-size limit", {"error of transformers, then resumed bitwise": 1})


def small_model(dilation):
    torch.manual_seed(dilation)
    config = GPT2Config(n_layer=1, n_embd=32, n_head=4, n_positions=32, vocab_size=64)
    return patch_model(GPT2LMHeadModel(config), RSAConfig(num_dilated_regular=2, dilation=dilation))


def test_saving_over_a_model_keeps_the_old_one_until_the_new_one_is_complete(tmp_path):
    """In place, save_pretrained fails and mixes two models. In `written_whole` it keeps the old one."""
    old, new = small_model(2), small_model(3)
    for name in ("in place", "whole"):
        old.save_pretrained(tmp_path / name)
    with file_size_limit(20_000), pytest.raises(SafetensorError, match="os error 27"):
        new.save_pretrained(tmp_path / "in place")
    before = snapshot(tmp_path / "whole")
    refused = pytest.raises(StorageError, match="cannot write to")
    with file_size_limit(20_000), refused, written_whole(tmp_path / "whole") as folder:
        new.save_pretrained(folder)
    assert snapshot(tmp_path / "whole") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in place", "whole"]
    kept = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert bitwise(kept.state_dict()) == bitwise(old.state_dict())
    with written_whole(tmp_path / "whole") as folder:
        new.save_pretrained(folder)
    replaced = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert bitwise(replaced.state_dict()) == bitwise(new.state_dict())
    what = "save_pretrained in written_whole, at a file-size limit"
    note(Part.STORAGE, what, {"error, the old model is complete": 1})


# --- folders that are replaced ---------------------------------------------------------------------------------------


def test_files_are_flushed_before_they_get_their_name(tmp_path, monkeypatch):
    """After a power failure, a folder must not have its name without its content."""
    happened = []
    flush, rename = os.fsync, Path.rename

    def fsync(descriptor):
        happened.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        return flush(descriptor)

    def renamed(self, target):
        happened.append(f"{self.name} -> {target.name}")
        return rename(self, target)

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("reads the names of flushed files from /proc, which this system does not have")
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", renamed)
    with written_whole(tmp_path / "x") as folder:
        (folder / "a").write_text("a")
        (folder / "deeper").mkdir()
        (folder / "deeper" / "b").write_text("b")
    named = happened.index(".x.tmp -> x")
    assert set(happened[:named]) == {"a", "b", "deeper", ".x.tmp"}
    assert happened[named + 1 :] == [tmp_path.name]


def test_a_folder_that_was_moved_aside_is_moved_back(tmp_path):
    """As after a kill between the two renames that replace a folder."""
    (tmp_path / ".x.old").mkdir()
    (tmp_path / ".x.old" / "a").write_text("old")
    (tmp_path / ".x.tmp").mkdir()
    recover(tmp_path / "x")
    assert snapshot(tmp_path) == {"x/a": b"old"}
    # As after a kill before the old one was deleted.
    shutil.copytree(tmp_path / "x", tmp_path / ".x.old")
    (tmp_path / "x" / "a").write_text("new")
    recover(tmp_path / "x")
    assert snapshot(tmp_path) == {"x/a": b"new"}
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_link_to_a_folder_stays_a_link(tmp_path):
    """A link may lead to a model on a larger disk."""
    large, link = tmp_path / "large", tmp_path / "x"
    large.mkdir()
    link.symlink_to(large / "model")
    for text in ("new", "newer"):  # to an empty place, and over a model
        with written_whole(link) as folder:
            (folder / "a").write_text(text)
        assert link.is_symlink() and snapshot(large) == {"model/a": text.encode()}
    (large / "model").rename(large / ".model.old")
    recover(link)
    assert [path.name for path in large.iterdir()] == ["model"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large", "x"]


def test_a_folder_exists_at_all_times_while_it_is_replaced(tmp_path, monkeypatch):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "a").write_text("old")
    (tmp_path / ".x.tmp").mkdir()
    remove = shutil.rmtree

    def rmtree(folder, **keywords):
        assert Path(folder).name == ".x.old" and (tmp_path / "x").is_dir()
        remove(folder, **keywords)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    put_in_place(tmp_path / "x")
    assert list((tmp_path / "x").iterdir()) == []
