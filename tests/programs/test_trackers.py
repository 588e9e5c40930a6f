"""W&B and trackio, offline, get the losses, gates and rates of an `RSATrainer`."""

import json
import struct
from collections import defaultdict

import pytest

from launching import run_python

REPORTED = "report_to, offline: losses, gates and rates of each step"
PROGRAM = (
    "import sys; from small_runs import trainer; trainer(sys.argv[1], max_steps=4, report_to=[sys.argv[2]]).train()"
)


def run_with(tracker, folder):
    """Run 4 steps with a tracker in a process of its own."""
    variables = {"WANDB_MODE": "offline", "WANDB_DIR": str(folder), "TRACKIO_DIR": str(folder / "trackio")}
    run_python("-c", PROGRAM, folder / "run", tracker, code=0, TRACKIO_SHOW_DASHBOARD="0", **variables)


def assert_has_every_step(records):
    """Check that each step has a loss, and gates and rates, under the Trainer's names."""
    found = defaultdict(set)
    for values in records:
        found[values.get("train/global_step")] |= values.keys()
    for step in (1, 2, 3, 4):
        assert {"train/loss", "train/rsa/gate", "train/rsa/decay/layer_01"} <= found[step], (step, found)


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


@pytest.mark.program("wandb", REPORTED)
def test_wandb(tmp_path):
    pytest.importorskip("wandb", reason="needs wandb: make programs")
    run_with("wandb", tmp_path)
    (path,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    history = [record.history.item for record in wandb_records(path) if record.HasField("history")]
    assert_has_every_step(
        {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in each} for each in history
    )


@pytest.mark.program("trackio", REPORTED)
def test_trackio(tmp_path, monkeypatch):
    pytest.importorskip("trackio", reason="needs trackio: make programs")
    run_with("trackio", tmp_path)
    from trackio import sqlite_storage

    monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", tmp_path / "trackio")
    (project,) = sqlite_storage.SQLiteStorage.get_projects()
    (name,) = sqlite_storage.SQLiteStorage.get_runs(project)
    assert_has_every_step(sqlite_storage.SQLiteStorage.get_logs(project, name))
