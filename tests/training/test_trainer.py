"""The Trainer of transformers on patched models: gradient checkpointing, bf16, and resuming with the model's own plan."""

import copy
from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Trainer

import small_runs
from families import CONFIGS, ENCODERS, FULL_PLAN, inputs
from models.tiny import values_and_gradients
from peft_adapters import trained_adapter
from rsa_hf import RSAConfig, patch_model, unpatch_model
from rsa_hf.children import active_heads
from small_runs import assert_same_weights, gpt2, losses


@pytest.mark.parametrize("family", ["gpt2", "llama", "roberta", "llama with LoRA"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients(family, use_reentrant):
    if family == "llama with LoRA":
        model = trained_adapter("llama")
    else:
        auto = AutoModelForSequenceClassification if family in ENCODERS else AutoModelForCausalLM
        model = patch_model(auto.from_config(CONFIGS[family]()), RSAConfig(**FULL_PLAN))
    for module in model.train().modules():
        if isinstance(module, torch.nn.Dropout):
            module.eval()
    batch = inputs(family, batch=6, length=10, padding=4)
    batch["labels"] = torch.arange(6) % 2 if family in ENCODERS else batch["input_ids"]

    def gradients():
        torch.manual_seed(0)
        return values_and_gradients(model, model(**batch).loss)

    plain = gradients()
    assert sum(".rsa." in name and bool((gradient != 0).all()) for name, gradient in plain.items()) == 8
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if use_reentrant:
        model.enable_input_require_grads()
    calls = Counter()
    for _, heads in active_heads(model):
        heads.register_forward_hook(lambda heads, *_: calls.update([heads]))
    torch.testing.assert_close(gradients(), plain)
    assert set(calls.values()) == {2}  # in the forward pass, and again in the backward pass


def test_bf16_leaves_gates_and_rates_in_float32(tmp_path):
    reference, model = small_runs.trainer(tmp_path, gpt2(0.0), learning_rate=1e-3), gpt2(0.0)
    reference.train()
    seen = set()
    for _, heads in active_heads(model):
        heads.register_forward_hook(
            lambda heads, args, output: seen.update((args[1].dtype, *(r.dtype for r in heads.rates().values())))
        )
    trainer = small_runs.trainer(tmp_path, model, learning_rate=1e-3, bf16=True)
    trainer.train()
    assert seen == {torch.bfloat16, torch.float32}  # the values V, and the rates
    assert all(p.dtype == torch.float32 for name, p in model.named_parameters() if ".rsa." in name)
    assert losses(trainer) != losses(reference)
    assert losses(trainer) == pytest.approx(losses(reference), rel=1e-2)


PLAN = {"num_regular": 1, "num_dilated_regular": 1, "dilation": 3, "gate_init": 0.5}


def trainer_of(folder, plan):
    model = unpatch_model(gpt2())
    args = small_runs.arguments(folder, max_steps=2, save_strategy="steps", save_steps=2)
    return Trainer(
        model if plan is None else patch_model(model, RSAConfig(**plan)), args, train_dataset=small_runs.texts(20)
    )


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (PLAN, {**PLAN, "parameter_scale": 1.0}, "another plan than the model's .parameter_scale: 20.0 → 1.0"),
        (PLAN, {**PLAN, "dilation": 7}, "another plan than the model's .dilation: "),
        (PLAN, {**PLAN, "layers": [1]}, "another plan than the model's .layers: "),
        (PLAN, None, "the checkpoint alone has RSA heads"),
        (None, PLAN, "the model alone has RSA heads"),
        (PLAN, {**PLAN, "gate_init": -1.0}, None),  # initial values do not matter any more
        (None, None, None),
    ],
)
def test_a_run_is_resumed_only_with_its_own_plan(before, after, words, tmp_path):
    """The Trainer loads tensors without their plan, and at another scale the same tensors are other gates."""
    begun = trainer_of(tmp_path, before)
    begun.train()
    trainer = trainer_of(tmp_path, after)
    expected = copy.deepcopy((trainer if words else begun).model.state_dict())
    if words is None:
        trainer.train(resume_from_checkpoint=True)
    else:
        with pytest.raises(ValueError, match=f"checkpoint-2 cannot be resumed from: .*{words}"):
            trainer.train(resume_from_checkpoint=True)
    assert_same_weights(trainer.model.state_dict(), expected)
