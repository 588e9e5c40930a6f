"""The scores of PrimeVul and their intervals, against other code."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, f1_score, matthews_corrcoef, roc_auc_score

from rsa_hf.tasks import bootstrap_intervals, compute_metrics, pair_rates, vd_score
from rsa_hf.tasks.defect_scores import pair_rates_of
from rsa_hf.tasks.python_defects import Example

LABELLED = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 1)), min_size=1, max_size=40)


def logits_of(scores):
    return np.stack([np.zeros(len(scores)), np.asarray(scores, dtype=float)], axis=1)


@given(LABELLED, st.sampled_from([0.0, 0.005, 0.1, 0.5, 1.0]))
def test_vd_score_is_the_best_of_all_thresholds(rows, max_fpr):
    """Ties and single classes included."""
    clean, defective = ([score for score, label in rows if label == each] for each in (0, 1))
    found = vd_score(*zip(*rows, strict=True), max_fpr=max_fpr)
    if not clean or not defective:
        assert math.isnan(found)
        return
    missed = [
        sum(score <= threshold for score in defective) / len(defective)
        for threshold in range(-1, 8)
        if sum(score > threshold for score in clean) / len(clean) <= max_fpr
    ]
    assert found == pytest.approx(min(missed))


def test_vd_score_by_hand():
    scores, labels = [*range(1000), 998.5, 994.5, 990.5, -1.0], [0] * 1000 + [1] * 4
    assert vd_score(scores, labels) == 0.5  # 5 of 1,000 clean functions may be above the threshold
    assert vd_score(scores, labels, max_fpr=0.0) == 1
    with pytest.raises(ValueError, match="max_fpr=7"):
        vd_score(scores, labels, max_fpr=7)
    with pytest.raises(ValueError, match="NaN"):
        vd_score([0.1, float("nan")], [0, 1])


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=30))
def test_pair_rates_count_the_four_cases(pairs):
    rates = pair_rates(*zip(*pairs, strict=True))
    names = {"pair_correct": (1, 0), "pair_vulnerable": (1, 1), "pair_benign": (0, 0), "pair_reversed": (0, 1)}
    assert rates == pytest.approx({name: pairs.count(case) / len(pairs) for name, case in names.items()})
    assert sum(rates.values()) == pytest.approx(1)


@pytest.mark.parametrize(("first", "second"), [([1], [1, 0]), ([], []), ([2], [0]), ([[1]], [[0]]), ([0.7], [0.2])])
def test_what_are_no_pairs_of_classes_is_refused(first, second):
    with pytest.raises(ValueError, match="predicted classes"):
        pair_rates(first, second)


def test_functions_without_their_twin_are_in_no_pair():
    examples = [Example("a", 0, pair=4), Example("b", 1, pair=7), Example("c", 1, pair=4), Example("d", 1)]
    assert pair_rates_of(examples, [0, 0, 1, 1])["pair_correct"] == 1
    assert pair_rates_of(examples[1:], [0, 1, 1]) == {}


@pytest.mark.parametrize(("seed", "spread"), [pytest.param(0, 1, marks=pytest.mark.slow), (1, 6)])
def test_intervals_are_percentiles_over_functions_drawn_again(seed, spread):
    """Against scikit-learn's scores of samples of another generator."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 2, 300)
    scores = np.round(random.normal(size=300) * spread + labels)  # with ties
    found = bootstrap_intervals(logits_of(scores), labels)
    samples = []
    for _ in range(500):
        chosen = random.integers(0, 300, 300)
        drawn, of = labels[chosen], scores[chosen]
        classes = [f1_score(drawn, of > 0), matthews_corrcoef(drawn, of > 0), np.mean(drawn == (of > 0))]
        curves = [roc_auc_score(drawn, of), average_precision_score(drawn, of), vd_score(of, drawn)]
        samples.append([*classes, *curves])
    names = ("f1", "mcc", "accuracy", "roc_auc", "average_precision", "vd_score")
    for name, expected in zip(names, np.percentile(samples, (2.5, 97.5), axis=0).T, strict=True):
        assert found[name] == pytest.approx(expected, abs=0.02), name
    assert found == bootstrap_intervals(logits_of(scores), labels)


def test_intervals_average_the_rows_of_a_function_and_bear_one_class():
    rows, labels, owners = logits_of([3.0, -1.0, -2.0, 1.5]), [1, 1, 0, 0], [5, 5, 6, 6]
    assert bootstrap_intervals(rows, labels, owners)["accuracy"] == [1, 1]
    alone = bootstrap_intervals(logits_of([1.0, 2.0]), [0, 0])
    assert alone["accuracy"] == [0, 0]
    assert all(math.isnan(alone[name][0]) for name in ("roc_auc", "vd_score", "average_precision", "mcc"))
    assert math.isnan(compute_metrics(logits_of([1.0, 2.0]), [0, 0])["vd_score"])
    alone = bootstrap_intervals(logits_of([1.0, 2.0]), [1, 1])
    assert all(math.isnan(alone[name][0]) for name in ("roc_auc", "vd_score", "average_precision"))
