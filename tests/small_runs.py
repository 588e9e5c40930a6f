"""Models, data and training runs of about a second, for the Trainer."""

import torch
from safetensors.torch import load_file
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from rsa_hf import RSAConfig, patch_model
from rsa_hf.training import RSATrainer, RSATrainingArguments

PLAN = RSAConfig(num_regular=1, num_cyclical_pairs=1, gate_init=0.5)


def gpt2(dropout=0.1) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 32, "vocab_size": 64}
    sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return patch_model(GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)), PLAN)


def classifier() -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return patch_model(BertForSequenceClassification(BertConfig(**sizes, **off, vocab_size=64)), PLAN)


def texts(n):
    """Blocks with 1 to 15 labels each, so that the mean of their means is not the mean over labels."""
    ids = torch.randint(1, 64, (n, 16), generator=torch.Generator().manual_seed(1))
    labels = torch.stack([row.clone().index_fill_(0, torch.arange(1 + i % 15), -100) for i, row in enumerate(ids)])
    return [{"input_ids": a, "labels": b} for a, b in zip(ids, labels, strict=True)]


def functions(n, seed=1):
    ids = torch.randint(1, 64, (n, 12), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": torch.tensor(int(row[0] > 32))} for row in ids]


def stack(examples):
    return {name: torch.stack([example[name] for example in examples]) for name in examples[0]}


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the package catches it."""


class Mortal:
    """Examples that raise an error once `left` of them were read."""

    def __init__(self, examples, left, error=Killed):
        self.examples, self.left, self.error = examples, left, error
        if hasattr(examples, "num_tracks"):
            self.num_tracks = examples.num_tracks

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index):
        self.left -= 1
        if self.left < 0:
            raise self.error("this process has met a bad example")
        return self.examples[index]


def arguments(folder, **values):
    """Arguments for the Trainer: on the CPU, quiet, with a log of each step."""
    defaults = {"max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "save_strategy": "no"}
    defaults |= {"logging_steps": 1, "use_cpu": True, "disable_tqdm": True, "report_to": "none"}
    return RSATrainingArguments(str(folder), **{**defaults, **values})


def trainer(folder, model=None, data=None, collate=stack, **values):
    """An `RSATrainer` of a small run; `values` are training arguments."""
    args = arguments(folder, remove_unused_columns=False, **values)
    return RSATrainer(
        model=gpt2() if model is None else model,
        args=args,
        train_dataset=texts(20) if data is None else data,
        data_collator=collate,
    )


def saved_weights(folder):
    return load_file(folder / "model.safetensors")


def losses(trainer):
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


def assert_same_weights(left, right):
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []
