"""The confirmation of the defaults: what is searched, scored and concluded."""

import pytest

from experiment_runs import finished
from experiments import confirmation
from experiments.runner.experiment import find_experiment
from experiments.variants import CONVOLUTION, DEFAULT


def rows_of(**scores):
    """Rows of two models from the test scores of each arm by seed; the rate with the best one has the worst validation."""
    runs = []
    for model in ("gpt2 of 1M", "llama of 1M"):
        shared = {"model": model, "text": "enwik8", "steps": 400, "scored": 200_000}
        for arm, of_seeds in scores.items():
            for seed, test in enumerate(of_seeds):
                settings = {**shared, "arm": {"conv": CONVOLUTION, "rsa": DEFAULT}.get(arm, arm), "seed": seed}
                values = {
                    "validation": 2.0,
                    "test": test,
                    "test by part": [test - 0.01, test + 0.01],
                    "parameters": 1.0,
                }
                runs.append(finished({**settings, "learning_rate": 1e-3}, values))
                if seed == 0:
                    runs.append(
                        finished(
                            {**settings, "learning_rate": 3e-3},
                            values | {"validation": 3.0, "test by part": [0.0, 0.0]},
                        )
                    )
    return find_experiment("confirmation").summarise(runs)


PLAIN, CONVOLVED = [3.0, 3.1, 3.05], [2.5, 2.52, 2.51]


@pytest.mark.parametrize(
    ("rsa", "verdict"),
    [
        ([2.4, 2.42, 2.41], "confirmed"),
        ([2.6, 2.62, 2.61], "not confirmed"),  # behind the convolution
        ([2.5, 3.6, 1.4], "not measurable at this size"),  # chance may have decided
        ([3.4, 3.42, 3.41], "not confirmed"),  # worse than plain
    ],
)
def test_rsa_has_to_beat_both_on_the_test_text(rsa, verdict):
    conclusion = confirmation.conclude(rows_of(plain=PLAIN, conv=CONVOLVED, rsa=rsa))
    assert conclusion.verdict == verdict
    assert len(conclusion.findings) == 2 * 3
    assert f"{sum(rsa) / 3 - 3.05:+.3f}" in conclusion.findings[2]


def test_the_scored_texts_are_two_and_long_enough(data_folder, monkeypatch):
    monkeypatch.setenv("RSA_HF_DATA", str(data_folder))
    for _, name, _ in confirmation.CASES["full"]:
        if name != "text8":
            text = confirmation.read_corpus(name, 10**9, 200_000, 256)
            sizes = [scored.num_bytes for scored in (text.validation, text.test)]
            assert min(sizes) > 190_000
