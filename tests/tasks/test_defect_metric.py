"""The metric module against the definitions, offline, and in several processes at a time."""

import json
import math
import os
import socket
import subprocess
import sys
import warnings

import evaluate
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsa_hf.tasks import metrics
from rsa_hf.tasks.metrics import load_metric

CLASSES = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=40)


@pytest.fixture(scope="module")
def metric():
    return load_metric("defect_detection")


@given(pairs=CLASSES)
def test_agrees_with_the_definitions(metric, pairs):
    tp, tn, fp, fn = (pairs.count(pair) for pair in ((1, 1), (0, 0), (1, 0), (0, 1)))  # (prediction, reference)
    predictions, references = zip(*pairs, strict=True)
    marginals = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = metric.compute(predictions=predictions, references=references)
    assert result == {
        "accuracy": pytest.approx((tp + tn) / len(pairs)),
        "f1": pytest.approx(2 * tp / (2 * tp + fp + fn) if tp + fp + fn else 0.0),
        "mcc": pytest.approx((tp * tn - fp * fn) / math.sqrt(marginals) if marginals else 0.0),
        "majority_accuracy": max(tp + fn, tn + fp) / len(pairs),
    }


@pytest.mark.parametrize(
    ("predictions", "references", "expected"),
    [
        ([0, 0], [0, 0], (1.0, 0.0, 0.0, 1.0)),  # nothing positive to find, nothing found
        ([1, 1], [1, 1], (1.0, 1.0, 0.0, 1.0)),
        ([0, 0, 0], [0, 1, 1], (1 / 3, 0.0, 0.0, 2 / 3)),  # the model answers with one class
        ([0, 1], [1, 0], (0.0, 0.0, -1.0, 0.5)),
        ([True, False], [True, False], (1.0, 1.0, 1.0, 0.5)),
    ],
)
def test_degenerate_cases(metric, predictions, references, expected):
    result = metric.compute(predictions=predictions, references=references)
    assert tuple(result.values()) == pytest.approx(expected)


def test_many_predictions_do_not_overflow(metric):
    references = [0, 1, 1, 0] * 50_000
    predictions = [0, 1, 0, 0] * 50_000
    result = metric.compute(predictions=predictions, references=references)
    assert result["mcc"] == pytest.approx(1 / math.sqrt(3))


@pytest.mark.parametrize(
    ("predictions", "references", "message"),
    [
        ([], [], "predictions and references are empty; give at least one"),
        ([0, 2], [0, 1], "predictions hold 2; allowed are the classes 0 and 1"),
        ([0.7, 0.1], [0, 1], "predictions hold 0.7; allowed are the classes 0 and 1"),
        ([0, 1], [0, -100], "references hold -100; allowed"),
    ],
)
def test_bad_input(metric, predictions, references, message):
    with pytest.raises(ValueError, match=message):
        metric.compute(predictions=predictions, references=references)


def test_an_unknown_metric():
    with pytest.raises(ValueError, match="no metric 'accuracy'; choose one of defect_detection"):
        load_metric("accuracy")


def test_loads_by_its_path_without_network_and_without_output(monkeypatch, tmp_path, capfd):
    def refuse(*_):
        raise AssertionError("the metric must load and compute without the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    folder = os.path.join(os.path.dirname(metrics.__file__), "defect_detection")
    metric = evaluate.load(folder, cache_dir=str(tmp_path))
    assert metric.compute(predictions=[1], references=[1])["accuracy"] == 1.0
    assert load_metric("defect_detection").compute(predictions=[1], references=[0])["accuracy"] == 0.0
    assert capfd.readouterr() == ("", "")


PROGRAM = """
import json, multiprocessing, sys
from importlib.util import module_from_spec, spec_from_file_location

# The file alone, as importing the whole package takes long and is beside the point.
spec = spec_from_file_location("metrics", sys.argv[1])
metrics = module_from_spec(spec)
spec.loader.exec_module(metrics)
context = multiprocessing.get_context("fork")
start = context.Barrier(4)

def score(position):
    start.wait()
    metric = metrics.load_metric("defect_detection")
    return metric.compute(predictions=[0, 1, 1], references=[0, 1, position % 2])["accuracy"]

with context.Pool(4) as pool:
    print(json.dumps(pool.map(score, range(4), chunksize=1)))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="the test forks its processes")
def test_processes_load_it_at_the_same_time_into_an_empty_cache(tmp_path):
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, metrics.__file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == pytest.approx([2 / 3, 1, 2 / 3, 1])
