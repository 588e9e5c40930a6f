"""What the distributed tests run in every process: `accelerate launch … distributed_run.py PART FOLDER`."""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

from rsa_hf import RSAConfig, patch_model
from rsa_hf.cli.errors import exit_on_error
from rsa_hf.models.recurrent import RecurrentConfig, RecurrentForCausalLM
from rsa_hf.tasks.defect_detection import trainer_metrics
from rsa_hf.tasks.text_data import TrainingTracks
from rsa_hf.training.loop import make_accelerator, train
from rsa_hf.training.optimizer import optimizer_cls_and_kwargs
from rsa_hf.training.settings import TrainingSettings
from rsa_hf.training.trainer import RSACallback

PLAN = RSAConfig(num_regular=1, num_cyclical_pairs=1, gate_init=0.0)


def language_model():
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 32, "vocab_size": 64}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return patch_model(GPT2LMHeadModel(GPT2Config(**sizes, **off, bos_token_id=0, eos_token_id=0)), PLAN)


def classifier():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return patch_model(BertForSequenceClassification(BertConfig(**sizes, **off, vocab_size=64)), PLAN)


def texts(n):
    """Blocks with from 1 to 15 labels each: a mean of means is not the mean."""
    ids = torch.randint(1, 64, (n, 16), generator=torch.Generator().manual_seed(1))
    labels = torch.stack([row.clone().index_fill_(0, torch.arange(1 + i % 15), -100) for i, row in enumerate(ids)])
    return [{"input_ids": a, "labels": b} for a, b in zip(ids, labels, strict=True)]


def functions(n, seed):
    ids = torch.randint(1, 64, (n, 12), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": torch.tensor(int(row[0] > 32))} for row in ids]


def stack(examples):
    return {name: torch.stack([example[name] for example in examples]) for name in examples[0]}


@torch.no_grad()
def evaluate(model):
    model.eval()
    return {"loss": model(**stack(texts(5))).loss.item()}


class Killed(BaseException):
    """Nothing in the package catches it, as nothing catches a signal."""


class Data(list):
    """Examples, after so many of which a process is killed."""

    def __init__(self, examples, last=None, error=Killed):
        super().__init__(examples)
        self.left, self.error = last, error

    def __getitem__(self, index):
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise self.error("this process has met a bad example")
        return super().__getitem__(index)


def run_loop(folder, data, **settings):
    """11 examples in steps of 4: the last step of an epoch has 3, which two processes cannot share evenly."""
    defaults = {"batch_size": 2, "max_steps": 7, "learning_rate": 1e-2, "warmup_ratio": 0.25, "log_every_steps": 1}
    defaults |= {"save_every_steps": 2, "eval_every_steps": 3}
    training = TrainingSettings(**{"output_dir": str(folder), **defaults, **settings})
    keywords = {"best_metric": "loss", "greater_is_better": False}
    return train(language_model(), data, stack, evaluate, training, **keywords)


class MortalTracks(TrainingTracks):
    """Tracks, after so many segments of which a process is killed."""

    left = None

    def __getitem__(self, index):
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Killed
        return super().__getitem__(index)


def run_carried(folder, left=None, **settings):
    """An LSTM on four tracks of five segments, over the end of an epoch."""
    torch.manual_seed(0)
    config = RecurrentConfig(vocab_size=64, hidden_size=16, dropout=0.0, initializer_range=1.0)
    data = MortalTracks(torch.randint(0, 64, (4 * 5 * 8 + 1,), generator=torch.Generator().manual_seed(1)), 8, 4)
    data.left = left
    defaults = {
        "max_steps": 7,
        "learning_rate": 1e-2,
        "warmup_ratio": 0.0,
        "log_every_steps": 1,
        "save_every_steps": 2,
    }
    training = TrainingSettings(**{"output_dir": str(folder), "batch_size": 2, **defaults, **settings})
    keywords = {"best_metric": "loss", "greater_is_better": False}
    return train(RecurrentForCausalLM(config), data, stack, evaluate, training, **keywords)


def run_trainer(folder, batch_size):
    args = TrainingArguments(
        str(folder),
        max_steps=4,
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=4,
        save_strategy="steps",
        save_steps=2,
        train_sampling_strategy="sequential",
        # True multiplies a classifier's loss by the number of processes: it expects a sum over tokens, not a mean.
        average_tokens_across_devices=False,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
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
    make_accelerator("no")
    state = PartialState()
    if part == "fail":
        run_loop(folder, Data(texts(11), *((3, ValueError) if state.process_index == 1 else ())))
        return
    run_loop(folder / "whole", texts(11))
    try:
        # Both processes come to their ninth example in the fifth step.
        run_loop(folder / "parts", Data(texts(11), last=8))
    except Killed:
        torch.manual_seed(99)  # another process would have other generators
        run_loop(folder / "parts", texts(11))
    run_carried(folder / "carried")
    try:
        # Both processes come to their ninth segment in the fifth step, within the first epoch.
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
