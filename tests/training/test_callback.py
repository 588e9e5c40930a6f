"""`RSACallback`: gates and rates reach every tracker of a plain Trainer, whatever the order of callbacks."""

import logging

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import DefaultFlowCallback, TrainerControl, TrainerState

from rsa_hf import RSAConfig, patch_model, rsa_report
from rsa_hf.training.callback import RSACallback

KEYS = {"rsa/gate", "rsa/gate/layer_00", "rsa/gate/layer_01", "rsa/decay/layer_00", "rsa/decay/layer_01"}


class Recorder(TrainerCallback):
    """Stands for a tracker."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def trainer(folder, callbacks, patched=True, **arguments):
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 16, "vocab_size": 64}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    if patched:
        patch_model(model, RSAConfig(num_regular=2, num_cyclical_pairs=1, gate_init=(-3.0, 0.0)))
    ids = torch.randint(0, 64, (8, 8))
    defaults = {"max_steps": 4, "logging_steps": 2, "learning_rate": 1e-2, "per_device_train_batch_size": 4}
    return Trainer(
        model=model,
        args=TrainingArguments(
            str(folder), report_to="none", use_cpu=True, disable_tqdm=True, **{**defaults, **arguments}
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
        eval_dataset=[{"input_ids": row, "labels": row} for row in ids],
        callbacks=callbacks,
    )


@pytest.mark.parametrize("order", ["tracker first", "tracker last", "added later"])
def test_every_log_of_the_loss_has_gates_and_rates(tmp_path, order):
    tracker = Recorder()
    ours = RSACallback()
    given = {"tracker first": [tracker, ours], "tracker last": [ours, tracker], "added later": [tracker]}
    training = trainer(tmp_path, given[order])
    if order == "added later":
        training.add_callback(ours)
    training.train()
    with_loss = [logs for logs in tracker.logs if "loss" in logs]
    assert len(with_loss) == 2
    assert all(logs.keys() >= KEYS for logs in with_loss)
    # The last log was written after the last step: it holds what the model has now.
    layers = rsa_report(training.model).layers
    gates = [layer.heads[0].gate for layer in layers]
    assert with_loss[-1]["rsa/gate"] == pytest.approx(sum(gates) / 2)
    for i, layer in enumerate(layers):
        assert with_loss[-1][f"rsa/gate/layer_{i:02d}"] == pytest.approx(gates[i])
        mean = sum(abs(head.decay) for head in layer.heads) / len(layer.heads)
        assert with_loss[-1][f"rsa/decay/layer_{i:02d}"] == pytest.approx(mean)
    assert with_loss[0]["rsa/gate"] != with_loss[1]["rsa/gate"]
    in_history = [logs for logs in training.state.log_history if "loss" in logs]
    assert [logs["rsa/gate"] for logs in in_history] == [logs["rsa/gate"] for logs in with_loss]


def test_other_callbacks_are_each_called_once(tmp_path):
    calls = []

    class Counts(TrainerCallback):
        def on_init_end(self, args, state, control, **kwargs):
            calls.append("init")

        def on_train_begin(self, args, state, control, **kwargs):
            calls.append("begin")

    trainer(tmp_path, [Recorder(), RSACallback(), Counts()]).train()
    assert calls == ["init", "begin"]


def test_logs_without_the_loss_stay_as_they_are(tmp_path):
    tracker = Recorder()
    training = trainer(tmp_path, [tracker, RSACallback()], eval_strategy="steps", eval_steps=2)
    training.train()
    others = [logs for logs in tracker.logs if "loss" not in logs]
    assert any("eval_loss" in logs for logs in others)
    assert any("train_loss" in logs for logs in others)
    assert not any(key.startswith("rsa/") for logs in others for key in logs)


def test_a_plain_model_is_said_to_have_nothing(tmp_path, caplog):
    tracker = Recorder()
    with caplog.at_level(logging.WARNING):
        trainer(tmp_path, [tracker, RSACallback()], patched=False).train()
    assert "the model has no RSA heads. Call patch_model first." in caplog.text
    assert not any(key.startswith("rsa/") for logs in tracker.logs for key in logs)


def test_called_by_something_else_it_warns_and_still_logs(tmp_path, caplog):
    training = trainer(tmp_path, [DefaultFlowCallback()])
    ours = RSACallback()
    logs = {"loss": 1.0}
    with caplog.at_level(logging.WARNING):
        ours.on_init_end(training.args, TrainerState(), TrainerControl())
    assert "did not find the Trainer's list of callbacks" in caplog.text
    ours.on_log(training.args, TrainerState(), TrainerControl(), logs=logs, model=training.model)
    assert logs.keys() >= KEYS
