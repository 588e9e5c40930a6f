"""A run killed with SIGKILL resumes as if it had not been interrupted: the Trainer, both scripts, and their loop."""

import re
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from transformers.trainer_utils import get_last_checkpoint

from reliability import runs
from reliability.record import SEED, Part, is_full, note
from reliability.runs import Moment, run_in_process
from rsa_hf.training.checkpoints import CheckpointFolder
from rsa_hf.training.trainer import newest_whole_checkpoint

KINDS = {
    "the Trainer": runs.trainer,
    "scripts/train_language_model.py": runs.language_model,
    "scripts/train_defect_detection.py": runs.defect_detection,
}
TORN = "of these while a checkpoint was written or deleted"


def moments(run, kills, duration):
    """Half of the moments are at any time; half just before a file event of a checkpoint, or milliseconds after it."""
    random = Random(SEED)
    for i in range(20 * kills):  # a moment may come after the end of a run
        if i % 2:
            delay = random.choice([None, random.uniform(0, 0.01)])
            yield Moment(run.checkpoint, random.randint(1, 30), delay)
        else:
            yield Moment("/(whole|parts[^/]*)/", 1, random.uniform(0, duration / 2))
    raise AssertionError(f"{kills} kills were not reached")


@pytest.mark.slow  # starts processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_killed_at_random_moments_ends_bitwise_the_same(kind, tmp_path):
    kills = 20 if is_full() else 4
    run, log = KINDS[kind](tmp_path), tmp_path / "log.txt"

    def start(folder, moment=None):
        code = run_in_process(run.target, run.arguments(tmp_path / folder), log, moment)
        assert code in (0, -signal.SIGKILL), log.read_text()
        return code != 0

    run_in_process(time.sleep, (0,), log)  # starts the server, so that the next run is measured alone
    began = time.monotonic()
    assert not start("whole")
    moment = moments(run, kills, time.monotonic() - began)
    expected = run.result(tmp_path / "whole")
    outcomes = Counter()
    while outcomes["killed"] < kills:
        folder = f"parts-{outcomes['killed']}"
        while start(folder, next(moment) if outcomes["killed"] < kills else None):
            outcomes["killed"] += 1
            outcomes[TORN] += run.is_torn(tmp_path / folder)
            run.require_whole(tmp_path / folder)
        assert run.result(tmp_path / folder) == expected
        outcomes["runs finished, bitwise as the uninterrupted one"] += 1
        shutil.rmtree(tmp_path / folder)
    assert outcomes[TORN] >= kills // 5
    note(Part.CRASH, f"{kind}: SIGKILL, then the same command again", outcomes, SEED)


@pytest.mark.slow  # starts processes
@pytest.mark.timeout(900)
def test_a_loop_killed_before_a_file_event_ends_bitwise_the_same(tmp_path):
    """Kill it just before a file in checkpoints/ is opened, renamed or removed, at one event after the other."""
    log, every = tmp_path / "log.txt", 1 if is_full() else 5
    assert run_in_process(runs.train_loop, (tmp_path / "whole",), log) == 0, log.read_text()
    expected = runs.result(tmp_path / "whole")
    outcomes = Counter()
    for event in range(1, 10_000, every):
        parts = tmp_path / f"parts-{event}"
        code = run_in_process(runs.train_loop, (parts,), log, Moment("checkpoints/", event))
        if code == 0:
            break
        assert code == -signal.SIGKILL, log.read_text()
        runs.require_whole(parts)
        outcomes["killed"] += 1
        outcomes[TORN] += runs.is_torn(parts)
        runs.train_loop(parts)
        assert runs.result(parts) == expected
        outcomes["resumed bitwise"] += 1
    assert outcomes[TORN] >= 3
    note(
        Part.CRASH,
        f"the loop of both scripts: SIGKILL before {'every' if is_full() else 'every fifth'} file event",
        outcomes,
    )


def test_a_checkpoint_has_its_name_only_while_it_is_complete(tmp_path, monkeypatch):
    """It gets its name last, and loses it before its files are deleted."""
    rename, remove, happened = Path.rename, shutil.rmtree, Counter()

    def renamed(self, target):
        if re.fullmatch(r"step-\d+", target.name):
            runs.content(self)
            happened["named"] += 1
        return rename(self, target)

    def rmtree(folder, **keywords):
        assert Path(folder).name.startswith(".")
        happened["deleted"] += 1
        remove(folder, **keywords)

    monkeypatch.setattr(Path, "rename", renamed)
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    runs.train_loop(tmp_path / "run")
    assert happened["named"] == 4
    assert happened["deleted"] >= 2


# --- the newest complete checkpoint --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    runs.train_loop(folder)
    return folder


@pytest.fixture
def run(finished, tmp_path):
    """A copy of a finished run."""
    return shutil.copytree(finished, tmp_path / "run")


def halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


FILES = ("model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl", "progress.json")


@pytest.mark.parametrize("damage", [halve, Path.unlink], ids=["truncated", "missing"])
def test_a_damaged_checkpoint_is_skipped(damage, run, finished, caplog):
    for file in FILES:
        damage(run / "checkpoints" / "step-4" / file)
        caplog.clear()
        runs.train_loop(run)
        assert runs.result(run) == runs.result(finished)
        # A folder without progress.json is no checkpoint.
        if (file, damage) != ("progress.json", Path.unlink):
            assert "step-4 is damaged" in caplog.text and "step-3, the newest intact one" in caplog.text


def test_without_a_complete_checkpoint_resuming_is_an_error(run, finished):
    for step in (3, 4):
        halve(run / "checkpoints" / f"step-{step}" / "optimizer.bin")
    words = r"step-4 is damaged: optimizer.bin has .* bytes, of .*step-3 is damaged.*'never'"
    with pytest.raises(ValueError, match=words):
        runs.train_loop(run)
    with pytest.raises(ValueError, match="step-4 is not an intact checkpoint"):
        runs.train_loop(run, resume=str(run / "checkpoints" / "step-4"))
    runs.train_loop(run, resume="never")
    assert runs.result(run) == runs.result(finished)


LEFTOVERS = {
    "partial folders": ("best", "checkpoints/.step-7.tmp", ".best.tmp", ".final.old"),
    "an old checkpoint": ("checkpoints/step-3", "checkpoints/step-2"),
}


@pytest.mark.parametrize("what", LEFTOVERS)
def test_leftovers_of_a_killed_run_are_deleted(what, run, finished):
    """Also if the run was at its end, or resumes with other intervals and never writes that name again."""
    copied, *names = LEFTOVERS[what]
    for name in names:
        shutil.copytree(run / copied, run / name)
    runs.train_loop(run)
    assert runs.result(run) == runs.result(finished)


def test_a_run_resumes_from_an_older_checkpoint(run, finished, monkeypatch):
    """Newer checkpoints are deleted at once, so that a run interrupted then does not continue from them."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(CheckpointFolder, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runs.train_loop(run, resume=str(run / "checkpoints" / "step-3"))
    assert [path.name for path in runs.checkpoints(run)] == ["step-3"]
    monkeypatch.undo()
    runs.train_loop(run)
    assert runs.result(run) == runs.result(finished)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    runs.train_with_trainer(folder, max_steps=4, save_steps=2, eval_strategy="no")
    return folder


TRAINER_FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")


@pytest.mark.parametrize("file", TRAINER_FILES)
def test_a_truncated_checkpoint_of_the_trainer_is_skipped(file, trained, tmp_path, caplog):
    """A killed process leaves one file truncated, and without the files that are written after it."""
    folder = shutil.copytree(trained, tmp_path / "run")
    newest, later = folder / "checkpoint-4", TRAINER_FILES[TRAINER_FILES.index(file) + 1 :]
    assert newest_whole_checkpoint(folder) == str(newest)
    for name in later:
        (newest / name).unlink()
    halve(newest / file)
    assert get_last_checkpoint(folder) == str(newest)  # the Trainer's own choice
    assert newest_whole_checkpoint(folder) == str(folder / "checkpoint-2")
    assert "checkpoint-4 is incomplete and is not used" in caplog.text
    # A power failure leaves all files after it.
    for name in later:
        shutil.copy(trained / "checkpoint-4" / name, newest / name)
    assert newest_whole_checkpoint(folder) == str(folder / "checkpoint-2")
    shutil.rmtree(folder / "checkpoint-2")
    assert newest_whole_checkpoint(folder) is None


def test_the_trainer_itself_fails_on_a_partial_checkpoint(trained, tmp_path, monkeypatch):
    folder = shutil.copytree(trained, tmp_path / "run")
    (folder / "checkpoint-4" / "trainer_state.json").unlink()
    monkeypatch.setattr(runs, "newest_whole_checkpoint", lambda folder: True)
    with pytest.raises(FileNotFoundError, match="trainer_state.json"):
        runs.train_with_trainer(folder, max_steps=4, save_steps=2, eval_strategy="no")


def test_the_newest_checkpoint_of_the_trainer_is_found_by_number(trained, tmp_path):
    assert newest_whole_checkpoint(tmp_path) is None
    assert newest_whole_checkpoint(tmp_path / "absent") is None
    (tmp_path / "checkpoint-last").mkdir()
    (tmp_path / "checkpoint-3").write_text("a file")
    assert newest_whole_checkpoint(tmp_path) is None
    for step in (10, 9):
        shutil.copytree(trained / "checkpoint-4", tmp_path / f"checkpoint-{step}")
    assert newest_whole_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-10")
