"""A run that is killed with SIGKILL goes on as if it had not been: the Trainer, both scripts, and their loop."""

import json
import re
import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest
from transformers.trainer_utils import get_last_checkpoint

from reliability import runs
from reliability.killed import Moment, assert_equal, kill_and_go_on, run_in_process
from reliability.record import Part, note
from reliability.trial import SEED, is_full
from rsa_hf.training.trainer import newest_whole_checkpoint

KINDS = {
    "the Trainer": lambda folder: runs.trainer(),
    "scripts/train_language_model.py": runs.language_model,
    "scripts/train_defect_detection.py": runs.defect_detection,
}


@pytest.mark.slow  # processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_random_moments(kind, tmp_path):
    kills = 20 if is_full() else 4
    came_out = kill_and_go_on(KINDS[kind](tmp_path), tmp_path / "runs", kills, SEED)
    assert came_out["of these while a checkpoint was written or deleted"] >= kills // 5
    note(Part.CRASH, f"{kind}: SIGKILL, then the same command again", came_out, SEED)


@pytest.mark.slow  # processes
@pytest.mark.timeout(900)
def test_the_loop_is_killed_before_its_file_events(tmp_path):
    """Exactly before a file below checkpoints/ is opened, renamed or removed, one event after the other."""
    run, log, every = runs.loop(), tmp_path / "log.txt", 1 if is_full() else 5
    assert run_in_process(run.target, run.arguments(tmp_path / "whole"), log) == 0, log.read_text()
    expected = run.result(tmp_path / "whole")
    came_out = {"killed": 0, "of these while a checkpoint was written or deleted": 0, "gone on bitwise": 0}
    for event in range(1, 10_000, every):
        parts = tmp_path / f"parts-{event}"
        code = run_in_process(run.target, run.arguments(parts), log, Moment(run.checkpoint, event))
        if code == 0:
            break
        assert code == -signal.SIGKILL, log.read_text()
        run.check(parts)
        came_out["killed"] += 1
        came_out["of these while a checkpoint was written or deleted"] += run.torn(parts)
        assert run_in_process(run.target, run.arguments(parts), log) == 0, log.read_text()
        assert_equal(run.result(parts), expected, parts.name)
        came_out["gone on bitwise"] += 1
    assert came_out["of these while a checkpoint was written or deleted"] >= 3
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


def halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGES = {"torn": halve, "missing": lambda path: path.unlink()}
FILES = ("model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl", "progress.json")


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_checkpoint_is_passed_over(file, damage, finished, tmp_path, caplog):
    folder = shutil.copytree(finished, tmp_path / "run")
    DAMAGES[damage](folder / "checkpoints" / "step-4" / file)
    runs.train_loop(folder)
    assert_equal(runs.result(folder), runs.result(finished), "gone on from step-3")
    # Without its progress.json a folder is not one of ours.
    if (file, damage) != ("progress.json", "missing"):
        assert "step-4 is damaged" in caplog.text and "step-3, the newest intact one" in caplog.text


def test_none_is_whole(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    for step in (3, 4):
        halve(folder / "checkpoints" / f"step-{step}" / "optimizer.bin")
    with pytest.raises(
        ValueError, match=r"step-4 is damaged: optimizer.bin has .* bytes, of .*step-3 is damaged.*'never'"
    ):
        runs.train_loop(folder)
    with pytest.raises(ValueError, match="step-4 is not an intact checkpoint"):
        runs.train_loop(folder, resume=str(folder / "checkpoints" / "step-4"))
    runs.train_loop(folder, resume="never")
    assert_equal(runs.result(folder), runs.result(finished), "started over")


def test_what_a_killed_run_left_is_cleared(finished, tmp_path):
    """Also where the run goes on with other intervals, and never writes under that name again."""
    folder = shutil.copytree(finished, tmp_path / "run")
    for name in ("checkpoints/.step-7.tmp", ".best.tmp", ".final.old"):
        shutil.copytree(folder / "best", folder / name)
    runs.train_loop(folder)
    assert_equal(runs.result(folder), runs.result(finished), "cleared")


def test_an_old_checkpoint_that_a_killed_run_did_not_come_to_delete(finished, tmp_path):
    """Also where the run was at its end, and writes no other."""
    folder = shutil.copytree(finished, tmp_path / "run")
    shutil.copytree(folder / "checkpoints" / "step-3", folder / "checkpoints" / "step-2")
    runs.train_loop(folder)
    assert_equal(runs.result(folder), runs.result(finished), "deleted")


@pytest.mark.slow  # processes
def test_an_older_checkpoint_is_gone_on_from(finished, tmp_path):
    """What is after it is dropped at once: killed then, the run does not jump to the end of the course before."""
    folder = shutil.copytree(finished, tmp_path / "run")
    step = folder / "checkpoints" / "step-3"
    log = tmp_path / "log.txt"
    killed = Moment(r"step-4\.tmp", 1)
    assert run_in_process(_resume, (folder, str(step)), log, killed) == -signal.SIGKILL, log.read_text()
    assert [path.name for path in runs.checkpoints(folder)] == ["step-3"]
    runs.train_loop(folder)
    assert_equal(runs.result(folder), runs.result(finished), "gone on")


def _resume(folder, checkpoint):
    runs.train_loop(folder, resume=checkpoint)


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
    newest = folder / "checkpoint-4"
    assert newest_whole_checkpoint(folder) == str(newest)
    for later in TRAINER_FILES[TRAINER_FILES.index(file) + 1 :]:
        (newest / later).unlink()
    halve(newest / file)
    assert get_last_checkpoint(folder) == str(newest)  # what the Trainer itself would take
    assert newest_whole_checkpoint(folder) == str(folder / "checkpoint-2")
    assert "checkpoint-4 is incomplete and is not used" in caplog.text
    # And with all files after it, as a loss of power leaves it.
    for later in TRAINER_FILES[TRAINER_FILES.index(file) + 1 :]:
        shutil.copy(trained / "checkpoint-4" / later, newest / later)
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
    (tmp_path / "checkpoint-10" / "README.md").write_text("")
    assert json.loads((tmp_path / "checkpoint-10" / "trainer_state.json").read_text())["global_step"] == 4
    assert newest_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
