"""The training runs that are killed: both scripts, the Trainer, and the loop alone, all tiny."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from families import CONFIGS, FULL_PLAN, VOCAB
from reliability.killed import ROOT, Run, lines, run_script, tensors
from rsa_hf import RSAConfig, patch_model
from rsa_hf.training.arguments import TrainingSettings
from rsa_hf.training.optimizer import optimizer_cls_and_kwargs
from rsa_hf.training.run import train
from rsa_hf.training.trainer import RSACallback, newest_whole_checkpoint

OUTPUT = "/(whole|parts[^/]*)/"  # as `kill_and_go_on` calls the folders of runs

# --- the loop of the scripts, and the scripts ----------------------------------------------------------------------


def train_loop(folder: Path, **settings) -> None:
    """A few steps of a model with dropout, with a checkpoint after each."""
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 4, "n_positions": 16, "vocab_size": 32}
    plan = RSAConfig(num_regular=1, num_cyclical_pairs=1)
    model = patch_model(GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)), plan)
    ids = torch.randint(1, 32, (12, 8), generator=torch.Generator().manual_seed(1))
    examples = [{"input_ids": row, "labels": row} for row in ids]

    def stack(chosen):
        return {name: torch.stack([example[name] for example in chosen]) for name in chosen[0]}

    @torch.no_grad()
    def evaluate(model):
        model.eval()
        return {"loss": model(**stack(examples[:4])).loss.item()}

    values = {"batch_size": 4, "max_steps": 4, "learning_rate": 1e-2, "log_every_steps": 1}
    values |= {"eval_every_steps": 2, "save_every_steps": 1, **settings}
    training = TrainingSettings(output_dir=str(folder), **values)
    train(model, examples, stack, evaluate, training, best_metric="loss", greater_is_better=False)


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run of a script, oldest first."""
    return sorted((folder / "checkpoints").glob("step-*"), key=lambda path: int(path.name[5:]))


def content(checkpoint: Path) -> dict:
    """All that one of Accelerate's checkpoints holds; raises where a file is missing or torn."""
    return {
        "model": load_file(checkpoint / "model.safetensors"),
        "optimizer": tensors(checkpoint / "optimizer.bin"),
        "schedule": tensors(checkpoint / "scheduler.bin"),
        "random": tensors(checkpoint / "random_states_0.pkl"),
        "progress": json.loads((checkpoint / "progress.json").read_text())["progress"],
    }


def check_checkpoints(folder: Path) -> None:
    """Every checkpoint is whole, and there is one if a log of steps before it says that there was."""
    found = checkpoints(folder)
    for checkpoint in found:
        content(checkpoint)
    if found:
        assert len(found) <= 3  # two that are kept, and one that is about to be deleted


def result(folder: Path) -> dict:
    """Weights, optimiser state and losses of a finished run."""
    left = sorted(path.name for path in folder.rglob(".*") if path.name != ".lock")
    return {
        "left over": left,
        "log": lines(folder / "metrics.jsonl"),
        "checkpoints": {path.name: content(path) for path in checkpoints(folder)},
        "best": load_file(folder / "best" / "model.safetensors"),
        "final": load_file(folder / "final" / "model.safetensors"),
    }


def is_torn(folder: Path) -> bool:
    """Whether a checkpoint was left half written."""
    return bool(list((folder / "checkpoints").glob(".step-*")))


def _options(values: dict) -> list[str]:
    return [f"--{key}={value}" for key, value in values.items()]


def loop() -> Run:
    return Run(train_loop, lambda folder: (folder,), OUTPUT, "checkpoints/", is_torn, check_checkpoints, result)


def language_model(folder: Path) -> Run:
    """`scripts/train_language_model.py` on a text of a few lines."""
    text = folder / "text.txt"
    text.write_text("".join(f"line {i} of a text, not a long one\n" for i in range(400)))
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 32}
    values = {f"config_overrides.{name}": value for name, value in sizes.items()}
    values |= {"config_overrides.attention_dropout": 0.1}  # which reads the random generator
    values |= {"source": "files", "files.train": text, "block_size": 32, "batch_size": 4, "max_steps": 48}
    values |= {"eval_every_steps": 16, "save_every_steps": 3, "log_every_steps": 1}
    config = str(ROOT / "configs" / "lm_bytes_embedded.yaml")

    def arguments(output):
        return "train_language_model.py", [config, *_options(values), f"--output_dir={output}"]

    return Run(run_script, arguments, OUTPUT, "checkpoints/", is_torn, check_checkpoints, result)


