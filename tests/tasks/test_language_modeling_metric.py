"""The metric module: loaded as a user loads it, checked against the definitions."""

import math
import socket
from pathlib import Path

import evaluate
import pytest

import rsa_hf
from rsa_hf.tasks.metrics import perplexities

METRIC = Path(rsa_hf.__file__).parent / "tasks" / "metrics" / "language_modeling"


@pytest.fixture
def metric(tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError("the metric must load and compute without the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    return evaluate.load(str(METRIC), cache_dir=str(tmp_path))


def reference(num_tokens: int, num_words: int, num_bytes: int) -> dict[str, int]:
    return {"num_tokens": num_tokens, "num_words": num_words, "num_bytes": num_bytes}


def test_sums_are_taken_before_divisions(metric):
    result = metric.compute(predictions=[10.0, 2.0], references=[reference(4, 2, 9), reference(2, 1, 3)])
    assert result == {
        "loss_nats_per_token": pytest.approx(2.0),
        "token_perplexity": pytest.approx(math.e**2),
        "word_perplexity": pytest.approx(math.e**4),
        "bits_per_byte": pytest.approx(math.log2(math.e)),
        "num_tokens": 6,
        "num_words": 3,
        "num_bytes": 12,
    }
    assert result["loss_nats_per_token"] != pytest.approx((10 / 4 + 2 / 2) / 2)  # a mean of means


def test_batches_are_summed(metric):
    nlls = [1.25, 700.0, 0.1, 33.0]
    counts = [reference(3, 1, 5), reference(900, 100, 2500), reference(1, 0, 1), reference(20, 4, 70)]
    for start in (0, 2):
        metric.add_batch(predictions=nlls[start : start + 2], references=counts[start : start + 2])
    assert metric.compute() == pytest.approx(perplexities(sum(nlls), 924, 105, 2576), rel=1e-14)


def test_uniform_bytes_take_eight_bits():
    result = perplexities(1000 * math.log(256), num_tokens=1000, num_words=1, num_bytes=1000)
    assert result["bits_per_byte"] == pytest.approx(8, rel=1e-14)
    assert result["token_perplexity"] == pytest.approx(256, rel=1e-13)
    assert result["word_perplexity"] == math.inf


def test_limits():
    result = perplexities(4000.0, num_tokens=2, num_words=0, num_bytes=4)
    assert result["token_perplexity"] == math.inf
    assert math.isnan(result["word_perplexity"])
    assert math.isnan(perplexities(math.nan, 1, 1, 1)["loss_nats_per_token"])


@pytest.mark.parametrize(("nll", "counts"), [(-1.0, (1, 1, 1)), (1.0, (0, 1, 1)), (1.0, (1, 1, 0)), (1.0, (1, -1, 1))])
def test_impossible_counts_are_refused(metric, nll, counts):
    with pytest.raises(
        ValueError, match="at least 0 .check the sign., and a text has at least one token and one byte"
    ):
        metric.compute(predictions=[nll], references=[reference(*counts)])
