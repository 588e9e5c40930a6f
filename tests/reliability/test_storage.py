"""A full disk, a limit on file sizes, a read-only folder, a second writer: what was saved stays, the error says what to do."""

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
from reliability.killed import SERVER, assert_equal, run_in_process
from reliability.record import Part, note
from rsa_hf import RSAConfig, cli, patch_model
from rsa_hf.training.checkpoints import CheckpointFolder
from rsa_hf.training.trainer import newest_whole_checkpoint
from rsa_hf.utils.files import StorageError, put_in_place, recover, sole_writer, written_whole

SMALL = 2**20  # bytes of a small disk


def mount(folder: Path, *options: str) -> None:
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", ",".join([f"size={SMALL}", *options]), "tmpfs", str(folder)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip(f"a small disk has to be mounted, which this user may not ({done.stderr.strip()})")


@pytest.fixture
def disk(tmp_path):
    """A folder on a disk of a megabyte."""
    if shutil.which("mount") is None:
        pytest.skip("a small disk has to be mounted, and there is no mount command")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount(folder)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)  # a traceback may still hold a file


def fill(disk: Path, left: int) -> Path:
    """Write a file that leaves so many bytes of a disk."""
    free = shutil.disk_usage(disk).free
    (disk / "filler").write_bytes(bytes(max(free - left, 0)))
    return disk / "filler"


@contextmanager
def file_size_limit(size: int):
    """No file may become larger: what `ulimit -f` sets, for this process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def before_third_save(monkeypatch):
    """Lets a function be called before the third checkpoint of a run is written."""

    def install(function):
        original, count = CheckpointFolder._write, 0

        def write(self, *arguments):
            nonlocal count
            count += 1
            if count == 3:
                function()
            return original(self, *arguments)

        monkeypatch.setattr(CheckpointFolder, "_write", write)

    yield install
    monkeypatch.undo()


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    runs.train_loop(folder)
    return runs.result(folder)


def hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob(".*") if path.name != ".lock")


# --- the loop of the scripts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [0, 8_000, 20_000, 40_000])
def test_full_disk(disk, left, before_third_save, monkeypatch, expected):
    """The disk is filled while the run goes on; how far the third checkpoint gets depends on what is left."""
    folder = disk / "run"
    before_third_save(lambda: fill(disk, left))
    with pytest.raises(StorageError) as error:
        runs.train_loop(folder)
    assert str(folder / "checkpoints") in str(error.value)
    assert "Free some disk space" in str(error.value)
    assert f"can continue from {folder / 'checkpoints' / 'step-2'}" in str(error.value)
    assert hidden(folder) == []  # what could not be completed takes no space
    assert [path.name for path in runs.checkpoints(folder)] == ["step-1", "step-2"]
    runs.check_checkpoints(folder)
    (disk / "filler").unlink()
    monkeypatch.undo()
    runs.train_loop(folder)
    assert_equal(runs.result(folder), expected, "continued")
    note(Part.STORAGE, f"full disk, {left:,} bytes left", {"refused, named, and continued bitwise": 1})


@pytest.mark.parametrize("size", [1_000, 6_000, 12_000])
def test_file_size_limit(tmp_path, size, before_third_save, monkeypatch, expected):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    before_third_save(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1])))
    try:
        with pytest.raises(StorageError) as error:
            runs.train_loop(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "raise the limit on file sizes (ulimit -f)" in str(error.value)
    assert f"can continue from {tmp_path / 'checkpoints' / 'step-2'}" in str(error.value)
    assert hidden(tmp_path) == []
    monkeypatch.undo()
    runs.train_loop(tmp_path)
    assert_equal(runs.result(tmp_path), expected, "continued")
    note(Part.STORAGE, f"files of at most {size:,} bytes", {"refused, named, and continued bitwise": 1})


def test_no_checkpoint_yet(tmp_path):
    with file_size_limit(500), pytest.raises(StorageError, match=r"No checkpoint was saved yet\.$"):
        runs.train_loop(tmp_path / "run")


def test_a_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "run").write_text("something else")
    with pytest.raises(StorageError, match=r"cannot write to .*/run: .*; or choose another folder"):
        runs.train_loop(tmp_path / "run")
    assert (tmp_path / "run").read_text() == "something else"
    note(Part.STORAGE, "a file where the folder should be", {"refused and named": 1})


def test_read_only(disk, before_third_save, monkeypatch, expected):
    """A run broke off, and its disk has become read-only; when it can be written again, the run goes on."""
    folder = disk / "run"

    def stop():
        raise KeyboardInterrupt

    before_third_save(stop)
    with pytest.raises(KeyboardInterrupt):
        runs.train_loop(folder)
    monkeypatch.undo()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    try:
        with pytest.raises(StorageError, match=r"Read-only file system\. .*make the folder writable; or choose"):
            runs.train_loop(folder)
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    runs.train_loop(folder)
    assert_equal(runs.result(folder), expected, "continued")
    note(Part.STORAGE, "read-only folder", {"refused, named, and continued bitwise": 1})


def test_errors_of_others_stay_what_they_are(tmp_path):
    with pytest.raises(RuntimeError, match="^out of memory$"), written_whole(tmp_path / "x"):
        raise RuntimeError("out of memory")


# --- two processes -------------------------------------------------------------------------------------------------


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow  # a process
def test_two_processes_and_one_folder(tmp_path, expected):
    """The first waits in the middle of its run; the second is refused and changes nothing; the first goes on."""
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
    assert_equal(runs.result(folder), expected, "the first")
    note(Part.STORAGE, "a second process in the folder of a run", {"refused and named, nothing mixed": 2})


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


def test_one_writer_at_a_time(tmp_path):
    with sole_writer(tmp_path), pytest.raises(StorageError, match="another process is writing into"):
        runs.train_loop(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] in ([], [".lock"])
    runs.train_loop(tmp_path)


@pytest.mark.slow  # a process
def test_a_killed_process_holds_nothing(tmp_path):
    """What it held the folder with goes with it."""
    child = SERVER.Process(target=_hold, args=(tmp_path,), daemon=True)
    child.start()
    wait_for(tmp_path / "held", child)
    with pytest.raises(StorageError), sole_writer(tmp_path):
        pass
    child.kill()
    child.join()
    with sole_writer(tmp_path):
        pass


def _hold(folder):
    with sole_writer(folder):
        (folder / "held").touch()
        time.sleep(60)


# --- the scripts, the command line -----------------------------------------------------------------------------------


def limited(size, target, *arguments):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    target(*arguments)


def run_command(arguments):
    sys.argv = ["rsa-hf", *arguments]
    cli.main()


@pytest.mark.slow  # processes
@pytest.mark.parametrize("command", ["train_language_model.py", "train_defect_detection.py", "rsa-hf train lm"])
def test_no_traceback_reaches_the_user(tmp_path, command):
    made = (runs.defect_detection if "defect" in command else runs.language_model)(tmp_path)
    name, options = made.arguments(tmp_path / "out")
    target, arguments = (
        (run_command, (["train", "lm", *options],)) if " " in command else (made.target, (name, options))
    )
    log = tmp_path / "log.txt"
    assert run_in_process(limited, (20_000, target, *arguments), log) == 2
    last = log.read_text().splitlines()[-1]
    assert last.startswith(f"error: cannot write to {tmp_path / 'out'}")
    assert "raise the limit on file sizes (ulimit -f)" in last
    assert "Traceback" not in log.read_text()
    note(Part.STORAGE, f"{command} with a limit on file sizes", {"one line, exit code 2": 1})


# --- the Trainer, save_pretrained ------------------------------------------------------------------------------------


def test_the_trainer_on_a_full_disk(tmp_path, monkeypatch):
    """transformers writes in place and raises in its own words; the checkpoint before is found and gone on from."""
    steps = {"max_steps": 12, "save_steps": 4, "save_total_limit": None, "eval_strategy": "no"}
    runs.train_with_trainer(tmp_path / "whole", **steps)
    original, before = Trainer._save_checkpoint, resource.getrlimit(resource.RLIMIT_FSIZE)

    def save(self, *arguments, **keywords):
        if self.state.global_step == 8:
            resource.setrlimit(resource.RLIMIT_FSIZE, (120_000, before[1]))  # the weights fit, the optimiser does not
        return original(self, *arguments, **keywords)

    monkeypatch.setattr(Trainer, "_save_checkpoint", save)
    try:
        with pytest.raises((RuntimeError, OSError, SafetensorError)):
            runs.train_with_trainer(tmp_path / "parts", **steps)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    monkeypatch.undo()
    assert (tmp_path / "parts" / "checkpoint-8").exists()  # torn
    assert newest_whole_checkpoint(tmp_path / "parts") == str(tmp_path / "parts" / "checkpoint-4")
    runs.train_with_trainer(tmp_path / "parts", **steps)
    found, whole = (runs.trainer_content(tmp_path / name / "checkpoint-12") for name in ("parts", "whole"))
    assert_equal(found, whole, "continued")
    note(Part.STORAGE, "the Trainer at a file-size limit", {"refused in transformers' words, continued bitwise": 1})


def small_model(dilation):
    torch.manual_seed(dilation)
    config = GPT2Config(n_layer=1, n_embd=32, n_head=4, n_positions=32, vocab_size=64)
    return patch_model(GPT2LMHeadModel(config), RSAConfig(num_dilated_regular=2, dilation=dilation))


def test_save_pretrained_over_a_saved_model(tmp_path):
    """In place it leaves another model's config beside the old weights, and says so; in `written_whole`, the old one."""
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
    assert_equal(dict(kept.state_dict()), dict(old.state_dict()), "the old one")
    with written_whole(tmp_path / "whole") as folder:
        new.save_pretrained(folder)
    replaced = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert_equal(dict(replaced.state_dict()), dict(new.state_dict()), "the new one")
    note(
        Part.STORAGE, "save_pretrained in written_whole, at a file-size limit", {"refused, the old model is whole": 1}
    )


# --- folders that are replaced ---------------------------------------------------------------------------------------


def test_files_are_on_the_disk_before_they_get_their_name(tmp_path, monkeypatch):
    """After a loss of power a folder may not have its name without its content."""
    happened = []
    flush, rename = os.fsync, Path.rename

    def fsync(descriptor):
        happened.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        return flush(descriptor)

    def renamed(self, target):
        happened.append(f"{self.name} -> {target.name}")
        return rename(self, target)

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("which file is flushed is read from /proc, which this system does not have")
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", renamed)
    with written_whole(tmp_path / "x") as folder:
        (folder / "a").write_text("a")
        (folder / "deeper").mkdir()
        (folder / "deeper" / "b").write_text("b")
    named = happened.index(".x.tmp -> x")
    assert set(happened[:named]) == {"a", "b", "deeper", ".x.tmp"}
    assert happened[named + 1 :] == [tmp_path.name]


def test_what_was_moved_aside_comes_back(tmp_path):
    """Killed between the two renames that replace a folder."""
    (tmp_path / ".x.old").mkdir()
    (tmp_path / ".x.old" / "a").write_text("old")
    (tmp_path / ".x.tmp").mkdir()
    recover(tmp_path / "x")
    assert snapshot(tmp_path) == {"x/a": b"old"}
    # Killed before the old one was deleted.
    shutil.copytree(tmp_path / "x", tmp_path / ".x.old")
    (tmp_path / "x" / "a").write_text("new")
    recover(tmp_path / "x")
    assert snapshot(tmp_path) == {"x/a": b"new"}
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_link_to_a_folder_stays_one(tmp_path):
    """Models on a larger disk, under a name in the folder of the project."""
    large, link = tmp_path / "large", tmp_path / "x"
    large.mkdir()
    link.symlink_to(large / "model")
    for text in ("new", "newer"):  # where nothing is yet, and over a model
        with written_whole(link) as folder:
            (folder / "a").write_text(text)
        assert link.is_symlink() and snapshot(large) == {"model/a": text.encode()}
    (large / "model").rename(large / ".model.old")
    recover(link)
    assert [path.name for path in large.iterdir()] == ["model"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large", "x"]


def test_a_file_is_not_replaced_by_a_folder(tmp_path):
    (tmp_path / "x").write_text("something else")
    with pytest.raises(StorageError, match="x is a file"), written_whole(tmp_path / "x"):
        pass
    assert snapshot(tmp_path) == {"x": b"something else"}


def test_a_folder_is_never_gone_while_it_is_replaced(tmp_path, monkeypatch):
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