def defect_detection(folder: Path) -> Run:
    """`scripts/train_defect_detection.py` on forty functions, with a small BERT."""
    functions = [f"int f{i}(int a) {{ return a {'<=>'[i % 3]} {i}; }}" for i in range(40)]
    words = Tokenizer(models.BPE(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words.train_from_iterator(functions, trainers.BpeTrainer(vocab_size=100, special_tokens=special))
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), special, strict=True))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=32, **names)
    sizes = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 12, "intermediate_size": 32}
    torch.manual_seed(0)
    model = BertModel(BertConfig(**sizes, vocab_size=len(tokenizer), max_position_embeddings=32))
    for part in (tokenizer, model):
        part.save_pretrained(folder / "bert")
    values = {"name_or_path": folder / "bert", "source": "files", "max_length": 32, "chunk_overlap": 4}
    for i, split in enumerate(("train", "validation", "test")):
        path = values[f"{split}_file"] = folder / f"{split}.jsonl"
        chosen = functions[:20] if split == "train" else functions[10 * i + 10 : 10 * i + 20]
        path.write_text("\n".join(json.dumps({"func": f, "target": int(j % 4 == 0)}) for j, f in enumerate(chosen)))
    values |= {"max_steps": 36, "batch_size": 8, "eval_batch_size": 4, "learning_rate": 1e-3}
    values |= {"eval_every_steps": 12, "save_every_steps": 3, "log_every_steps": 1}
    config = str(ROOT / "configs" / "defect_minilm_embedded.yaml")

    def arguments(output):
        return "train_defect_detection.py", [config, *_options(values), f"--output_dir={output}"]

    return Run(run_script, arguments, OUTPUT, "checkpoints/", is_torn, check_checkpoints, result)


# --- the Trainer ---------------------------------------------------------------------------------------------------

STEPS, SAVED_EVERY = 24, 3


def train_with_trainer(folder: Path, **values) -> None:
    """Train a classifier with dropout, going on from the newest whole checkpoint."""
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(CONFIGS["roberta"]())
    patch_model(model, RSAConfig(**FULL_PLAN))
    ids = torch.randint(3, VOCAB, (40, 10), generator=torch.Generator().manual_seed(0))
    examples = [{"input_ids": row, "labels": torch.tensor(i % 2)} for i, row in enumerate(ids)]
    defaults = {"max_steps": STEPS, "save_steps": SAVED_EVERY, "save_total_limit": 2, "logging_steps": 1, "seed": 1}
    defaults |= {"eval_strategy": "steps", "eval_steps": 12, "per_device_train_batch_size": 4, "learning_rate": 1e-3}
    defaults |= {"weight_decay": 0.1, "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    args = TrainingArguments(str(folder), **{**defaults, **values})
    trainer = Trainer(
        model,
        args,
        train_dataset=examples,
        eval_dataset=examples[:8],
        optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(args, rsa_learning_rate=0.05),
    )
    trainer.add_callback(RSACallback(trainer))
    trainer.train(resume_from_checkpoint=newest_whole_checkpoint(folder))


def trainer_content(checkpoint: Path) -> dict:
    """All that one of the Trainer's checkpoints holds; raises where a file is missing or torn."""
    timed = ("runtime", "per_second", "train_loss", "total_flos")
    history = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    return {
        "model": load_file(checkpoint / "model.safetensors"),
        "optimizer": tensors(checkpoint / "optimizer.pt"),
        "schedule": tensors(checkpoint / "scheduler.pt"),
        "random": tensors(checkpoint / "rng_state.pth"),
        "log": [{key: value for key, value in logs.items() if not key.endswith(timed)} for logs in history],
    }


def check_trainer_checkpoints(folder: Path) -> None:
    """The newest whole one is whole, and the one before the newest at the oldest, if one was saved."""
    newest = newest_whole_checkpoint(folder)
    steps = sorted(int(path.name.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-*"))
    if newest is None:
        assert len(steps) <= 1  # none, or a torn one that was the first
    else:
        assert int(Path(newest).name.removeprefix("checkpoint-")) in steps[-2:]
        trainer_content(Path(newest))


def trainer_is_torn(folder: Path) -> bool:
    """Whether the newest checkpoint was left half written."""
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.removeprefix("checkpoint-")))
    return bool(found) and str(found[-1]) != newest_whole_checkpoint(folder)


def trainer_result(folder: Path) -> dict:
    return trainer_content(folder / f"checkpoint-{STEPS}")


def trainer() -> Run:
    return Run(
        train_with_trainer,
        lambda folder: (folder,),
        OUTPUT,
        r"checkpoint-\d+",
        trainer_is_torn,
        check_trainer_checkpoints,
        trainer_result,
    )
