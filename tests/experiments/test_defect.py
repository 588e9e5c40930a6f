"""The defect experiment: each variant trains from its encoder, and the answers that are compared."""

from dataclasses import replace

import pytest
import torch

from experiment_runs import fake_runs
from experiments import code_encoder, defect
from experiments.variants import DEFAULT, patched_modules
from rsa_hf.tasks.python_defects import Example

FUNCTIONS = [
    Example(f"int f{i}() {{ {('free', 'gets')[i % 2]}(p[{i * i}]); }}", i % 2, pair=i // 2) for i in range(80)
]


@pytest.fixture
def small(monkeypatch, data_folder, tmp_path):
    """A few functions as Devign and as pairs, and an empty cache of encoders."""
    monkeypatch.setenv("RSA_HF_DATA", str(data_folder))
    monkeypatch.setenv("RSA_HF_CACHE", str(tmp_path))
    texts = [example.func for example in FUNCTIONS]
    monkeypatch.setattr(code_encoder, "read_code", lambda most: (texts[:most], texts[-20:]))
    splits = {"train": FUNCTIONS[:40], "validation": FUNCTIONS[40:60], "test": FUNCTIONS[60:]}
    monkeypatch.setattr(defect, "load_python_defects", lambda: splits)
    code_encoder.code_tokenizer.cache_clear()
    yield {"encoder": "toy", "task": defect.PAIRS, "share": 0.5, "epochs": 2, "scored": 20, "learning_rate": 1e-3}
    code_encoder.code_tokenizer.cache_clear()


@pytest.mark.slow_unless(arm=["plain", "calibrated"])
@pytest.mark.parametrize("arm", defect.ENCODED)
def test_a_variant_begins_as_its_encoder_and_is_scored(small, arm):
    settings = {**small, "arm": arm, "seed": 1}
    model, _ = defect.make_classifier(settings)
    kind = defect.ENCODERS.get(arm, "plain")
    plan = code_encoder.PLANS["toy"]
    encoder, _, _ = code_encoder.load_encoder({**plan, "arm": kind, "learning_rate": code_encoder.RATE, "seed": 1})
    for name, weight in encoder.roberta.state_dict().items():
        assert torch.equal(weight, model.roberta.state_dict()[name]), name
    assert len(list(patched_modules(model))) == (kind != "plain")
    values = defect.measure(settings)
    assert values == defect.measure(settings)
    assert values["pair_correct"] <= 1 and 0 <= values["vd_score"] <= 1
    assert int(values["right"][0]).bit_count() == round(20 * values["accuracy"])


def test_mcnemars_test_is_of_the_answers():
    """RSA alone is right on 3, 4 and 5 functions, plain alone on none, 1 and none: p = 2 · (1 + 13) / 2¹³."""
    answers = {"plain": (0b0001, 0b10001, 0b1), DEFAULT: (0b1111, 0b01111 | 0b100000, 0b111111)}
    runs = [
        replace(run, values={**run.values, "right": [float(right)]})
        for arm, of_seeds in answers.items()
        for run, right in zip(fake_runs("defect", arm, (0.6, 0.61, 0.62)), of_seeds, strict=True)
    ]
    rows = defect.EXPERIMENT.summarise(runs)
    assert rows.mean("McNemar's p", arm=DEFAULT) == pytest.approx(2 * (1 + 13) / 2**13)
    assert "McNemar" in defect.EXPERIMENT.conclude(rows).findings[-1]
