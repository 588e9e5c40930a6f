"""RSA against rivals: which variants run, and what is concluded. test_experiments.py has the verdict."""

import pytest

from experiment_runs import conclude, fake_runs, finished
from experiments import rivals
from experiments.runner.experiment import find_experiment
from experiments.variants import CONVOLUTION, DEFAULT, OF_GPT2

EXPERIMENT = find_experiment("rivals")


@pytest.fixture(scope="module")
def measured():
    """One short run of every variant of GPT-2."""
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


def test_a_llama_has_no_positions_of_gpt2():
    arms = {each["arm"] for each in EXPERIMENT.grid("quick", 1) if each["model"].startswith("llama")}
    assert not arms & {*OF_GPT2} and arms >= {"plain", CONVOLUTION, DEFAULT}


def runs(arm, *tests, text="enwik8"):
    """Runs with these scores of the test text; validation favours the others over plain."""
    return fake_runs("rivals", arm, tests, [4.0 if arm == "plain" else 3.0] * len(tests), text=text)


def test_each_text_has_a_best_rival_of_its_own():
    one = [*runs("plain", 3.0, 3.1, 3.05), *runs(CONVOLUTION, 2.5, 2.52, 2.51), *runs(DEFAULT, 2.4, 2.42, 2.41)]
    other = [runs(arm, *tests, text="wikitext-2") for arm, tests in (("plain", (3.0, 3.1)), (DEFAULT, (2.9, 2.92)))]
    assert conclude("rivals", one, *other).answer.endswith(f"-0.100 ({CONVOLUTION}), -0.140 (plain)")
