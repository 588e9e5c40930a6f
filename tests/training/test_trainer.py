"""The Trainer of transformers on patched models: its switches, resuming."""

import copy
from collections import Counter

import pytest
import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Trainer

import small_runs
from families import CONFIGS, ENCODERS, FULL_PLAN, VOCAB
from peft_adapters import trained_adapter
from rsa_hf import RSAConfig, patch_model, unpatch_model
from rsa_hf.children import active_heads
from small_runs import assert_same_weights


class Tokens(Dataset):
    """Sequences labelled by whether the last token equals the first."""

    def __init__(self, size, seed):
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(3, VOCAB, (size, 10), generator=generator)
        self.labels = torch.arange(size) % 2
        self.ids[self.labels == 1, -1] = self.ids[self.labels == 1, 0]

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "attention_mask": torch.ones(10, dtype=torch.long), "labels": self.labels[i]}


def make_trainer(folder, **arguments):
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(CONFIGS["roberta"]())
    patch_model(model, RSAConfig(**FULL_PLAN))
    defaults = {"max_steps": 8, "learning_rate": 3e-3, "seed": 1, "eval_strategy": "steps", "eval_steps": 2}
    args = small_runs.arguments(folder, **{**defaults, "save_strategy": "steps", "save_steps": 2, **arguments})
    return Trainer(model, args, train_dataset=Tokens(40, 0), eval_dataset=Tokens(16, 1))


# --- switches that leave the training the same -----------------------------------------------------------------------


def language_model(family="gpt2", **values):
    torch.manual_seed(0)
    config = CONFIGS[family]()
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    auto = AutoModelForSequenceClassification if family in ENCODERS else AutoModelForCausalLM
    return patch_model(auto.from_config(config, **values), RSAConfig(**FULL_PLAN))


def blocks(size, seed=3):
    """Token blocks with 2 to 9 labels, so that a mean of means is not the mean."""
    ids = torch.randint(3, VOCAB, (size, 10), generator=torch.Generator().manual_seed(seed))
    labels = torch.stack([row.index_fill(0, torch.arange(1 + i % 8), -100) for i, row in enumerate(ids)])
    return [{"input_ids": a, "labels": b} for a, b in zip(ids, labels, strict=True)]


def trained(folder, model=None, data=None, **values):
    defaults = {"per_device_train_batch_size": 8, "learning_rate": 1e-3, "train_sampling_strategy": "sequential"}
    args = small_runs.arguments(folder, **{**defaults, **values})
    trainer = Trainer(model or language_model(), args, train_dataset=data or blocks(24))
    trainer.train()
    return trainer


def losses(trainer):
    return [logs["loss"] for logs in trainer.state.log_history if "loss" in logs]


def assert_same_training(trainer, reference, tolerance):
    """Compare losses, and weights up to a share of how far training has moved them."""
    assert losses(trainer) == pytest.approx(losses(reference), rel=1e-5)
    start, found = language_model().state_dict(), trainer.model.state_dict()
    for name, value in reference.model.state_dict().items():
        moved = (value - start[name]).norm()
        assert moved > 0, name
        assert (found[name] - value).norm() < tolerance * moved, name


@pytest.mark.parametrize("family", ["gpt2", "llama", "roberta", "llama with LoRA"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients(family, use_reentrant):
    if family == "llama with LoRA":
        model = trained_adapter("llama").train()
    else:
        model = language_model(family, attn_implementation="sdpa").train()
    rows = [Tokens(6, 2)[i] for i in range(6)]
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    batch["attention_mask"][0, 6:] = 0
    if family not in ENCODERS:
        batch["labels"] = batch["input_ids"]

    def gradients():
        model.zero_grad()
        model(**batch).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}

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


def test_accumulated_steps_are_those_of_the_large_batch(tmp_path):
    reference = trained(tmp_path)
    parts = trained(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    assert_same_training(parts, reference, tolerance=2e-3)
    # The control: the mean of the micro-batches' means is another loss.
    model, data = language_model(), blocks(8)

    def loss(rows):
        return model(**{key: torch.stack([row[key] for row in rows]) for key in rows[0]}).loss.item()

    mean_of_means = sum(loss(data[i : i + 2]) for i in range(0, 8, 2)) / 4
    assert abs(mean_of_means - losses(reference)[0]) > 1e-4 * mean_of_means


def test_bf16_leaves_gates_and_rates_in_float32(tmp_path):
    reference, model = trained(tmp_path), language_model()
    seen = set()
    for _, heads in active_heads(model):
        heads.register_forward_hook(
            lambda heads, args, output: seen.update((args[1].dtype, *(r.dtype for r in heads.rates().values())))
        )
    trainer = trained(tmp_path, model, bf16=True)
    assert seen == {torch.bfloat16, torch.float32}  # the values V, and the rates
    assert all(p.dtype == torch.float32 for name, p in model.named_parameters() if ".rsa." in name)
    assert losses(trainer) != losses(reference)
    assert losses(trainer) == pytest.approx(losses(reference), rel=1e-2)


@pytest.mark.slow  # compiles the model
def test_a_compiled_model_trains_and_saves_the_same(tmp_path):
    reference = trained(tmp_path)
    trainer = trained(tmp_path, torch_compile=True, torch_compile_backend="aot_eager")
    assert_same_training(trainer, reference, tolerance=2e-3)
    trainer.save_model(tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert_same_weights(saved.state_dict(), trainer.model.state_dict())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"parameter_scale": 1.0}, "another plan than the model's .parameter_scale: 20.0 → 1.0"),
        ({"dilation": 7}, "another plan than the model's .dilation: "),
        ({"layers": [1]}, "another plan than the model's .layers: "),
        (None, "the checkpoint alone has RSA heads"),
        ({"gate_init": -1.0}, None),  # initial values do not matter any more
    ],
)
def test_a_run_is_resumed_only_with_its_own_plan(change, words, tmp_path):
    """The Trainer loads tensors without their plan, and at another scale the same tensors are other gates."""
    begun = make_trainer(tmp_path, max_steps=2)
    begun.train()
    trainer = make_trainer(tmp_path, max_steps=2)
    unpatch_model(trainer.model)
    if change is not None:
        patch_model(trainer.model, RSAConfig(**{**FULL_PLAN, **change}))
    before = copy.deepcopy(trainer.model.state_dict())
    if words is None:
        trainer.train(resume_from_checkpoint=True)
        assert_same_weights(trainer.model.state_dict(), begun.model.state_dict())
        return
    with pytest.raises(ValueError, match=f"checkpoint-2 cannot be resumed from: .*{words}"):
        trainer.train(resume_from_checkpoint=True)
    assert_same_weights(trainer.model.state_dict(), before)


@pytest.mark.parametrize("patched", [False, True])
def test_a_plain_run_is_resumed_only_with_a_plain_model(patched, tmp_path):
    begun, trainer = (make_trainer(tmp_path, max_steps=2) for _ in range(2))
    unpatch_model(begun.model)
    begun.train()
    if patched:
        with pytest.raises(ValueError, match="the model alone has RSA heads"):
            trainer.train(resume_from_checkpoint=True)
    else:
        unpatch_model(trainer.model)
        trainer.train(resume_from_checkpoint=True)
        assert_same_weights(trainer.model.state_dict(), begun.model.state_dict())
