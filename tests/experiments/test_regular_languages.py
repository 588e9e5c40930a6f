"""The experiment `regular-languages`: its tensors, its score of whole strings, its variants and its verdict."""

import pytest
import torch

from experiment_runs import conclude, finished, measure_again
from experiments.regular_languages import DIFFERENCE, EXPERIMENT, summarise
from experiments.regular_languages.languages import LANGUAGES
from experiments.regular_languages.networks import VARIANTS, correct_strings, encode, make_network
from rsa_hf import RSAHeads

BINS = ("right 2–10", "right 11–20", "right 21–30")


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


GOOD = [(1.0, 1.0, 1.0), (1.0, 0.9, 0.9), (1.0, 0.95, 0.95)]
BAD = [(1.0, 0.0, 0.1), (1.0, 0.1, 0.0), (1.0, 0.05, 0.05)]


def concluded(**of_rsa):
    """The conclusion from RSA's shares of right strings by language, where the Transformer's are bad."""
    return conclude(
        "regular-languages",
        [
            finished(
                {"language": language, "arm": arm, "learning_rate": 0.01, "seed": seed},
                {**dict(zip(BINS, shares, strict=True)), "loss": 0.1, "steps": 1.0, "parameters": 2.0},
            )
            for language, found in of_rsa.items()
            for arm, seeds in (("rsa", found), ("transformer", BAD[: len(found)]))
            for seed, shares in enumerate(seeds)
        ],
    )


def test_the_verdict_needs_a_gain_on_all_languages_and_on_parity():
    assert concluded(aa=GOOD, parity=GOOD).verdict == "confirmed"
    found = concluded(aa=GOOD, parity=BAD)
    assert found.verdict == "not confirmed"
    # RSA has 0.95 on average on the first and 0.05 on Parity, the Transformer 0.05 on both.
    assert "all +0.450" in found.answer and "parity +0.000" in found.answer
    assert "aa, rsa: " in found.findings[0] and "beyond the lengths trained on 0.950" in found.findings[0]
    assert concluded(aa=GOOD[:1], parity=GOOD[:1]).verdict == "not measurable at this size"
    by_chance = concluded(aa=GOOD, parity=[(1.0, 0.9, 0.9), (1.0, 0.0, 0.1), (1.0, 0.4, 0.4)])
    assert by_chance.verdict == "not measurable at this size"


def test_rems_without_signs_lose(toy, monkeypatch):
    runs, _ = toy("regular-languages")
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
