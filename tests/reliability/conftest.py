"""What models give alone, computed once in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def alone(tmp_path_factory):
    """What `reliability.neighbours` wrote: plain models are from before rsa_hf was imported there."""
    path = tmp_path_factory.mktemp("alone") / "outputs.pt"
    paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    subprocess.run(
        [sys.executable, str(TESTS / "reliability" / "neighbours.py"), str(path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        check=True,
    )
    return torch.load(path, weights_only=False)


@pytest.fixture
def one_thread():
    """Sums in the same order as in that process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
