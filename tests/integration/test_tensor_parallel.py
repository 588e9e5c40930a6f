"""Tensor parallelism: a model split over processes gives what it gives in one (tensor_parallel_run.py)."""

import json

import pytest
import tensor_parallel_run
from tensor_parallel_run import FAST, FOUR, TWO

from launching import run_processes


def run(names, folder, size=2):
    """What each of `size` processes found for each check."""
    run_processes(size, tensor_parallel_run.__file__, folder, *names)
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
    return {name: [outcomes.get(name, "did not run") for outcomes in found] for name in names}


@pytest.fixture(scope="module")
def fast(tmp_path_factory):
    return run(FAST, tmp_path_factory.mktemp("fast"))


@pytest.mark.slow_unless(name=FAST)
@pytest.mark.parametrize("name", TWO)
def test_two_processes_give_what_one_gives(fast, name, tmp_path):
    found = fast[name] if name in fast else run([name], tmp_path)[name]
    assert found == ["passed", "passed"], "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_four_processes(tmp_path, name):
    found = run([name], tmp_path, size=4)[name]
    assert found == ["passed"] * 4, "\n".join(found)
