"""Training in processes that are killed with SIGKILL, and started again until the run is done.

A process is forked from a server that has torch, transformers and rsa_hf loaded, which makes a start cheap. It listens to its
own file events (opened for writing, made, renamed, removed) in the folder of the run: "at the seventh event below
checkpoints/" is an exact moment, and so long after an event is one in the middle of a write.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import runpy
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from random import Random
from typing import Any

import torch

import rsa_hf

ROOT = Path(__file__).parents[2]
SECONDS = 120  # for one process
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "matplotlib.pyplot",
        "rsa_hf.tasks.defect_detection",
        "rsa_hf.tasks.language_modeling",
        "transformers.models.bert.modeling_bert",
        "transformers.models.gpt2.modeling_gpt2",
        "transformers.models.llama.modeling_llama",
        "transformers.models.roberta.modeling_roberta",
        "transformers.trainer",
    ]
)


@dataclass(frozen=True)
class Moment:
    """When a process is killed.

    Attributes:
        pattern: what the path of a file event has.
        event: which of those events it is, counted from 1.
        delay: seconds after it; None: just before it.
    """

    pattern: str
    event: int
    delay: float | None = None


def run_in_process(
    target: Callable[..., None], arguments: tuple[Any, ...], log: Path, moment: Moment | None = None
) -> int:
    """Call a function in a process of its own, and kill that if it lives to see the moment.

    Returns:
        The exit code; −9 of a process that was killed.
    """
    listener, told = SERVER.Pipe(duplex=False)
    process = SERVER.Process(target=_child, args=(target, arguments, log, moment, told, rsa_hf.__file__), daemon=True)
    process.start()
    told.close()
    try:
        if moment is not None and moment.delay is not None:
            wait([listener, process.sentinel], SECONDS)
            if process.is_alive():
                time.sleep(moment.delay)
                process.kill()
        process.join(SECONDS)
        if process.is_alive():
            raise AssertionError(f"the process has not ended:\n{log.read_text()}")
    finally:
        process.kill()
        listener.close()
    return process.exitcode


def _child(target, arguments, log, moment, told, package):
    with open(log, "a", encoding="utf-8") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    assert os.path.samefile(rsa_hf.__file__, package)  # the server looks for modules on its own
    torch.set_num_threads(1)
    torch.manual_seed(os.getpid())  # what a process begins with must not matter
    if moment is not None:
        _listen(moment, told)
    try:
        target(*arguments)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    else:
        code = 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _listen(moment, told):
    seen = 0

    def hook(event, arguments):
        nonlocal seen
        if event not in EVENTS or not isinstance(arguments[0], (str, bytes, os.PathLike)):
            return
        if event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR):
            return
        if re.search(moment.pattern, os.fsdecode(arguments[0])):
            seen += 1
            if seen == moment.event and moment.delay is None:
                os.kill(os.getpid(), signal.SIGKILL)
            elif seen == moment.event:
                told.send_bytes(b"seen")

    sys.addaudithook(hook)


def run_script(name: str, arguments: list[str]) -> None:
    """Run a script of the project as a user does."""
    sys.argv = [str(ROOT / "scripts" / name), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


# --- a run that is killed again and again --------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A training run that can be started again.

    Attributes:
        target: what trains, in a module that a new process can import.
        arguments: its arguments, of the folder that it writes into.
        folder: what the path of a file event has in the folder of the run.
        checkpoint: what it has while a checkpoint is written or deleted.
        torn: whether a checkpoint in the folder is torn.
        check: raises where the folder has no checkpoint to go on from, though one was saved before.
        result: all of a finished run that has to be equal, by name.
    """

    target: Callable[..., None]
    arguments: Callable[[Path], tuple[Any, ...]]
    folder: str
    checkpoint: str
    torn: Callable[[Path], bool]
    check: Callable[[Path], None]
    result: Callable[[Path], dict[str, Any]]


def kill_and_go_on(run: Run, folder: Path, kills: int, seed: int) -> Counter[str]:
    """Kill a run so many times, going on with it each time, and compare what comes of it with the uninterrupted run.

    Half of the moments are random ones of the whole run, half lie in the writing of a checkpoint, exactly before a
    file event or a few milliseconds after one.
    """
    random = Random(seed)
    log = folder / "log.txt"
    whole = folder / "whole"
    folder.mkdir(exist_ok=True)
    run_in_process(time.sleep, (0,), log)  # the server starts; what is measured next is a run alone
    start = time.monotonic()
    assert run_in_process(run.target, run.arguments(whole), log) == 0, log.read_text()
    duration = time.monotonic() - start
    expected = run.result(whole)
    moments = _moments(run, random, kills, duration)
    came_out: Counter[str] = Counter()
    number = 0
    while came_out["killed"] < kills:
        parts = folder / f"parts-{number}"
        number += 1
        while True:
            moment = next(moments) if came_out["killed"] < kills else None
            code = run_in_process(run.target, run.arguments(parts), log, moment)
            if code == 0:
                break
            assert code == -signal.SIGKILL, log.read_text()
            came_out["killed"] += 1
            came_out["of these while a checkpoint was written or deleted"] += run.torn(parts)
            run.check(parts)
        assert_equal(run.result(parts), expected, parts.name)
        came_out["runs finished, bitwise as the uninterrupted one"] += 1
    return came_out


def _moments(run: Run, random: Random, kills: int, duration: float) -> Iterator[Moment]:
    # Tried at most so often: a moment may lie behind the end of a run.
    for i in range(20 * kills):
        if i % 2:
            delay = random.choice([None, random.uniform(0, 0.01)])
            yield Moment(run.checkpoint, random.randint(1, 30), delay)
        else:
            yield Moment(run.folder, 1, random.uniform(0, duration / 2))
    raise AssertionError(f"{kills} kills were not reached")


def assert_equal(found: Any, expected: Any, where: str) -> None:
    """Bitwise, through mappings, sequences, tensors and numbers."""
    if isinstance(expected, dict):
        assert list(found) == list(expected), where
        for key, value in expected.items():
            assert_equal(found[key], value, f"{where}: {key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for i, (left, right) in enumerate(zip(found, expected, strict=True)):
            assert_equal(left, right, f"{where}[{i}]")
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected), where
    elif hasattr(expected, "tobytes"):
        assert found.tobytes() == expected.tobytes(), where
    else:
        assert found == expected, where


def tensors(path: Path) -> Any:
    """What `torch.save` has written."""
    return torch.load(path, map_location="cpu", weights_only=False)


def lines(path: Path) -> list[Any]:
    """What a file of JSON lines holds."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
