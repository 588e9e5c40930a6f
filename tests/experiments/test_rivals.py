"""RSA against rivals: which variants run, and what is concluded. test_experiments.py has the verdict."""

import pytest
import torch

from experiment_runs import conclude, fake_runs, finished
from experiments import rivals
from experiments.byte_models import SHAPES, bits_per_byte, build, train_on_bytes
from experiments.corpora import read_part, read_splits, training_blocks
from experiments.runner.experiment import find_experiment
from experiments.variants import CONVOLUTION, DEFAULT

EXPERIMENT = find_experiment("rivals")


@pytest.fixture(scope="module")
def measured():
    grid = EXPERIMENT.grid("toy", 1)
    short = [{**each, "steps": 3, "scored": 500} for each in grid if each["learning_rate"] == 1e-3]
    return [finished(each, rivals.measure(each)) for each in short]


def test_every_rival_is_measured(measured):
    values = {run.settings["arm"]: run.values for run in measured}
    assert values.keys() == {*rivals.RIVALS, *rivals.RSA}
    assert len({each["test"] for each in values.values()}) == len(values)  # each is something else
    assert all(each[rivals.TIME] > 0 for each in values.values())
    conclusion = EXPERIMENT.conclude(EXPERIMENT.summarise(measured))
    assert len(conclusion.findings) == len(values)


def runs(arm, *tests, text="enwik8"):
    """Runs with these scores of the test text; validation favours the others over plain."""
    return fake_runs("rivals", arm, tests, [4.0 if arm == "plain" else 3.0] * len(tests), text=text)


def test_each_text_has_a_best_rival_of_its_own():
    one = [*runs("plain", 3.0, 3.1, 3.05), *runs(CONVOLUTION, 2.5, 2.52, 2.51), *runs(DEFAULT, 2.4, 2.42, 2.41)]
    other = [runs(arm, *tests, text="wikitext-2") for arm, tests in (("plain", (3.0, 3.1)), (DEFAULT, (2.9, 2.92)))]
    assert conclude("rivals", one, *other).answer.endswith(f"-0.100 ({CONVOLUTION}), -0.140 (plain)")


def test_the_plain_models_text_for_an_equal_score_is_interpolated_over_log_size():
    scores = {"plain": (3.0, 2.0), DEFAULT: (2.5, 1.9)}
    sizes = ("0.1 MB of python", "1.0 MB of python")
    found = [runs(arm, of[i], of[i], text=size) for i, size in enumerate(sizes) for arm, of in scores.items()]
    one, other = conclude("rivals", *found).findings[-2:]
    assert one.endswith("needs 0.32 MB for the score of RSA") and "needs more than 1.0 MB" in other


@pytest.mark.slow  # trains twice
def test_early_stopping_ends_with_the_best_weights():
    text = read_part("python", 0.004, 2000, 64, 0)
    curves, left = [], []
    for early_stopping in (False, True):
        torch.manual_seed(0)
        model = build("llama", SHAPES["0.03M"])
        plan = {"learning_rate": 1e-2, "steps": 200, "evaluations": 20, "seed": 0}
        curves.append(train_on_bytes(model, text, SHAPES["0.03M"], early_stopping=early_stopping, **plan))
        left.append(bits_per_byte(model, text.validation))
    assert left[0] == curves[0][-1] > min(curves[0]) == left[1]
    assert curves[1] == curves[0][: len(curves[1])] and len(curves[1]) == curves[1].index(min(curves[1])) + 6


def test_a_seed_chooses_the_part_of_a_text():
    parts = [bytes(training_blocks(read_part("python", 0.02, 2000, 64, seed)).token_ids.tolist()) for seed in (0, 1)]
    assert parts[0] != parts[1] and all(19_000 < len(part) <= 20_100 for part in parts)
    assert all(part in read_splits("python")["train"] for part in parts)
