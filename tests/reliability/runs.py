"""Tiny training runs in processes of their own, which may be killed: both scripts, the Trainer, and the loop alone.

A process is forked from a server that has imported torch, transformers and rsa_hf, so that it starts fast. It counts
its own file events (a file is opened for writing, created, renamed, removed). "Before the seventh event in
checkpoints/" is therefore an exact moment, and a few milliseconds after an event is in the middle of a write.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy
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

import rsa_hf
from families import CONFIGS, FULL_PLAN, VOCAB
from rsa_hf import RSAConfig, patch_model
from rsa_hf.training.arguments import TrainingSettings
from rsa_hf.training.optimizer import optimizer_cls_and_kwargs
from rsa_hf.training.run import train
from rsa_hf.training.trainer import RSACallback, newest_whole_checkpoint
from small_runs import stack

ROOT = Path(__file__).parents[2]
SECONDS = 120  # for one process
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}

SERVER = multiprocessing.get_context("forkserver")
_MODELS = [f"transformers.models.{name}.modeling_{name}" for name in ("bert", "gpt2", "llama", "roberta")]
_TASKS = ["rsa_hf.tasks.defect_detection", "rsa_hf.tasks.language_modeling"]
SERVER.set_forkserver_preload(["matplotlib.pyplot", "transformers.trainer", *_MODELS, *_TASKS])


# --- processes -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moment:
    """When a process is killed.

    Attributes:
        pattern: regular expression for the path of a file event.
        event: the number of the event among those, from 1.
        delay: seconds after the event; None: just before it.
    """

    pattern: str
    event: int
    delay: float | None = None


def run_in_process(
    target: Callable[..., None],
    arguments: tuple[Any, ...],
    log: Path,
    moment: Moment | None = None,
    seconds: float = SECONDS,
) -> int:
    """Call a function in a process of its own, and kill the process at the moment.

    Returns:
        The exit code; −9 if the process was killed.
    """
    listener, told = SERVER.Pipe(duplex=False)
    process = SERVER.Process(target=_child, args=(target, arguments, log, moment, told, rsa_hf.__file__))
    process.start()
    told.close()
    try:
        if moment is not None and moment.delay is not None:
            wait([listener, process.sentinel], seconds)
            if process.is_alive():
                time.sleep(moment.delay)
                process.kill()
        process.join(seconds)
        if process.is_alive():
            raise AssertionError(f"the process has not ended:\n{log.read_text()}")
    finally:
        process.kill()
        listener.close()
    return process.exitcode


def _child(target, arguments, log, moment, told, package):
    with open(log, "a", encoding="utf-8") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    assert os.path.samefile(rsa_hf.__file__, package)  # the server has its own import path
    torch.set_num_threads(1)
    torch.manual_seed(os.getpid())  # the initial random state must not matter
    if moment is not None:
        _listen(moment, told)
    code = 0
    try:
        target(*arguments)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _listen(moment, told):
    seen = 0

    def hook(event, arguments):
        nonlocal seen
        if event not in EVENTS or not isinstance(arguments[0], (str, bytes, os.PathLike)):
            return
        if event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR):
            return
        if re.search(moment.pattern, os.fsdecode(arguments[0])):
            seen += 1
            if seen == moment.event and moment.delay is None:
                os.kill(os.getpid(), signal.SIGKILL)
            elif seen == moment.event:
                told.send_bytes(b"seen")

    sys.addaudithook(hook)


# --- the loop ------------------------------------------------------------------------------------------------------


def train_loop(folder: Path, **settings) -> None:
    """Train a model with dropout for a few steps, with a checkpoint after each."""
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 4, "n_positions": 16, "vocab_size": 32}
    plan = RSAConfig(num_regular=1, num_cyclical_pairs=1)
    model = patch_model(GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)), plan)
    ids = torch.randint(1, 32, (12, 8), generator=torch.Generator().manual_seed(1))
    examples = [{"input_ids": row, "labels": row} for row in ids]

    @torch.no_grad()
    def evaluate(model):
        model.eval()
        return {"loss": model(**stack(examples[:4])).loss.item()}

    values = {"batch_size": 4, "max_steps": 4, "learning_rate": 1e-2, "log_every_steps": 1}
    values |= {"eval_every_steps": 2, "save_every_steps": 1, **settings}
    training = TrainingSettings(output_dir=str(folder), **values)
    train(model, examples, stack, evaluate, training, best_metric="loss", greater_is_better=False)


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted((folder / "checkpoints").glob("step-*"), key=lambda path: int(path.name[5:]))


def tensors(path: Path) -> Any:
    """Read a file of `torch.save`."""
    return torch.load(path, map_location="cpu", weights_only=False)


def bitwise(content: Any) -> Any:
    """Replace tensors and arrays in nested containers by digests, to compare them bit for bit."""

    def digest(leaf):
        array = numpy.asarray(leaf)
        return f"{array.dtype} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}"

    return json.loads(json.dumps(content, default=digest))


def content(checkpoint: Path) -> dict:
    """The content of a checkpoint of Accelerate. A missing or truncated file is an error."""
    found = {
        "model": load_file(checkpoint / "model.safetensors"),
        "optimizer": tensors(checkpoint / "optimizer.bin"),
        "schedule": tensors(checkpoint / "scheduler.bin"),
        "random": tensors(checkpoint / "random_states_0.pkl"),
        "progress": json.loads((checkpoint / "progress.json").read_text())["progress"],
    }
    return bitwise(found)


def require_whole(folder: Path) -> None:
    """Check that all checkpoints are complete, and that there are at most two to keep and one to be deleted."""
    assert len([content(checkpoint) for checkpoint in checkpoints(folder)]) <= 3


def is_torn(folder: Path) -> bool:
    """Whether there is a partial checkpoint."""
    return any((folder / "checkpoints").glob(".step-*"))


def result(folder: Path) -> dict:
    """Weights, optimiser states and losses of a finished run."""
    return {
        "left over": sorted(path.name for path in folder.rglob(".*") if path.name != ".lock"),
        "log": [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()],
        "checkpoints": {path.name: content(path) for path in checkpoints(folder)},
        "best": bitwise(load_file(folder / "best" / "model.safetensors")),
        "final": bitwise(load_file(folder / "final" / "model.safetensors")),
    }


@dataclass(frozen=True)
class Run:
    """A training run that can be resumed. The defaults are for the loop.

    Attributes:
        target: the training function, in a module that a new process can import.
        arguments: takes the output folder and returns the arguments of `target`.
        checkpoint: regular expression for the paths of file events while a checkpoint is written or deleted.
        is_torn: whether the folder has a partial checkpoint.
        require_whole: raises if a checkpoint to resume from is damaged or missing.
        result: everything of a finished run that has to be equal.
    """

    target: Callable[..., None] = train_loop
    arguments: Callable[[Path], tuple[Any, ...]] = lambda folder: (folder,)
    checkpoint: str = "checkpoints/"
    is_torn: Callable[[Path], bool] = is_torn
    require_whole: Callable[[Path], None] = require_whole
    result: Callable[[Path], dict[str, Any]] = result


# --- the scripts ---------------------------------------------------------------------------------------------------


def run_script(name: str, arguments: list[str]) -> None:
    """Run a script of the repository as a user does."""
    sys.argv = [str(ROOT / "scripts" / name), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _script(name: str, config: str, values: dict) -> Run:
    words = [str(ROOT / "configs" / config), *(f"--{key}={value}" for key, value in values.items())]
    return Run(run_script, lambda folder: (name, [*words, f"--output_dir={folder}"]))


def language_model(folder: Path) -> Run:
    """`scripts/train_language_model.py` on a text of a few lines."""
    text = folder / "text.txt"
    text.write_text("".join(f"line {i} of a text, not a long one\n" for i in range(400)))
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 32}
    sizes |= {"attention_dropout": 0.1}  # uses the random generator
    values = {f"config_overrides.{name}": value for name, value in sizes.items()}
    values |= {"source": "files", "files.train": text, "block_size": 32, "batch_size": 4, "max_steps": 48}
    values |= {"eval_every_steps": 16, "save_every_steps": 3, "log_every_steps": 1}
    return _script("train_language_model.py", "lm_bytes_embedded.yaml", values)


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
    for split, chosen in {"train": functions[:20], "validation": functions[20:30], "test": functions[30:]}.items():
        path = values[f"{split}_file"] = folder / f"{split}.jsonl"
        path.write_text("\n".join(json.dumps({"func": f, "target": int(j % 4 == 0)}) for j, f in enumerate(chosen)))
    values |= {"max_steps": 36, "batch_size": 8, "eval_batch_size": 4, "learning_rate": 1e-3}
    values |= {"eval_every_steps": 12, "save_every_steps": 3, "log_every_steps": 1}
    return _script("train_defect_detection.py", "defect_minilm_embedded.yaml", values)


# --- the Trainer ---------------------------------------------------------------------------------------------------


def train_with_trainer(folder: Path, **values) -> None:
    """Train a classifier with dropout, resuming from the newest complete checkpoint."""
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(CONFIGS["roberta"]())
    patch_model(model, FULL_PLAN)
    ids = torch.randint(3, VOCAB, (40, 10), generator=torch.Generator().manual_seed(0))
    examples = [{"input_ids": row, "labels": torch.tensor(i % 2)} for i, row in enumerate(ids)]
    defaults = {"max_steps": 24, "save_steps": 3, "save_total_limit": 2, "logging_steps": 1, "seed": 1}
    defaults |= {"eval_strategy": "steps", "eval_steps": 12, "per_device_train_batch_size": 4, "learning_rate": 1e-3}
    defaults |= {"weight_decay": 0.1, "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    args = TrainingArguments(str(folder), **{**defaults, **values})
    optimizer = optimizer_cls_and_kwargs(args, rsa_learning_rate=0.05)
    trainer = Trainer(
        model, args, train_dataset=examples, eval_dataset=examples[:8], optimizer_cls_and_kwargs=optimizer
    )
    trainer.add_callback(RSACallback(trainer))
    newest = newest_whole_checkpoint(folder)
    if newest != str(folder / f"checkpoint-{args.max_steps}"):  # a Trainer resumed at its end takes another step
        trainer.train(resume_from_checkpoint=newest)


def trainer_content(checkpoint: Path) -> dict:
    """The content of a checkpoint of the Trainer. A missing or truncated file is an error."""
    timed = ("runtime", "per_second", "train_loss", "total_flos")
    history = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    found = {
        "model": load_file(checkpoint / "model.safetensors"),
        "optimizer": tensors(checkpoint / "optimizer.pt"),
        "schedule": tensors(checkpoint / "scheduler.pt"),
        "random": tensors(checkpoint / "rng_state.pth"),
        "log": [{key: value for key, value in logs.items() if not key.endswith(timed)} for logs in history],
    }
    return bitwise(found)


def _trainer_checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.removeprefix("checkpoint-")))


def _trainer_is_torn(folder: Path) -> bool:
    found = _trainer_checkpoints(folder)
    return bool(found) and str(found[-1]) != newest_whole_checkpoint(folder)


def _require_whole_of_trainer(folder: Path) -> None:
    """Check that the newest complete checkpoint is the last or the one before. Without one, at most one is partial."""
    newest, found = newest_whole_checkpoint(folder), _trainer_checkpoints(folder)
    if newest is None:
        assert len(found) <= 1
    else:
        assert Path(newest) in found[-2:]
        trainer_content(Path(newest))


def _trainer_result(folder: Path) -> dict:
    return trainer_content(folder / "checkpoint-24")


def trainer(folder: Path) -> Run:
    """`train_with_trainer`. It needs no files in the folder."""
    functions = {"is_torn": _trainer_is_torn, "require_whole": _require_whole_of_trainer, "result": _trainer_result}
    return Run(train_with_trainer, checkpoint=r"checkpoint-\d+", **functions)
