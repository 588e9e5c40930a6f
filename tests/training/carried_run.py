"""Small runs with carried memory, and one in each of several processes: `torchrun … carried_run.py FOLDER`."""

import os
import sys
from pathlib import Path

import torch
from torch.utils.data import default_collate

import small_runs
from models import tiny
from rsa_hf.tasks.text_blocks import TrainingTracks
from rsa_hf.training import newest_whole_checkpoint

LENGTH = 8
STEPS = 7  # of the run in several processes: over the end of an epoch


def lstm(**changes):
    torch.manual_seed(0)
    return tiny.build("recurrent", dilations=[1, 1], **changes)


def tracks():
    """A text of 4 tracks of 6 segments, the same one on every call."""
    tokens = torch.randint(0, tiny.VOCAB, (4 * 6 * LENGTH + 1,), generator=torch.Generator().manual_seed(1))
    return TrainingTracks(tokens, LENGTH, 4)


def run(folder, model, data=None, resume=None, **settings):
    defaults = {"max_steps": 6, "per_device_train_batch_size": 4, "lr_scheduler_type": "constant", "save_steps": 2}
    data = tracks() if data is None else data
    trainer = small_runs.trainer(folder, model, data, default_collate, **{**defaults, **settings})
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def main(folder):
    settings = {"max_steps": STEPS, "per_device_train_batch_size": 2, "save_strategy": "steps"}
    whole = run(folder / "whole", lstm(), **settings)
    whole.save_model()
    try:
        # Both processes read their ninth segment in the fifth step.
        run(folder / "parts", lstm(), small_runs.Mortal(tracks(), 8), **settings)
    except small_runs.Killed:
        torch.manual_seed(99)  # a new process has other generators
        parts = run(folder / "parts", lstm(), resume=newest_whole_checkpoint(folder / "parts"), **settings)
    parts.save_model()
    assert small_runs.losses(parts) == small_runs.losses(whole)


if __name__ == "__main__":
    assert os.environ["WORLD_SIZE"] == "2"
    main(Path(sys.argv[1]))
