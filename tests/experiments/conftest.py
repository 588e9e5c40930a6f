"""Toy runs that several tests share, and a small data folder."""

import argparse
import json
import lzma
import os
import pydoc_data.topics
from functools import cache
from pathlib import Path

import pytest

from experiments import corpora
from experiments.runner import resources
from experiments.runner.experiment import find_experiment
from experiments.runner.resources import CACHE
from experiments.runner.runner import FOLDER, read_runs, run_experiment


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """Pretrained weights and calibrations of tests are not those of the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE, str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def small_data(tmp_path_factory):
    """A data folder with Python's own source in place of C and its help texts in place of Wikipedia."""
    folder = tmp_path_factory.mktemp("data")
    code = Path(argparse.__file__).read_text(encoding="utf-8")
    functions = [{"func": part, "target": i % 2} for i, part in enumerate(code.split("\n\n")) if part.strip()]
    for split, ends in {"train": (0, 0.6), "valid": (0.6, 0.8), "test": (0.8, 1)}.items():
        begin, end = (round(each * len(functions)) for each in ends)
        lines = "".join(json.dumps(function) + "\n" for function in functions[begin:end])
        write(folder / "devign" / f"{split}.jsonl.xz", lines)
    write(folder / "enwik8" / "enwik8_prefix.xz", "\n".join(pydoc_data.topics.topics.values())[:200_000])
    return folder


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(text.encode()))


def clear_caches():
    for function in (corpora.read_devign, corpora.read_splits, corpora.read_corpus):
        function.cache_clear()


@pytest.fixture
def use_small_data(small_data, monkeypatch):
    monkeypatch.setenv("RSA_HF_DATA", str(small_data))
    monkeypatch.setattr(resources, "DIGESTS", {})
    yield
    clear_caches()


@pytest.fixture(scope="session")
def toy(tmp_path_factory, small_data):
    """Run an experiment at toy size, once for all workers of pytest-xdist; returns its runs and its conclusion."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "toy"

    @cache
    def run(name, seeds=None):
        with pytest.MonkeyPatch.context() as patch:
            if name == "calibrate":
                patch.setenv("RSA_HF_DATA", str(small_data))
                patch.setattr(resources, "DIGESTS", {})
            conclusion = run_experiment(find_experiment(name), "toy", root, seeds, progress=False)
        clear_caches()
        return [*read_runs(root / FOLDER / name / "toy").values()], conclusion

    return run
