"""`RSACallback` reports gates and rates to every tracker of a plain Trainer."""

import pytest
from transformers import Trainer, TrainerCallback

from rsa_hf import rsa_report
from rsa_hf.training import RSACallback
from small_runs import arguments, gpt2, texts

KEYS = {"rsa/gate", "rsa/gate/layer_00", "rsa/gate/layer_01", "rsa/decay/layer_00", "rsa/decay/layer_01"}


class Recorder(TrainerCallback):
    """A stand-in for a tracker."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def test_gates_and_rates_reach_the_trackers_before_and_after_the_callback(tmp_path):
    before, after = Recorder(), Recorder()
    args = arguments(tmp_path, max_steps=4, logging_steps=2, eval_strategy="steps", eval_steps=2)
    training = Trainer(gpt2(), args, train_dataset=texts(8), eval_dataset=texts(8), callbacks=[before])
    training.add_callback(RSACallback(training))
    training.add_callback(after)
    training.train()
    for tracker in (before, after):
        ours = [logs for logs in tracker.logs if "rsa/gate" in logs]
        assert [logs["epoch"] for logs in ours] == [logs["epoch"] for logs in tracker.logs if "loss" in logs]
        assert len(ours) == 2
        assert all(logs.keys() == {*KEYS, "epoch"} for logs in ours)
        assert ours[0]["rsa/gate"] != ours[1]["rsa/gate"]
    last = [logs for logs in before.logs if "rsa/gate" in logs][-1]
    layers = rsa_report(training.model).layers
    gates = [layer.heads[0].gate for layer in layers]
    assert last["rsa/gate"] == pytest.approx(sum(gates) / 2)
    for i, layer in enumerate(layers):
        assert last[f"rsa/gate/layer_{i:02d}"] == pytest.approx(gates[i])
        mean = sum(abs(head.decay) for head in layer.heads) / len(layer.heads)
        assert last[f"rsa/decay/layer_{i:02d}"] == pytest.approx(mean)
