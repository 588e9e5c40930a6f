"""A long run of streamed training leaks no memory, files, threads or temporary folders, and does not slow down.

It runs `rsa-hf train lm`, see soak_run.py. A step's time is processor time, in units of a fixed piece of work that is
measured right after the step, so that other programs slow both.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean, median

import pytest

from reliability.record import Part, is_full, note

ROOT = Path(__file__).parents[2]
# seconds of processor time, steps between checkpoints, block size
SIZES = (20 * 60, 500, 128) if is_full() else (10, 10, 32)


@pytest.mark.slow  # trains for some seconds; for twenty minutes under `make test-reliability`
@pytest.mark.timeout(60 * 60)
def test_a_long_run_leaks_nothing_and_keeps_its_pace(tmp_path):
    seconds, every, _ = SIZES
    (tmp_path / "temporary").mkdir()
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TMPDIR": str(tmp_path / "temporary"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),  # torch creates it on import and never removes it
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, Path(__file__).with_name("soak_run.py"), tmp_path, *map(str, SIZES)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600 + 2 * seconds)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in (tmp_path / "watched.jsonl").read_text().splitlines()]
    _, _, before, *run, after = lines  # the first two are of the short run
    checkpoints = [line for line in run if line["step"] is not None]

    # The run was interrupted in the middle, resumed from the newest checkpoint, and ended between two checkpoints.
    (interrupted,) = [line for line in run if line["step"] is None]
    steps = [line["step"] for line in checkpoints]
    assert steps == list(range(every, steps[-1] + 1, every))
    assert len(checkpoints) / 3 < run.index(interrupted) < len(checkpoints) * 2 / 3
    kept = {path.name for path in (tmp_path / "long" / "checkpoints").iterdir()}
    assert kept == {f"step-{step}" for step in steps[-2:]}
    logged = [json.loads(line)["step"] for line in (tmp_path / "long" / "metrics.jsonl").read_text().splitlines()]
    assert logged == list(range(every // 10, steps[-1] + every // 2 + 1, every // 10))

    # There are no more files, threads and tensors than before, and no temporary folders.
    for name in ("files", "threads", "python threads", "tensors"):
        assert after[name] == interrupted[name] == before[name], name
    lock = str(tmp_path / "long" / ".lock")  # keeps other runs out of the folder
    for line in checkpoints:
        assert (line["files"], line["threads"]) == (sorted([*before["files"], lock]), before["threads"])
    assert list((tmp_path / "temporary").iterdir()) == []
    left = [path for path in tmp_path.rglob("*") if path.name.startswith(".") or path.suffix == ".tmp"]
    assert [path for path in left if path.name != ".lock"] == []

    quarter = len(checkpoints) // 4
    first, middle, last = checkpoints[:quarter], checkpoints[-2 * quarter : -quarter], checkpoints[-quarter:]
    # The number of tensors that a stream holds depends on its position in the text.
    assert max(line["tensors"] for line in last) <= max(line["tensors"] for line in first)
    for name, size in first[0]["sizes"].items():  # numbers in JSON differ in length
        assert last[-1]["sizes"][name] <= 1.01 * size + 100, name

    def of(summary, name, lines):
        return summary(line[name] for line in lines)

    memory, pace = (of(median, name, last) / of(median, name, first) for name in ("rss", "step in yardsticks"))
    # The Python objects kept per step. Both quarters are after the interrupt.
    more, steps_between = (of(mean, name, last) - of(mean, name, middle) for name in ("blocks", "step"))
    objects = more / steps_between
    found = {
        "minutes": (after["seconds"] - before["seconds"]) / 60,
        "of processor time": (after["cpu"] - before["cpu"]) / 60,
        "steps": steps[-1],
        "checkpoints": len(checkpoints),
        "memory (RSS) by a factor of": memory,
        "time of a step by a factor of": pace,
        "Python objects kept per step": objects,
        "file descriptors left": len(after["files"]) - len(before["files"]),
        "threads left": after["threads"] - before["threads"],
        "tensors left": after["tensors"] - before["tensors"],
        "temporary files left": 0,
    }
    kind = "streamed training with evaluation, checkpoints, an interrupt and a resume; last against first quarter"
    note(Part.SOAK, kind, found)
    print(found)
    assert memory < 1.05
    assert pace < (1.05 if is_full() else 1.5)  # a median of few steps is inexact
    assert objects < (0.5 if is_full() else 30)  # their number varies by some hundreds
