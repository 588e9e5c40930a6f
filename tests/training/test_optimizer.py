"""RSA's parameter groups, and the Trainer's optimiser on them."""

import pytest
import torch
from torch.optim import AdamW
from transformers import Trainer

from families import FULL_PLAN, build
from rsa_hf import RSAConfig, param_groups, patch_model
from rsa_hf.training import RSATrainer, optimizer_cls_and_kwargs
from small_runs import arguments, gpt2


@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_groups_have_every_parameter_once(scale):
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


@pytest.mark.parametrize(("scale", "asked"), [(1.0, True), (20.0, True), (20.0, False)])
def test_one_step_of_adam_moves_the_gate_by_its_rate(scale, asked):
    """The rate asked for, or under a plain optimiser `scale` times the weights' rate."""
    model = patch_model(build("gpt2"), RSAConfig(num_regular=2, num_free_lags=1, parameter_scale=scale))
    groups = param_groups(model, 1e-3, rsa_learning_rate=0.02) if asked else model.parameters()
    rsa = model.h[0].attn.rsa
    before, lag = float(rsa.mu.detach() * scale), rsa.free_lags.detach().clone()
    optimizer = torch.optim.Adam(groups, lr=1e-3)
    model(input_ids=torch.arange(3, 12)[None])[0][0, :, 0].sum().backward()
    optimizer.step()
    assert abs(float(rsa.mu.detach() * scale) - before) == pytest.approx(0.02, rel=1e-3)
    assert float((rsa.free_lags - lag).detach().abs().max()) == pytest.approx(0.02 if asked else 1e-3, rel=1e-3)


def test_a_plain_model_has_no_rsa_group():
    assert [group["name"] for group in param_groups(build("gpt2"), 1e-3)] == ["weights", "no_decay"]


# --- with the Trainer -----------------------------------------------------------------------------------------

STEPS = 3


def rows():
    ids = torch.randint(0, 64, (4 * STEPS, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def by_hand(model, batches, **rates):
    """The same run in plain torch, with a linear decay of the rates to 0."""
    optimizer = AdamW(param_groups(model, **rates), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / len(batches))
    for ids in batches:
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("ours", [True, False])
def test_a_trainer_trains_as_plain_torch_with_the_same_groups(tmp_path, ours):
    args = arguments(tmp_path, train_sampling_strategy="sequential", weight_decay=1.0, rsa_learning_rate=0.3)
    if ours:
        trainer = RSATrainer(gpt2(0.0), args, train_dataset=rows(), optimizers=(None, None))
    else:
        groups = optimizer_cls_and_kwargs(args, rsa_learning_rate=0.3)
        trainer = Trainer(gpt2(0.0), args, train_dataset=rows(), optimizer_cls_and_kwargs=groups)
    trainer.train()
    assert any("rsa/gate" in record for record in trainer.state.log_history) is ours
    batches = torch.stack([row["input_ids"] for row in rows()]).split(4)
    expected = by_hand(gpt2(0.0), batches, learning_rate=1e-2, weight_decay=1.0, rsa_learning_rate=0.3)
    start = gpt2().state_dict()
    for name, value in expected.state_dict().items():
        moved = (value - start[name]).norm()
        assert moved > 0, name
        # Weight decay alone moves a weight by a hundredth of `moved`, a wrong rate by more.
        assert (trainer.model.state_dict()[name] - value).norm() < 1e-3 * moved, name
    groups = trainer.optimizer.param_groups  # the Trainer logs the rate of the first one
    assert [(g["name"], g["weight_decay"], g["initial_lr"]) for g in groups] == [
        ("weights", 1.0, 1e-2),
        ("no_decay", 0.0, 1e-2),
        ("rsa", 0.0, 0.3 / 20),
    ]


def test_each_trial_of_a_search_learns_at_its_own_rate(tmp_path):
    args = arguments(tmp_path, max_steps=1, eval_strategy="no")
    groups, data = optimizer_cls_and_kwargs(args, rsa_learning_rate=0.3), rows()
    keywords = {"model_init": lambda trial: gpt2(), "optimizer_cls_and_kwargs": groups}
    trainer = Trainer(None, args, train_dataset=data, eval_dataset=data, **keywords)
    tried = []

    def note(metrics):
        tried.append([(g["initial_lr"], g["weight_decay"]) for g in trainer.optimizer.param_groups])
        return 0.0

    def space(trial):
        return {"learning_rate": 1e-3 * (trial.number + 1), "weight_decay": 0.1 * (trial.number + 1)}

    trainer.hyperparameter_search(space, note, n_trials=2, backend="optuna")
    rsa = (pytest.approx(0.3 / 20), 0.0)
    assert tried == [[(1e-3, 0.1), (1e-3, 0.0), rsa], [(2e-3, 0.2), (2e-3, 0.0), rsa]]


@pytest.mark.parametrize("name", ["galore_adamw", "apollo_adamw_layerwise", "adalomo"])
def test_an_optimiser_that_accepts_no_groups_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=rf"optim='{name}'.*accepts no groups\. Use another, such as 'adamw_torch'"):
        optimizer_cls_and_kwargs(arguments(tmp_path, optim=name, optim_target_modules="all-linear"))
