"""A run with carried memory in each of several processes: `torchrun … carried_run.py FOLDER`."""

import os
import sys
from pathlib import Path

import torch
from torch.utils.data import default_collate

import small_runs
from rsa_hf.models.recurrent import RecurrentConfig, RecurrentForCausalLM
from rsa_hf.tasks.text_blocks import TrainingTracks
from rsa_hf.training import newest_whole_checkpoint


def run(folder, rows, left=None):
    """Train an LSTM on four tracks of five segments, over the end of an epoch; returns the Trainer.

    `left`: of how many examples this process dies.
    """
    torch.manual_seed(0)
    model = RecurrentForCausalLM(RecurrentConfig(vocab_size=64, hidden_size=16, dropout=0.0, initializer_range=1.0))
    data = TrainingTracks(torch.randint(0, 64, (4 * 5 * 8 + 1,), generator=torch.Generator().manual_seed(1)), 8, 4)
    settings = {"per_device_train_batch_size": rows, "max_steps": 7, "save_strategy": "steps", "save_steps": 2}
    trainer = small_runs.trainer(
        folder, model, data if left is None else small_runs.Mortal(data, left), default_collate, **settings
    )
    trainer.train(resume_from_checkpoint=newest_whole_checkpoint(folder))
    trainer.save_model()
    return trainer


def main(folder):
    whole = run(folder / "whole", rows=2)
    try:
        run(folder / "parts", rows=2, left=8)  # both processes read their ninth segment in the fifth step
    except small_runs.Killed:
        torch.manual_seed(99)  # a new process has other generators
        parts = run(folder / "parts", rows=2)
    assert small_runs.losses(parts) == small_runs.losses(whole)


if __name__ == "__main__":
    assert os.environ["WORLD_SIZE"] == "2"
    main(Path(sys.argv[1]))
