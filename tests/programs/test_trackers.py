"""W&B and trackio, offline, have what metrics.jsonl has, also of a run that was stopped and continued."""

import json
import os
import struct
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from small_runs import lines

TESTS = Path(__file__).parents[1]
STOPPED_AND_CONTINUED = "training.report_to, offline: stopped and continued as one run"
PROGRAM = """
import sys
from small_runs import Mortal, run, texts
folder, tracker, examples = sys.argv[1:]
settings = {"max_steps": 6, "eval_every_steps": 3, "save_every_steps": 2, "report_to": [tracker]}
run(folder, data=Mortal(texts(20), int(examples)), **settings)
"""


@pytest.fixture
def tracked(tmp_path, monkeypatch):
    """Run 6 steps with a tracker in two processes, the first of which stops in step 6; returns the run's folder."""

    def tracked(tracker):
        folder = tmp_path / "run"
        variables = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "TRACKIO_DIR": str(tmp_path / "trackio")}
        environment = {**os.environ, **variables, "PYTHONPATH": str(TESTS), "TRACKIO_SHOW_DASHBOARD": "0"}
        for examples, code in ((20, 1), (1000, 0)):
            command = [sys.executable, "-c", PROGRAM, folder, tracker, str(examples)]
            ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            assert ended.returncode == code, ended.stderr
        return folder

    return tracked


def assert_has_every_step(found, folder):
    """Check the values of each step. Step 5 was logged twice: the first process stopped behind its checkpoint."""
    expected = {line["step"]: line for line in lines(folder)}
    assert {step: len(values) for step, values in found.items()} == {1: 1, 2: 1, 3: 1, 4: 1, 5: 2, 6: 1}
    for step, values in found.items():
        for each in values:
            assert each["train/loss"] == pytest.approx(expected[step]["loss"])
            assert ("eval/loss" in each) == ("eval" in expected[step])
            assert each["train/rsa/gate/layer_01"] != each["train/rsa/gate/layer_00"] or step == 1


def wandb_records(path):
    """The records of a W&B file, which is a LevelDB log: blocks of 32 KB, each piece with checksum, length and kind."""
    from wandb.proto import wandb_internal_pb2

    content, begin, record = path.read_bytes(), 7, b""  # a header of 7 bytes comes first
    while begin + 7 <= len(content):
        left = 2**15 - begin % 2**15
        if left < 7:
            begin += left
            continue
        length, kind = struct.unpack("<HB", content[begin + 4 : begin + 7])
        record += content[begin + 7 : begin + 7 + length]
        begin += 7 + length
        if kind in (1, 4):  # the whole record, or its last piece
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


@pytest.mark.program("wandb", STOPPED_AND_CONTINUED)
def test_wandb(tracked, tmp_path):
    pytest.importorskip("wandb", reason="needs wandb: make programs")
    folder = tracked("wandb")
    found, ids, settings, images = defaultdict(list), set(), {}, 0
    for path in sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb")):
        for record in wandb_records(path):
            if record.HasField("run"):
                ids.add(record.run.run_id)
            for item in record.config.update:
                settings[item.key] = json.loads(item.value_json)
            if record.HasField("history"):
                values = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
                images += "rsa/decay_curves" in str(values)
                found[values["_step"]].append(values)
    assert_has_every_step(found, folder)
    assert len(ids) == 1
    assert settings["training.max_steps"] == 6
    assert images == 2


@pytest.mark.program("trackio", STOPPED_AND_CONTINUED)
def test_trackio(tracked, tmp_path, monkeypatch):
    pytest.importorskip("trackio", reason="needs trackio: make programs")
    folder = tracked("trackio")
    from trackio import sqlite_storage

    monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", tmp_path / "trackio")
    (name,) = sqlite_storage.SQLiteStorage.get_runs("rsa_hf")
    found = defaultdict(list)
    for values in sqlite_storage.SQLiteStorage.get_logs("rsa_hf", name):
        found[values["step"]].append(values)
    assert_has_every_step(found, folder)
    assert sqlite_storage.SQLiteStorage.get_run_config("rsa_hf", name)["training.max_steps"] == 6
