"""The experiment `regular-languages`: its tensors, its score of whole strings, its variants and its verdict."""

import pytest
import torch

from experiment_runs import conclude, measure_again
from experiments.regular_languages import DIFFERENCE, EXPERIMENT, summarise
from experiments.regular_languages.languages import LANGUAGES
from experiments.regular_languages.networks import VARIANTS, correct_strings, encode, make_network
from rsa_hf import RSAHeads


def scored_wrongly(scorer):
    """The answers that the scorer gets wrong, each perfect but for one mistake."""
    batch = encode(LANGUAGES["tomita-3"], ["11", "1001", "0111001"])
    perfect = 2 * batch.targets - 1
    wrong = [] if scorer(perfect, batch).tolist() == [True] * 3 else ["perfect"]
    for row, step, answer in torch.cartesian_prod(*map(torch.arange, perfect.shape)).tolist():
        logits = perfect.clone()
        logits[row, step, answer] *= -1
        expected = [True] * 3
        expected[row] = not batch.real[row, step]  # padding does not count
        if scorer(logits, batch).tolist() != expected:
            wrong.append((row, step, answer))
    return wrong


def right(logits, batch):
    return (logits > 0) == (batch.targets > 0.5)


BROKEN = {
    "most steps": lambda logits, batch: (right(logits, batch).all(-1) & batch.real).sum(1) > 0.5 * batch.real.sum(1),
    "without the end": lambda logits, batch: (right(logits, batch)[..., :-1].all(-1) | ~batch.real).all(-1),
    "with padding": lambda logits, batch: right(logits, batch).all(-1).all(-1),
}


def test_a_string_counts_only_if_every_step_is_right():
    assert not scored_wrongly(correct_strings)
    assert all(scored_wrongly(scorer) for scorer in BROKEN.values())


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_is_causal_and_all_its_parameters_learn(variant):
    model = make_network(variant, 2, 16, 2)
    tokens = torch.randint(3, (2, 30))
    logits = model(tokens)
    changed = tokens.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % 3
    differences = (model(changed) - logits).abs().amax((0, 2))
    assert differences[:20].max() < 1e-6 < 1e-4 < differences[20]
    logits.square().sum().backward()
    # Among them the rates, which get no gradient if each token is read as a text of its own.
    dead = [name for name, p in model.named_parameters() if p.requires_grad and not p.grad.abs().max() > 0]
    assert not dead


@pytest.mark.slow
def test_rems_without_signs_lose(toy, monkeypatch):
    runs, conclusion = toy("regular-languages")
    # A REM can count modulo 2, as (aa)* needs; no REM helps on Parity.
    assert conclusion.verdict == "not confirmed" and "better in 1 of 2" in conclusion.sentence
    assert summarise(runs).mean(DIFFERENCE, language="(aa)*") > 0.5
    learned = RSAHeads.learned.fget

    def broken(self):
        found = learned(self)
        return found._replace(
            eta=None if found.eta is None else found.eta.abs(), theta=None if found.theta is None else 0 * found.theta
        )

    monkeypatch.setattr(RSAHeads, "learned", property(broken))
    found = measure_again(EXPERIMENT, runs, language="(aa)*", arm="rsa")
    assert summarise(found).mean(DIFFERENCE, language="(aa)*") < 0.25
    conclusion = conclude("regular-languages", found)
    assert conclusion.verdict == "not confirmed" and "better in 0 of 2" in conclusion.sentence
