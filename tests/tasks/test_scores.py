"""The scores of both tasks against their definitions."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsa_hf import tasks
from rsa_hf.tasks.defect_scores import classification_scores
from rsa_hf.tasks.text_scores import perplexities


@pytest.mark.filterwarnings("ignore:A single label was found")
@given(pairs=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1)), min_size=1, max_size=40))
def test_classification_scores_agree_with_their_definitions(pairs):
    """With many ties among the scores: ROC AUC is the share of pairs in the right order."""
    scores, labels = zip(*pairs, strict=True)
    found = classification_scores([int(score > 2) for score in scores], labels, scores)
    tp, tn, fp, fn = (
        sum((score > 2, label) == each for score, label in pairs) for each in ((1, 1), (0, 0), (1, 0), (0, 1))
    )
    marginals = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
    assert found["accuracy"] == pytest.approx((tp + tn) / len(pairs))
    assert found["f1"] == pytest.approx(2 * tp / (2 * tp + fp + fn) if tp + fp + fn else 0.0)
    assert found["mcc"] == pytest.approx((tp * tn - fp * fn) / math.sqrt(marginals) if marginals else 0.0)
    assert found["majority_accuracy"] == max(tp + fn, tn + fp) / len(pairs)
    positive, negative = ([score for score, label in pairs if label == each] for each in (1, 0))
    if not positive or not negative:
        assert math.isnan(found["roc_auc"]) and math.isnan(found["average_precision"])
        return
    ordered = [(p > n) + (p == n) / 2 for p in positive for n in negative]
    assert found["roc_auc"] == pytest.approx(sum(ordered) / len(ordered))
    area, recall = 0.0, 0.0
    for cut in sorted(set(scores), reverse=True):
        right = sum(score >= cut for score in positive)
        area += (right / len(positive) - recall) * right / sum(score >= cut for score in scores)
        recall = right / len(positive)
    assert found["average_precision"] == pytest.approx(area)


def test_perplexities_of_a_uniform_model_and_at_the_limits():
    result = perplexities(1000 * math.log(256), num_tokens=1000, num_words=1, num_bytes=1000)
    assert result["bits_per_byte"] == pytest.approx(8, rel=1e-14)
    assert result["token_perplexity"] == pytest.approx(256, rel=1e-13)
    assert result["word_perplexity"] == math.inf
    assert math.isnan(perplexities(4.0, num_tokens=2, num_words=0, num_bytes=4)["word_perplexity"])
    assert math.isnan(perplexities(math.nan, 1, 1, 1)["token_perplexity"])


def test_every_public_name_of_the_tasks_exists():
    assert all(getattr(tasks, name).__name__ == name for name in tasks.__all__)
