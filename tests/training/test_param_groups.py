"""Parameter groups: every trainable parameter once, RSA parameters without decay, and at the pace asked for."""

import pytest
import torch

from families import FULL_PLAN, build
from rsa_hf import RSAConfig, param_groups, patch_model


@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_every_parameter_once(scale):
    model = patch_model(build("roberta"), RSAConfig(**FULL_PLAN, parameter_scale=scale))
    model.embeddings.word_embeddings.weight.requires_grad_(False)
    groups = {group["name"]: group for group in param_groups(model, 1e-3, 0.1, rsa_learning_rate=2e-2)}
    listed = [p for group in groups.values() for p in group["params"]]
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert len(listed) == len(trainable)
    assert {id(p) for p in listed} == {id(p) for p in trainable}
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)].rsplit(".", 2)[1] for p in groups["rsa"]["params"]} == {"rsa"}
    assert len(groups["rsa"]["params"]) == 8
    assert [(g["lr"], g["weight_decay"]) for g in groups.values()] == [(1e-3, 0.1), (1e-3, 0.0), (2e-2 / scale, 0.0)]
    assert all(p.dim() >= 2 for p in groups["weights"]["params"])
    assert all(p.dim() < 2 for p in groups["no_decay"]["params"])


@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_one_step_of_adam_moves_the_gate_by_the_rate_asked_for(scale):
    model = patch_model(build("gpt2"), RSAConfig(**FULL_PLAN, parameter_scale=scale))
    rsa = model.h[0].attn.rsa
    before = float(rsa.mu.detach() * scale)
    optimizer = torch.optim.Adam(param_groups(model, 1e-3, rsa_learning_rate=0.02))
    model(input_ids=torch.arange(3, 12)[None])[0][0, :, 0].sum().backward()
    optimizer.step()
    assert abs(float(rsa.mu.detach() * scale) - before) == pytest.approx(0.02, rel=1e-3)


def test_a_plain_optimiser_moves_stored_values_as_fast():
    model = patch_model(build("gpt2"), RSAConfig(**FULL_PLAN, parameter_scale=20.0))
    rsa = model.h[0].attn.rsa
    before = float(rsa.mu.detach() * 20)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model(input_ids=torch.arange(3, 12)[None])[0][0, :, 0].sum().backward()
    optimizer.step()
    assert abs(float(rsa.mu.detach() * 20) - before) == pytest.approx(0.02, rel=1e-3)


def test_a_plain_model_has_no_rsa_group():
    assert [group["name"] for group in param_groups(build("gpt2"), 1e-3)] == ["weights", "no_decay"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0,), "learning_rate=0.0"),
        ((1e-3, -1.0), "weight_decay=-1.0"),
        ((1e-3, 0.0, -2.0), "rsa_learning_rate=-2.0"),
    ],
)
def test_bad_rates(arguments, message):
    with pytest.raises(ValueError, match=message):
        param_groups(build("gpt2"), *arguments)
