"""The scores of both tasks against their definitions, and as modules of `evaluate`."""

import math

import pytest

from rsa_hf.tasks.defect_scores import classification_scores
from rsa_hf.tasks.metrics import load_metric
from rsa_hf.tasks.text_scores import perplexities


def test_classification_scores_as_a_module():
    metric = load_metric("defect_detection")
    references, predictions = [0, 1, 1, 0] * 50_000, [0, 1, 0, 0] * 50_000  # products of counts exceed 2^63
    result = metric.compute(predictions=predictions, references=references)
    assert result == classification_scores(predictions, references)
    assert result["mcc"] == pytest.approx(1 / math.sqrt(3))
    result = metric.compute(predictions=[1, 0, 1], references=[1, 0, 0], prediction_scores=[0.9, 0.1, 0.6])
    assert result["roc_auc"] == result["average_precision"] == 1
    with pytest.raises(ValueError, match="mix of binary and continuous"):  # scores in place of classes
        metric.compute(predictions=[0.7, 0.1], references=[0, 1])


def test_perplexities_of_a_uniform_model_and_at_the_limits():
    result = perplexities(1000 * math.log(256), num_tokens=1000, num_words=1, num_bytes=1000)
    assert result["bits_per_byte"] == pytest.approx(8, rel=1e-14)
    assert result["token_perplexity"] == pytest.approx(256, rel=1e-13)
    assert result["word_perplexity"] == math.inf
    assert math.isnan(perplexities(4.0, num_tokens=2, num_words=0, num_bytes=4)["word_perplexity"])
    assert math.isnan(perplexities(math.nan, 1, 1, 1)["token_perplexity"])


def test_perplexities_as_a_module_are_not_a_mean_of_means():
    metric = load_metric("language_modeling")
    names = ("num_tokens", "num_words", "num_bytes")
    for nll, counts in ((10.0, (4, 2, 9)), (2.0, (2, 1, 3))):
        metric.add_batch(predictions=[nll], references=[dict(zip(names, counts, strict=True))])
    result = metric.compute()
    assert result == perplexities(12.0, 6, 3, 12)
    assert result["loss_nats_per_token"] == 2  # the mean of means is 1.75
    assert result["word_perplexity"] == pytest.approx(math.e**4)
    assert result["bits_per_byte"] == pytest.approx(math.log2(math.e))
