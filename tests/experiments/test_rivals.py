"""RSA against rivals: which variants run, at which rate they are compared, and what is concluded."""

import pytest

from experiment_runs import finished
from experiments import rivals
from experiments.runner.experiment import find_experiment
from experiments.runner.summary import Rows
from experiments.variants import CONVOLUTION, DEFAULT, OF_GPT2

EXPERIMENT = find_experiment("rivals")


@pytest.fixture(scope="module")
def measured():
    """One short run of every variant of GPT-2."""
    grid = EXPERIMENT.grid("toy", 1)
    return [finished(each, rivals.measure(each)) for each in grid if each["learning_rate"] == 1e-3]


def test_every_rival_is_measured(measured):
    values = {run.settings["arm"]: run.values for run in measured}
    assert values.keys() == {*rivals.RIVALS, *rivals.RSA}
    assert len({each["test"] for each in values.values()}) == len(values)  # each is something else
    assert all(each[rivals.TIME] > 0 for each in values.values())
    conclusion = EXPERIMENT.conclude(EXPERIMENT.summarise(measured))
    assert len(conclusion.findings) == len(values)


def test_a_llama_has_no_positions_of_gpt2():
    arms = {each["arm"] for each in EXPERIMENT.grid("quick", 1) if each["model"].startswith("llama")}
    assert not arms & {*OF_GPT2} and arms >= {"plain", CONVOLUTION, DEFAULT}


def rows_of(text="enwik8", **scores):
    """Rows of one model from the test scores of each arm by seed; validation favours the others over plain."""
    shared = {"model": "gpt2 of 1M", "text": text, "steps": 400, "learning_rate": 1e-3}
    names = {"convolution": CONVOLUTION, "rsa": DEFAULT}
    runs = [
        finished(
            {**shared, "arm": names.get(arm, arm), "seed": seed},
            {"validation": 4.0 if arm == "plain" else 3.0, "test": score, "test by part": [score - 0.1, score + 0.1]}
            | {"parameters": 1.0, rivals.TIME: 1.0},
        )
        for arm, of_seeds in scores.items()
        for seed, score in enumerate(of_seeds)
    ]
    return EXPERIMENT.summarise(runs)


@pytest.mark.parametrize(
    ("rsa", "verdict"),
    [
        ([2.4, 2.42, 2.41], "confirmed"),
        ([2.6, 2.62, 2.61], "not confirmed"),  # behind the convolution
        ([2.5, 2.53, 2.51], "not measurable at this size"),
    ],
)
def test_rsa_has_to_beat_every_rival(rsa, verdict):
    conclusion = rivals.conclude(rows_of(plain=[3.0, 3.1, 3.05], convolution=[2.5, 2.52, 2.51], rsa=rsa))
    assert conclusion.verdict == verdict
    assert f"{sum(rsa) / 3 - 2.51:+.3f} ({CONVOLUTION})" in conclusion.answer


def test_each_text_has_a_best_rival_of_its_own():
    one = rows_of(plain=[3.0, 3.1, 3.05], convolution=[2.5, 2.52, 2.51], rsa=[2.4, 2.42, 2.41])
    other = rows_of("wikitext-2", plain=[3.0, 3.1, 3.05], rsa=[2.9, 2.92, 2.91])
    assert rivals.conclude(Rows([*one, *other])).answer.endswith(f"-0.100 ({CONVOLUTION}), -0.140 (plain)")
