"""Tensor parallelism: a model split over processes gives what it gives in one (tensor_parallel_run.py)."""

import pytest
from tensor_parallel_run import FAST, FOUR, SLOW, run


@pytest.fixture(scope="module")
def fast(tmp_path_factory):
    return run(FAST, tmp_path_factory.mktemp("fast"))


@pytest.mark.parametrize("name", FAST)
def test_two_processes_give_what_one_gives(fast, name):
    assert fast[name] == ["passed", "passed"], "\n".join(fast[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_other_models_and_ways_to_run_them(tmp_path, name):
    found = run([name], tmp_path)[name]
    assert found == ["passed"] * 2, "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_four_processes(tmp_path, name):
    found = run([name], tmp_path, size=4)[name]
    assert found == ["passed"] * 4, "\n".join(found)
