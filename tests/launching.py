"""Python programs in processes of their own, on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_python(*arguments):
    """Run Python with one thread and the tests on its path; returns the completed process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, cwd=ROOT)


def run_processes(size, *arguments):
    """Run a Python program in this many processes, as torchrun does."""
    return run_python("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", *arguments)
