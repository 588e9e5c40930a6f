"""The choice of heads from scores with a known truth, and the curvature of a share."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from families import tiny_config, widen
from rsa_hf import HeadConfig, RSAConfig, patch_model, unpatch_model
from rsa_hf.calibration.choice import DICTIONARY, choose, score
from rsa_hf.calibration.gradients import Gradients, ProbedModel

ROWS, HEADS, LENGTH = 64, 8, 32


def gradients(wanted=None, strength=0.0, damping=0.0):
    """Products of two layers that are noise, but those of one head fall along the lags of a REM."""
    lags = [torch.randn(ROWS, HEADS, LENGTH) for _ in range(2)]
    attention = [0.3 * torch.randn(ROWS, HEADS) + damping for _ in range(2)]
    if wanted is not None:
        layer, head, decay = wanted
        lags[layer][:, head, 1:] -= strength * decay ** torch.arange(1, LENGTH)
    return Gradients(lags, attention, terms=LENGTH - 1)


def chosen(found, seed=0):
    return choose(score(found, [True, True]), 0.2, torch.Generator().manual_seed(seed))


def test_the_head_and_the_rem_that_lower_the_loss_are_chosen():
    torch.manual_seed(0)
    first = chosen(gradients((1, 5, 0.7), strength=3.0))[0]
    rem = DICTIONARY[first.rem]
    assert (first.layer, first.head, rem.kind, rem.dilation) == (1, 5, "regular", 1)
    assert rem.decay == pytest.approx(0.7, abs=0.11)
    assert first.certainty > 5


@pytest.mark.slow
def test_heads_are_chosen_by_chance_as_rarely_as_allowed():
    found = 0
    for seed in range(100):
        torch.manual_seed(seed)
        found += bool(chosen(gradients(), seed))
    assert found <= 30  # the rate allows 20 of 100 where nothing is to be found; 99.5 % of binomial draws are below


def test_a_head_that_is_better_damped_wants_no_recurrence():
    found = 0
    for seed in range(20):
        torch.manual_seed(seed)
        found += len(chosen(gradients(damping=2.0), seed))
    assert found <= 20  # of 320, where all wish to be damped


def test_the_curvature_is_that_of_the_loss():
    """Of a model whose predictions are right in distribution, as the Fisher information needs."""
    torch.manual_seed(0)
    config = tiny_config("llama", vocab_size=13, num_hidden_layers=1, num_attention_heads=4)
    model = widen(AutoModelForCausalLM.from_config(config)).double()
    ids = torch.randint(13, (400, 1))
    with torch.no_grad():
        for _ in range(15):
            drawn = torch.distributions.Categorical(logits=model(ids).logits[:, -1]).sample()
            ids = torch.cat([ids, drawn[:, None]], 1)
    batch = {"input_ids": ids, "labels": ids}
    with ProbedModel(model) as probed:
        scores = score(probed.gradients([batch]), probed.directions)
    rem = DICTIONARY.index(next(each for each in DICTIONARY if each.decay == 0.5))
    curvature = scores.terms * float(scores.whole[0][:, 2, rem].var())
    losses = []
    for share in (0.0, 0.02, 0.04):
        head = HeadConfig(0, 2, "regular", 0.5, share / float(scores.masses[0][rem]))
        with torch.no_grad():
            losses.append(float(patch_model(model, RSAConfig(heads=[head]))(**batch).loss))
        unpatch_model(model)
    measured = (losses[0] - 2 * losses[1] + losses[2]) / 0.02**2
    assert curvature == pytest.approx(measured, rel=0.4)
