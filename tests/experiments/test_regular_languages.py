"""The experiment `regular-languages`: its tensors, its score of whole strings, its variants and its verdict."""

import pytest
import torch

from experiment_runs import conclude, finished, measure_again
from experiments.regular_languages import DIFFERENCE, EXPERIMENT, networks, summarise
from experiments.regular_languages.languages import LANGUAGES
from experiments.regular_languages.networks import VARIANTS, correct_strings, encode, make_network
from rsa_hf import RSAHeads, is_patched

BINS = ("right 2–10", "right 11–20", "right 21–30")


def test_strings_are_encoded_with_their_targets():
    batch = encode(LANGUAGES["d-2"], ["()", "(())"])
    assert batch.tokens.tolist() == [[2, 0, 1, 2, 2], [2, 0, 0, 1, 1]]
    assert batch.real.tolist() == [[True] * 3 + [False] * 2, [True] * 5]
    # Targets: "(" is legal, ")" is legal, the string may end.
    assert batch.targets[0, :3].tolist() == [[1, 0, 1], [1, 1, 0], [1, 0, 1]]
    assert batch.targets[1].tolist() == [[1, 0, 1], [1, 1, 0], [0, 1, 0], [1, 1, 0], [1, 0, 1]]
    short = batch[slice(0, 1)]
    assert (short.tokens.tolist(), short.targets.shape) == ([[2, 0, 1]], (1, 3, 3))


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


def last_step(logits, batch):
    rows, last = torch.arange(len(logits)), batch.real.sum(1) - 1
    return ((logits > 0) == (batch.targets > 0.5)).all(-1)[rows, last]


def most_steps(logits, batch):
    right = ((logits > 0) == (batch.targets > 0.5)).all(-1) & batch.real
    return right.sum(1) > 0.5 * batch.real.sum(1)


def without_the_end(logits, batch):
    right = ((logits > 0) == (batch.targets > 0.5))[..., :-1].all(-1)
    return (right | ~batch.real).all(-1)


def with_padding(logits, batch):
    return ((logits > 0) == (batch.targets > 0.5)).all(-1).all(-1)


def test_a_string_counts_only_if_every_step_is_right():
    assert not scored_wrongly(correct_strings)


@pytest.mark.parametrize("scorer", [last_step, most_steps, without_the_end, with_padding])
def test_a_broken_scorer_is_caught(scorer):
    assert scored_wrongly(scorer)


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


def test_the_rsa_variant_is_the_patched_transformer():
    def fresh(variant):
        torch.manual_seed(3)
        return make_network(variant, 2, 16, 2)

    rsa, plain = fresh("rsa"), fresh("transformer")
    assert is_patched(rsa.body) and not is_patched(plain.body)
    mine = {name: p for name, p in rsa.state_dict().items() if ".rsa." not in name}
    assert mine.keys() == plain.state_dict().keys()
    assert all(torch.equal(p, mine[name]) for name, p in plain.state_dict().items())
    # In one layer, attention alone does not see the order of earlier tokens; REMs do.
    tokens, swapped = torch.tensor([[2, 0, 1, 1, 1]]), torch.tensor([[2, 1, 0, 1, 1]])
    for model, sees in ((rsa, True), (plain, False)):
        model.body.h = model.body.h[:1]
        with torch.no_grad():
            model.body.wte.weight.mul_(50)
            model.body.h[0].attn.c_attn.weight.mul_(20)
            model.body.h[0].attn.c_proj.weight.mul_(20)
            difference = float((model(tokens) - model(swapped))[:, -1].abs().max())
        assert difference > 1e-3 if sees else difference < 1e-5


def results(shares):
    """Runs with these shares of right strings: {(language, variant, rate): [one tuple of bins per seed]}."""
    return [
        finished(
            {"language": language, "arm": variant, "learning_rate": rate, "seed": seed},
            {**dict(zip(BINS, found, strict=True)), "loss": rate, "steps": 1.0, "parameters": 2.0},
        )
        for (language, variant, rate), seeds in shares.items()
        for seed, found in enumerate(seeds)
    ]


GOOD, BAD = [(1.0, 1.0, 1.0), (1.0, 0.9, 0.9)], [(1.0, 0.0, 0.1), (1.0, 0.1, 0.0)]


def concluded(**shares):
    """The conclusion from RSA's shares of right strings on (aa)* and on Parity, where the Transformer's are bad."""
    named = {language: shares[name] for language, name in (("parity", "parity"), ("(aa)*", "aa")) if name in shares}
    rsa = {(language, "rsa", 0.01): found for language, found in named.items()}
    plain = {(language, "transformer", 0.01): BAD[: len(found)] for language, found in named.items()}
    return conclude("regular-languages", results(rsa | plain))


def test_the_verdict_needs_a_gain_on_all_languages_and_on_parity():
    assert concluded(aa=GOOD, parity=GOOD).verdict == "confirmed"
    found = concluded(aa=GOOD, parity=BAD)
    assert found.verdict == "not confirmed"
    # RSA has 0.95 on average on (aa)* and 0.05 on Parity, the Transformer 0.05 on both.
    assert "+45.0" in found.sentence and "on Parity it is not better" in found.sentence
    trained_and_beyond = "% entirely right at the training lengths and beyond"
    assert found.findings == (
        f"parity, {trained_and_beyond}: rsa 100.0 and 5.0, transformer 100.0 and 5.0",
        f"(aa)*, {trained_and_beyond}: rsa 100.0 and 95.0, transformer 100.0 and 5.0",
    )
    assert concluded(aa=GOOD[:1], parity=GOOD[:1]).verdict == "not measurable at this size"
    by_chance = concluded(aa=GOOD, parity=[(1.0, 0.9, 0.9), (1.0, 0.0, 0.1)])
    assert by_chance.verdict == "not measurable at this size"
    assert "2 of 2 comparisons are undecided (the interval contains 0" in by_chance.sentence


def lost_signs(monkeypatch):
    """REMs without signs: |λ| in place of λ, and θ = 0."""
    rates = RSAHeads.rates

    def broken(self, *dtype):
        found = rates(self, *dtype)
        return {**found, "lam": found["lam"].abs(), "theta": 0 * found["theta"]}

    monkeypatch.setattr(RSAHeads, "rates", broken)


def does_nothing(monkeypatch):
    monkeypatch.setattr(networks, "patch_model", lambda model, config: model)


def gain(runs):
    """RSA's gain on (aa)* beyond the training lengths."""
    return summarise(runs).mean(DIFFERENCE, language="(aa)*")


@pytest.mark.parametrize("broken", [lost_signs, does_nothing])
def test_broken_rsa_loses(broken, toy, monkeypatch):
    runs, _ = toy("regular-languages")
    assert gain(runs) > 0.5
    broken(monkeypatch)
    found = measure_again(EXPERIMENT, runs, language="(aa)*", arm="rsa")
    assert gain(found) < 0.25
    conclusion = conclude("regular-languages", found)
    assert conclusion.verdict == "not confirmed" and "which is not significant" in conclusion.sentence
