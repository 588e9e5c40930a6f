"""The Trainer on PEFT models trains and saves the adapter with its gates and rates."""

import shutil

import pytest
import torch
from peft import LoraConfig, prepare_model_for_kbit_training
from transformers import Trainer

import small_runs
from families import VOCAB, inputs
from peft_adapters import PLAN, adapter_values, base_model, logits
from rsa_hf import patch_model, rsa_report
from rsa_hf.peft import get_peft_model, load
from rsa_hf.training import RSACallback


def make_trainer(folder, **arguments):
    torch.manual_seed(0)
    model = get_peft_model(base_model("gpt2"), LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.1), PLAN)
    ids = torch.randint(3, VOCAB, (24, 9), generator=torch.Generator().manual_seed(3))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "learning_rate": 3e-3, "seed": 1}
    args = small_runs.arguments(folder, **{**settings, **arguments})
    trainer = Trainer(model, args, train_dataset=rows, eval_dataset=rows[:8])
    trainer.add_callback(RSACallback(trainer))
    return trainer


def test_only_the_adapter_moves_and_the_log_has_its_gates(tmp_path):
    trainer = make_trainer(tmp_path, save_strategy="no")
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    for name, value in trainer.model.state_dict().items():
        adapted = "lora_" in name or ".modules_to_save." in name
        assert torch.equal(value, before[name]) is not adapted, name
    last = [log for log in trainer.state.log_history if "rsa/gate" in log][-1]
    # In six steps at a decaying rate of 3e-3 · 20, gates move by more than weights could (6 · 3e-3).
    start = rsa_report(patch_model(base_model("gpt2"), PLAN)).layers[0].heads[0].gate
    assert abs(last["rsa/gate/layer_00"] - start) > 0.005


def test_a_checkpoint_resumes_exactly_and_loads(tmp_path):
    whole = make_trainer(tmp_path / "whole")
    whole.train()
    shutil.copytree(tmp_path / "whole" / "checkpoint-3", tmp_path / "again" / "checkpoint-3")
    resumed = make_trainer(tmp_path / "again")
    resumed.train(resume_from_checkpoint=str(tmp_path / "again" / "checkpoint-3"))
    small_runs.assert_same_weights(resumed.model.state_dict(), whole.model.state_dict())
    batch = inputs("gpt2")
    loaded = load(base_model("gpt2"), tmp_path / "whole" / "checkpoint-6")
    assert torch.equal(logits(loaded, batch), logits(whole.model.eval(), batch))
    earlier = adapter_values(load(base_model("gpt2"), tmp_path / "whole" / "checkpoint-3"))
    assert all(not torch.equal(value, earlier[name]) for name, value in adapter_values(loaded).items())


def test_the_best_adapter_is_loaded_at_the_end(tmp_path):
    # The highest loss counts as the best one, because at this learning rate it is not the last.
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    trainer = make_trainer(tmp_path, eval_strategy="steps", eval_steps=3, learning_rate=0.05, **best)
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-3")
    best = load(base_model("gpt2"), tmp_path / "checkpoint-3")
    small_runs.assert_same_weights(adapter_values(trainer.model), adapter_values(best))


@pytest.mark.parametrize("patched", ["before", "after"])
def test_prepare_model_for_kbit_training_leaves_rates_trainable(patched):
    base = base_model("llama").to(torch.bfloat16)
    if patched == "before":
        patch_model(base, PLAN)
    model = get_peft_model(prepare_model_for_kbit_training(base), LoraConfig(), PLAN)
    batch = inputs("llama")
    model(**batch, labels=batch["input_ids"]).loss.backward()
    rates = {name: p for name, p in model.named_parameters() if ".rsa." in name and p.requires_grad}
    assert set(rates) == set(adapter_values(model))
    assert len(rates) == 8
    assert all(p.dtype == torch.float32 and (p.grad != 0).all() for p in rates.values())
