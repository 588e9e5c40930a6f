"""First-order effects of recurrence, against finite differences of the loss in float64."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

from families import CONFIGS, tokens, widen
from rsa_hf import HeadConfig, RSAConfig, patch_model
from rsa_hf.calibration.choice import DICTIONARY, fixed_rem, score, short_rem, unit_weights
from rsa_hf.calibration.gradients import Gradients, ProbedModel
from rsa_hf.rem import rem_matrix

T, H = 12, 8
AUTO = {"llama": AutoModelForCausalLM, "bert": AutoModelForSequenceClassification, "t5": AutoModelForSeq2SeqLM}
REMS = {
    "regular": fixed_rem("regular", 0.8),
    "negative": fixed_rem("regular", -0.6),
    "cos": fixed_rem("cos", 0.85, torch.pi / 4),
    "sin": fixed_rem("sin", 0.7, torch.pi / 8),
    "dilated": fixed_rem("regular", 0.6, dilation=3),
    "free": short_rem(0.4, mass=2.0),
}
STEP = 2e-3  # transformers norms in float32, so smaller steps end in rounding


def next_token_loss(logits, labels, **_):
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def build(family, attention="sdpa"):
    model = widen(AUTO[family].from_config(CONFIGS[family](), attn_implementation=attention)).double()
    if family == "llama":
        model.loss_function = next_token_loss  # transformers' own is in float32
    return model


def batch_of(family):
    ids = tokens(3, T)
    mask = torch.ones_like(ids)
    mask[0, -4:] = 0
    if family == "t5":
        return {"input_ids": ids, "labels": tokens(3, T - 3)}
    labels = torch.randint(2, (3,)) if family == "bert" else torch.where(mask == 1, ids, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def patched_loss(family, attention, state, heads, batch):
    model = build(family, attention)
    model.load_state_dict(state)
    with torch.no_grad():
        return float(patch_model(model, RSAConfig(heads=heads))(**batch).loss)


def row_of(rem, length):
    """The last row of dense P, float64."""
    free = None if rem.free_lags is None else torch.tensor([rem.free_lags], dtype=torch.float64)
    decay = torch.tensor([rem.decay], dtype=torch.float64)
    return rem_matrix(rem.kind, decay, rem.theta, rem.dilation, query_length=length, free_lags=free)[0, -1]


def mass_of(rem, length, causal):
    return float(row_of(rem, length).abs().sum()) * (1 if causal else 2)


@pytest.mark.slow_unless(attention=["sdpa"])
@pytest.mark.parametrize("rem", REMS.values(), ids=REMS)
@pytest.mark.parametrize(
    ("family", "attention"), [("llama", "sdpa"), ("llama", "eager"), ("bert", "sdpa"), ("t5", "eager")]
)
def test_scores_agree_with_finite_differences(family, attention, rem, monkeypatch):
    monkeypatch.setattr("rsa_hf.calibration.choice.DICTIONARY", (rem,))
    model, batch = build(family, attention), batch_of(family)
    with ProbedModel(model) as probed:
        found, causal = probed.gradients([batch]), probed.directions
    scores, length = score(found, causal), [x.shape[-1] for x in found.lags]
    plain = patched_loss(family, attention, model.state_dict(), [], batch)
    for layer, head in ((0, 1), (1, 3), (len(causal) - 1, 2)):
        mass, losses = mass_of(rem, length[layer], causal[layer]), [plain]
        for share in (STEP, 2 * STEP):
            heads = [HeadConfig(**{**vars(rem), "layer": layer, "head": head, "gate": share / mass})]
            losses.append(patched_loss(family, attention, model.state_dict(), heads, batch))
        expected = (4 * losses[1] - losses[2] - 3 * losses[0]) / (2 * STEP)
        within = {"rel": 5e-3, "abs": 5e-5}
        assert float(scores.means[layer][head, 0]) == pytest.approx(expected, **within)
        # Another head, and the other sign, are caught.
        assert float(scores.means[layer][(head + 1) % H, 0]) != pytest.approx(expected, **within)
        assert -float(scores.means[layer][head, 0]) != pytest.approx(expected, **within)


def test_scores_of_a_model_with_heads_agree_with_finite_differences(monkeypatch):
    rem, other = REMS["regular"], HeadConfig(0, 2, "cos", 0.9, 0.4, theta=0.5)
    monkeypatch.setattr("rsa_hf.calibration.choice.DICTIONARY", (rem,))
    model, batch = build("llama"), batch_of("llama")

    def head(gate):
        return HeadConfig(1, 1, rem.kind, rem.decay, gate)

    with ProbedModel(model) as probed:
        probed.set_heads(RSAConfig(heads=[other, head(0.3)]))
        scores = score(probed.gradients([batch]), probed.directions)
    mass = mass_of(rem, T, True)
    plans = [[other, head(0.3 + sign * STEP)] for sign in (1, -1)]
    above, below = (patched_loss("llama", "sdpa", model.state_dict(), heads, batch) for heads in plans)
    assert float(scores.means[1][1, 0]) == pytest.approx((above - below) / (2 * STEP * mass), rel=1e-3)


def test_unit_weights_are_a_row_of_dense_p_scaled_to_unit_mass():
    weights, mass = unit_weights(40)
    assert len(weights) == len(DICTIONARY)
    for found, scale, rem in zip(weights, mass, DICTIONARY, strict=True):
        row = row_of(rem, 40)
        torch.testing.assert_close(found * scale, row.flip(0), rtol=1e-6, atol=1e-12)
        assert float(found.abs().sum()) == pytest.approx(1)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_rems_that_reach_nothing_score_nothing(length):
    found = Gradients([torch.ones(4, 2, length)], [torch.ones(4, 2)], 1.0)
    scores = score(found, [True])
    for rows in (scores.recurrence[0], scores.whole[0]):
        assert bool(rows.isfinite().all())
        assert bool((rows[..., scores.masses[0] == 0] == 0).all())
