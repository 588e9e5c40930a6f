"""Python programs in processes of their own, on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_python(*arguments, code=None, cwd=ROOT, timeout=280, **variables):
    """Run Python with one thread and the tests on its path; returns the completed process.

    `code` is the exit code that it must have, None for any. A variable of the environment that is None is removed.
    """
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    changed = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path, **variables}
    environment = {name: value for name, value in {**os.environ, **changed}.items() if value is not None}
    command = [sys.executable, *map(str, arguments)]
    read = {"capture_output": True, "text": True, "errors": "replace"}
    done = subprocess.run(command, env=environment, timeout=timeout, cwd=cwd, **read)
    assert code in (None, done.returncode), done.stderr[-5000:]
    return done


def run_processes(size, *arguments):
    """Run a Python program in this many processes, as torchrun does, and check that it ends well."""
    run_python("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", *arguments, code=0)
