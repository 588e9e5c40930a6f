"""The Trainer that users already have: checkpoints, the best model, resuming, pushing."""

import copy
import shutil

import pytest
import torch
from torch.utils.data import Dataset
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments
from transformers.utils import hub

from families import CONFIGS, FULL_PLAN, VOCAB
from rsa_hf import RSAConfig, patch_model, rsa_report


class Tokens(Dataset):
    """Sequences whose label is whether the first token comes back as the last one."""

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
    arguments = TrainingArguments(
        str(folder),
        **{
            "max_steps": 8,
            "save_steps": 2,
            "eval_steps": 2,
            "eval_strategy": "steps",
            "per_device_train_batch_size": 4,
            "learning_rate": 3e-3,
            "report_to": "none",
            "disable_tqdm": True,
            "logging_steps": 1,
            "use_cpu": True,
            "seed": 1,
            **arguments,
        },
    )
    return Trainer(model, arguments, train_dataset=Tokens(40, 0), eval_dataset=Tokens(16, 1))


def weights(model):
    return copy.deepcopy(model.state_dict())


def assert_same(a, b):
    assert list(a) == list(b)
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


def test_gates_and_rates_are_trained_without_a_word_about_them(tmp_path):
    trainer = make_trainer(tmp_path, save_strategy="no", eval_strategy="no")
    before = rsa_report(trainer.model)
    trainer.train()
    after = rsa_report(trainer.model)
    for old, new in zip(before.layers, after.layers, strict=True):
        for a, b in zip(old.heads, new.heads, strict=True):
            # Eight steps at a falling 3e-3 · 20: values move by more than the weights could (8 · 3e-3).
            assert abs(a.gate - b.gate) > 0.005
            assert a.decay != b.decay


def test_resuming_is_exact(tmp_path):
    whole = make_trainer(tmp_path / "whole")
    whole.train()
    shutil.copytree(tmp_path / "whole" / "checkpoint-4", tmp_path / "again" / "checkpoint-4")
    resumed = make_trainer(tmp_path / "again")
    resumed.train(resume_from_checkpoint=str(tmp_path / "again" / "checkpoint-4"))
    assert_same(weights(resumed.model), weights(whole.model))


def test_the_best_model_comes_back_whole(tmp_path):
    # "Best" is the highest loss here, which with this learning rate is not the last one.
    trainer = make_trainer(
        tmp_path,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,
        learning_rate=0.05,
    )
    trainer.train()
    best = AutoModelForSequenceClassification.from_pretrained(trainer.state.best_model_checkpoint)
    assert_same(weights(trainer.model), weights(best))
    last = AutoModelForSequenceClassification.from_pretrained(tmp_path / "checkpoint-8")
    assert trainer.state.best_model_checkpoint != str(tmp_path / "checkpoint-8")
    rsa = [name for name in weights(last) if ".rsa." in name]
    assert any(not torch.equal(weights(last)[name], weights(best)[name]) for name in rsa)


def test_what_is_pushed_is_what_was_trained(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path / "run", max_steps=2)
    trainer.train()
    pushed = tmp_path / "pushed"

    class Api:
        """Stands in for the Hub: takes the folder that would be uploaded."""

        def create_repo(self, repo_id, **_):
            return type("Repo", (), {"repo_id": repo_id})

    def upload(self, folder, *_, **__):
        shutil.copytree(folder, pushed)

    module = __import__(type(trainer.model).push_to_hub.__module__, fromlist=["hf_api"])
    for owner in (module, hub, __import__("transformers.modeling_utils", fromlist=["hf_api"])):
        if hasattr(owner, "hf_api"):
            monkeypatch.setattr(owner, "hf_api", lambda *_, **__: Api())
        if hasattr(owner, "create_repo"):
            monkeypatch.setattr(owner, "create_repo", Api().create_repo)
    monkeypatch.setattr(hub.PushToHubMixin, "_upload_modified_files", upload)
    monkeypatch.setattr(
        "transformers.modeling_utils.create_and_tag_model_card", lambda *_, **__: _Card(), raising=False
    )
    monkeypatch.setattr("transformers.utils.hub.create_and_tag_model_card", lambda *_, **__: _Card(), raising=False)
    trainer.model.push_to_hub("someone/rsa")
    loaded = AutoModelForSequenceClassification.from_pretrained(pushed)
    assert_same(weights(loaded), weights(trainer.model))
    assert loaded.config.rsa == trainer.model.config.rsa


class _Card:
    def save(self, path):
        with open(path, "w") as file:
            file.write("card")


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients(use_reentrant):
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(CONFIGS["roberta"](), attn_implementation="sdpa")
    model.config.hidden_dropout_prob = 0.0
    patch_model(model, RSAConfig(**FULL_PLAN)).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    rows = [Tokens(6, 2)[i] for i in range(6)]
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    batch["attention_mask"][0, 6:] = 0

    def gradients():
        model.zero_grad()
        model(**batch).loss.backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if ".rsa." in name}

    plain = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if use_reentrant:
        model.enable_input_require_grads()
    for name, gradient in gradients().items():
        torch.testing.assert_close(gradient, plain[name])
        assert bool((gradient != 0).any())
