"""The program of the distributed tests in every process: `accelerate launch … distributed_run.py PART FOLDER`."""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import Trainer

from rsa_hf.cli.common import exit_on_error
from rsa_hf.models.recurrent import RecurrentConfig, RecurrentForCausalLM
from rsa_hf.tasks.defect_detection import trainer_metrics
from rsa_hf.tasks.text_data import TrainingTracks
from rsa_hf.training import RSACallback, TrainingSettings, optimizer_cls_and_kwargs
from rsa_hf.training.run import make_accelerator
from small_runs import Killed, Mortal, arguments, classifier, functions, gpt2, run, texts


def run_loop(folder, data, **settings):
    """Train on 11 examples in steps of 4; two processes cannot share the last step of an epoch evenly."""
    defaults = {"batch_size": 2, "max_steps": 7, "save_every_steps": 2, "eval_every_steps": 3}
    return run(folder, gpt2(0.0), data, **{**defaults, **settings})


def run_carried(folder, left=None, **settings):
    """Train an LSTM on four tracks of five segments, over the end of an epoch."""
    torch.manual_seed(0)
    config = RecurrentConfig(vocab_size=64, hidden_size=16, dropout=0.0, initializer_range=1.0)
    data = TrainingTracks(torch.randint(0, 64, (4 * 5 * 8 + 1,), generator=torch.Generator().manual_seed(1)), 8, 4)
    data = data if left is None else Mortal(data, left)
    defaults = {"batch_size": 2, "max_steps": 7, "warmup_ratio": 0.0, "save_every_steps": 2}
    return run(folder, RecurrentForCausalLM(config), data, **{**defaults, **settings})


def run_trainer(folder, batch_size):
    args = arguments(
        folder,
        max_steps=4,
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=2,
        eval_strategy="steps",
        eval_steps=4,
        save_strategy="steps",
        save_steps=2,
        train_sampling_strategy="sequential",
        # True expects a sum over tokens and multiplies a classifier's mean loss by the number of processes.
        average_tokens_across_devices=False,
    )
    trainer = Trainer(
        classifier(),
        args,
        train_dataset=functions(16, 1),
        eval_dataset=functions(7, 2),
        compute_metrics=trainer_metrics,
        optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(args, rsa_learning_rate=0.2),
    )
    trainer.add_callback(RSACallback(trainer))
    trainer.train()
    return trainer


def main(part, folder):
    folder = Path(folder)
    make_accelerator(TrainingSettings())
    state = PartialState()
    if part == "fail":
        run_loop(folder, Mortal(texts(11), 3, ValueError) if state.process_index == 1 else texts(11))
        return
    run_loop(folder / "whole", texts(11), report_to=["tensorboard"])
    try:
        # Both processes read their ninth example in the fifth step.
        run_loop(folder / "parts", Mortal(texts(11), 8))
    except Killed:
        torch.manual_seed(99)  # a new process has other generators
        run_loop(folder / "parts", texts(11))
    run_carried(folder / "carried")
    try:
        # Both processes read their ninth segment in the fifth step, within the first epoch.
        run_carried(folder / "carried_parts", left=8)
    except Killed:
        torch.manual_seed(99)
        run_carried(folder / "carried_parts")
    trainer = run_trainer(folder / "trainer", batch_size=2)
    found = {"processes": state.num_processes, "device": str(state.device), "history": trainer.state.log_history}
    (folder / f"rank{state.process_index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    assert os.environ["OMP_NUM_THREADS"] == "1"
    with exit_on_error(ValueError, OSError):
        main(*sys.argv[1:])
