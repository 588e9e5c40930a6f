"""The metric module: loaded as a user loads it, checked against the definitions."""

import math
import socket
from pathlib import Path

import evaluate
import pytest

import rsa_hf
from rsa_hf.tasks.metrics.score import LanguageModelingScore

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


def test_batches_agree_with_the_score_of_the_task(metric):
    nlls = [1.25, 700.0, 0.1, 33.0]
    counts = [reference(3, 1, 5), reference(900, 100, 2500), reference(1, 0, 1), reference(20, 4, 70)]
    for start in (0, 2):
        metric.add_batch(predictions=nlls[start : start + 2], references=counts[start : start + 2])
    score = LanguageModelingScore(num_bytes=2576, num_words=105)
    score.update(sum(nlls), 924)
    assert metric.compute() == pytest.approx(score.compute(), rel=1e-14)


def test_uniform_bytes_take_eight_bits(metric):
    result = metric.compute(predictions=[1000 * math.log(256)], references=[reference(1000, 1, 1000)])
    assert result["bits_per_byte"] == pytest.approx(8, rel=1e-14)
    assert result["token_perplexity"] == pytest.approx(256, rel=1e-13)
    assert result["word_perplexity"] == math.inf


@pytest.mark.parametrize(
    ("nll", "counts", "message"),
    [
        (-1.0, reference(1, 1, 1), r"nll_nats is -1\.0; .*check the sign"),
        (1.0, reference(0, 1, 1), "num_tokens is 0; call update"),
        (1.0, reference(1, 1, 0), "num_bytes is 0; choose a whole number of at least 1"),
        (1.0, reference(1, -1, 1), "num_words is -1; choose a whole number of at least 0"),
    ],
)
def test_impossible_counts_are_refused(metric, nll, counts, message):
    with pytest.raises(ValueError, match=message):
        metric.compute(predictions=[nll], references=[counts])
