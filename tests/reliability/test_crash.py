"""A run that is killed with SIGKILL goes on as if it had not been: the Trainer, both scripts, and their loop."""

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
    """Half of them at any time of the run; half exactly before a file event of a checkpoint, or milliseconds after."""
    random = Random(SEED)
    for i in range(20 * kills):  # a moment may lie behind the end of a run
        if i % 2:
            delay = random.choice([None, random.uniform(0, 0.01)])
            yield Moment(run.checkpoint, random.randint(1, 30), delay)
        else:
            yield Moment("/(whole|parts[^/]*)/", 1, random.uniform(0, duration / 2))
    raise AssertionError(f"{kills} kills were not reached")


@pytest.mark.slow  # processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_random_moments(kind, tmp_path):
    kills = 20 if is_full() else 4
    run, log = KINDS[kind](tmp_path), tmp_path / "log.txt"

    def start(folder, moment=None):
        code = run_in_process(run.target, run.arguments(tmp_path / folder), log, moment)
        assert code in (0, -signal.SIGKILL), log.read_text()
        return code != 0

    run_in_process(time.sleep, (0,), log)  # the server starts; what is measured next is a run alone
    began = time.monotonic()
    assert not start("whole")
    moment = moments(run, kills, time.monotonic() - began)
    expected = run.result(tmp_path / "whole")
    came_out = Counter()
    while came_out["killed"] < kills:
        folder = f"parts-{came_out['killed']}"
        while start(folder, next(moment) if came_out["killed"] < kills else None):
            came_out["killed"] += 1
            came_out[TORN] += run.is_torn(tmp_path / folder)
            run.require_whole(tmp_path / folder)
        assert run.result(tmp_path / folder) == expected
        came_out["runs finished, bitwise as the uninterrupted one"] += 1
        shutil.rmtree(tmp_path / folder)
    assert came_out[TORN] >= kills // 5
    note(Part.CRASH, f"{kind}: SIGKILL, then the same command again", came_out, SEED)


@pytest.mark.slow  # processes
@pytest.mark.timeout(900)
def test_the_loop_is_killed_before_its_file_events(tmp_path):
    """Exactly before a file below checkpoints/ is opened, renamed or removed, one event after the other."""
    log, every = tmp_path / "log.txt", 1 if is_full() else 5
    assert run_in_process(runs.train_loop, (tmp_path / "whole",), log) == 0, log.read_text()
    expected = runs.result(tmp_path / "whole")
    came_out = Counter()
    for event in range(1, 10_000, every):
        parts = tmp_path / f"parts-{event}"
        code = run_in_process(runs.train_loop, (parts,), log, Moment("checkpoints/", event))
        if code == 0:
            break
        assert code == -signal.SIGKILL, log.read_text()
        runs.require_whole(parts)
        came_out["killed"] += 1
        came_out[TORN] += runs.is_torn(parts)
        runs.train_loop(parts)
        assert runs.result(parts) == expected
        came_out["gone on bitwise"] += 1
    assert came_out[TORN] >= 3
    note(Part.CRASH, f"the loop of both scripts: SIGKILL before every {every}. file event", came_out)


def test_a_checkpoint_has_its_name_only_while_it_is_whole(tmp_path, monkeypatch):
    """It gets the name last, and loses it before anything in it is deleted."""
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


# --- the newest whole one ------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("damage", [halve, Path.unlink], ids=["torn", "missing"])
def test_a_damaged_checkpoint_is_passed_over(damage, run, finished, caplog):
    for file in FILES:
        damage(run / "checkpoints" / "step-4" / file)
        caplog.clear()
        runs.train_loop(run)
        assert runs.result(run) == runs.result(finished)
        # Without its progress.json a folder is not one of ours.
        if (file, damage) != ("progress.json", Path.unlink):
            assert "step-4 is damaged" in caplog.text and "step-3, the newest intact one" in caplog.text


def test_none_is_whole(run, finished):
    for step in (3, 4):
        halve(run / "checkpoints" / f"step-{step}" / "optimizer.bin")
    words = r"step-4 is damaged: optimizer.bin has .* bytes, of .*step-3 is damaged.*'never'"
    with pytest.raises(ValueError, match=words):
        runs.train_loop(run)
    with pytest.raises(ValueError, match="step-4 is not an intact checkpoint"):
        runs.train_loop(run, resume=str(run / "checkpoints" / "step-4"))
    runs.train_loop(run, resume="never")
    assert runs.result(run) == runs.result(finished)


LEFT = {"half written": ("best", "checkpoints/.step-7.tmp", ".best.tmp", ".final.old")}
LEFT["an old checkpoint"] = ("checkpoints/step-3", "checkpoints/step-2")


@pytest.mark.parametrize("what", LEFT)
def test_what_a_killed_run_left_is_cleared(what, run, finished):
    """Also where the run was at its end, or goes on with other intervals, and never writes under that name again."""
    copied, *left = LEFT[what]
    for name in left:
        shutil.copytree(run / copied, run / name)
    runs.train_loop(run)
    assert runs.result(run) == runs.result(finished)


def test_an_older_checkpoint_is_gone_on_from(run, finished, monkeypatch):
    """What is after it is dropped at once: interrupted then, the run does not jump to the end of the course before."""

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
def test_a_torn_checkpoint_of_the_trainer_is_passed_over(file, trained, tmp_path, caplog):
    """As a killed process leaves it: one file torn, and those not there that are written after it."""
    folder = shutil.copytree(trained, tmp_path / "run")
    newest, later = folder / "checkpoint-4", TRAINER_FILES[TRAINER_FILES.index(file) + 1 :]
    assert newest_whole_checkpoint(folder) == str(newest)
    for name in later:
        (newest / name).unlink()
    halve(newest / file)
    assert get_last_checkpoint(folder) == str(newest)  # what the Trainer itself would take
    assert newest_whole_checkpoint(folder) == str(folder / "checkpoint-2")
    assert "checkpoint-4 is incomplete and is not used" in caplog.text
    # And with all files after it, as a loss of power leaves it.
    for name in later:
        shutil.copy(trained / "checkpoint-4" / name, newest / name)
    assert newest_whole_checkpoint(folder) == str(folder / "checkpoint-2")
    shutil.rmtree(folder / "checkpoint-2")
    assert newest_whole_checkpoint(folder) is None


def test_the_trainer_itself_fails_on_a_torn_checkpoint(trained, tmp_path, monkeypatch):
    folder = shutil.copytree(trained, tmp_path / "run")
    (folder / "checkpoint-4" / "trainer_state.json").unlink()
    monkeypatch.setattr(runs, "newest_whole_checkpoint", lambda folder: True)
    with pytest.raises(FileNotFoundError, match="trainer_state.json"):
        runs.train_with_trainer(folder, max_steps=4, save_steps=2, eval_strategy="no")


def test_no_checkpoint_of_the_trainer(trained, tmp_path):
    assert newest_whole_checkpoint(tmp_path) is None
    assert newest_whole_checkpoint(tmp_path / "absent") is None
    (tmp_path / "checkpoint-last").mkdir()
    (tmp_path / "checkpoint-3").write_text("a file")
    assert newest_whole_checkpoint(tmp_path) is None
    for step in (10, 9):  # by number, not by name
        shutil.copytree(trained / "checkpoint-4", tmp_path / f"checkpoint-{step}")
    assert newest_whole_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-10")
