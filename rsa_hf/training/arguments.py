"""The settings of a run: `TrainingArguments` and a few of ours, from a flat YAML file and `--key value`."""

import json
from argparse import SUPPRESS
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import torch
from transformers import HfArgumentParser, TrainingArguments
from transformers.hf_argparser import HfArg

from rsa_hf.calibration import CalibrationSettings
from rsa_hf.config import RSAConfig
from rsa_hf.utils.locate import expanded
from rsa_hf.utils.text import did_you_mean
from rsa_hf.utils.yaml import read_yaml

Data = TypeVar("Data")

# Metrics of the tasks for which lower is better. TrainingArguments knows this only for losses.
LOWER_IS_BETTER = ("bits_per_byte", "token_perplexity", "word_perplexity", "loss_nats_per_token", "vd_score")

# Keys of rsa_hf 0.1, which had sections, and their names now.
RENAMED = {
    "model.name_or_path": "model_name_or_path",
    "model.tokenizer": "tokenizer_name",
    "data.source": "train_file, dataset_name, or neither for the embedded data",
    "data.files": "train_file, validation_file, test_file",
    "data.hub_dataset": "dataset_name",
    "data.hub_subset": "dataset_config_name",
    "data.text_column": "text_column_name",
    "data.max_train_examples": "max_train_samples",
    "data.max_eval_examples": "max_eval_samples",
    "data.max_length": "max_seq_length",
    "data.validation_fraction": "validation_split_percentage",
    "data.test_fraction": "test_split_percentage",
    "data.seed": "sample_seed",
    "training.epochs": "num_train_epochs",
    "training.batch_size": "per_device_train_batch_size",
    "training.eval_batch_size": "per_device_eval_batch_size",
    "training.warmup_ratio": "warmup_steps (below 1: a share of all steps)",
    "training.lr_schedule": "lr_scheduler_type",
    "training.mixed_precision": "bf16 or fp16",
    "training.log_every_steps": "logging_steps",
    "training.eval_every_steps": "eval_strategy and eval_steps",
    "training.save_every_steps": "save_strategy and save_steps",
    "training.resume": "resume_from_checkpoint, or overwrite_output_dir to start over",
}


@dataclass
class ModelArguments:
    """The model to train, before it is patched: pretrained (`model_name_or_path`) or from scratch (`model_type`)."""

    model_name_or_path: str | None = HfArg(
        default=None, help="Name on the Hub, local folder, or package:NAME/FOLDER in a Python package."
    )
    model_type: str | None = HfArg(default=None, help="Model type of a new model, such as llama: random weights.")
    config_overrides: dict[str, Any] | str | None = HfArg(
        default=None, help="Entries of the model's config to change."
    )
    tokenizer_name: str | None = HfArg(
        default=None, help="Source of the tokenizer, or bytes or text8. Default: the model's."
    )
    attn_implementation: str | None = HfArg(default=None, help="sdpa, eager or another of transformers'.")
    ignore_mismatched_sizes: bool = HfArg(default=False, help="Use a new head if the checkpoint's has other classes.")

    def __post_init__(self) -> None:
        self.config_overrides = as_mapping("config_overrides", self.config_overrides)


@dataclass
class RSAArguments:
    """The RSA heads of a run: `config`, or what `calibrate` chooses, or none."""

    rsa: dict[str, Any] | str | None = HfArg(
        default_factory=dict,
        help="Fields of RSAConfig, as a mapping; from_scratch: those for random weights; none: the plain model; "
        "calibrate, or {calibrate: {max_rows: 64}}: choose the heads on the training data.",
    )

    def __post_init__(self) -> None:
        self.config: RSAConfig | None = None
        self.calibrate: CalibrationSettings | None = None
        if isinstance(self.rsa, str):
            known: dict[str, Any] = {"none": None, "null": None, "calibrate": {"calibrate": {}}}
            known["from_scratch"] = RSAConfig.from_scratch().to_dict()
            self.rsa = known[self.rsa] if self.rsa in known else as_mapping("rsa", self.rsa)
        if self.rsa is None:
            return
        try:
            if not isinstance(self.rsa, dict) or "calibrate" not in self.rsa:
                self.config = RSAConfig.from_dict(self.rsa)
            elif len(self.rsa) > 1:
                raise ValueError("calibrate chooses the heads itself, so nothing else can be given beside it.")
            else:
                self.calibrate = CalibrationSettings(**(self.rsa["calibrate"] or {}))
        except (TypeError, ValueError) as error:
            raise ValueError(f"rsa: {error}") from error


@dataclass
class RSATrainingArguments(TrainingArguments):
    """transformers' `TrainingArguments`, with a learning rate for gates and rates.

    Some defaults differ: a loss that is not a number is logged unchanged, metrics of the tasks know whether less is
    better, and memory is not pinned without an accelerator. A run always does what `resume_from_checkpoint=true` does.
    """

    rsa_learning_rate: float | None = HfArg(
        default=None, help="Learning rate of gates and rates. Default: parameter_scale (20) times learning_rate."
    )
    overwrite_output_dir: bool = HfArg(default=False, help="Start over: delete the checkpoints of output_dir.")
    logging_nan_inf_filter: bool = HfArg(
        default=False, help="Log the mean of earlier losses in place of a loss that is not a number."
    )

    def __post_init__(self) -> None:
        metric = (self.metric_for_best_model or "").removeprefix("eval_")
        if self.greater_is_better is None and metric in LOWER_IS_BETTER:
            self.greater_is_better = False
        if not torch.accelerator.is_available():
            self.dataloader_pin_memory = False  # without an accelerator, torch warns at every data set
        if str(self.resume_from_checkpoint).lower() in ("true", "false"):
            self.resume_from_checkpoint = None  # a run continues from its newest checkpoint anyway
        super().__post_init__()  # type: ignore[no-untyped-call]

    @property
    def folder(self) -> Path:
        """`output_dir` as a path."""
        assert self.output_dir is not None  # TrainingArguments has a default
        return Path(self.output_dir)


@dataclass
class RunArguments(Generic[Data]):
    """All settings of a run, all keys that were given, and those given on the command line."""

    model: ModelArguments
    rsa: RSAArguments
    data: Data
    training: RSATrainingArguments
    given: frozenset[str] = frozenset()
    from_command_line: frozenset[str] = frozenset()


def read_arguments(arguments: Sequence[str], data_type: type[Data]) -> RunArguments[Data]:
    """Read the settings of a run from a YAML file and from `--key value`, which overrides it.

    The keys are the fields of `ModelArguments`, `RSAArguments`, `data_type` and `RSATrainingArguments`. In the file,
    null means the default; for `rsa`, the plain model. `--key.entry value` sets one entry of a mapping. `~` and
    `$VARIABLES` in paths are replaced. `--help` prints all keys.

    Args:
        arguments: the words of the command; the first may be the path of a YAML file.
        data_type: the dataclass of the task's data.
    """
    types: list[Any] = [ModelArguments, RSAArguments, data_type, RSATrainingArguments]
    known = [each.name for kind in types for each in fields(kind) if each.init]
    words = list(arguments)
    content = _content(expanded(words.pop(0)), known) if words and not words[0].startswith("-") else {}
    words = _set_entries(content, words, known)
    parser = _Parser(types, allow_abbrev=False, usage=SUPPRESS)
    # Values from the file are checked as if they came before those on the command line.
    from_file = [
        f"--{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in content.items()
        if not isinstance(value, list)
    ]
    for key, value in content.items():
        if isinstance(value, list):
            action = next(action for action in parser._actions if action.dest == key)
            if action.type in (int, float) and action.nargs is None:
                raise ValueError(f"{key}: {value} is a list, and one value is needed.")
            kept = value if action.nargs is None else [str(each) if action.type is str else each for each in value]
            parser.set_defaults(**{key: kept})
    *parts, rest = parser.parse_args_into_dataclasses(
        [*from_file, *words], return_remaining_strings=True, look_for_args_file=False
    )
    if rest and not rest[0].startswith("-"):
        raise ValueError(f"{rest[0]}: a CONFIG comes before all keys, and each of these has one value.")
    if rest:
        raise ValueError(f"{rest[0]}: {_unknown(rest[0].partition('=')[0].removeprefix('--'), known)}")
    for part in parts:
        for each in fields(part):
            value = getattr(part, each.name)
            if each.name.endswith(("_file", "_dir", "_name", "_or_path", "_checkpoint")):
                if isinstance(value, list):
                    raise ValueError(f"{each.name}: {value} is a list, and one value is needed.")
                if isinstance(value, str):
                    setattr(part, each.name, expanded(value))
    keys = (word.removeprefix("--").partition("=")[0] for word in words if word.startswith("--"))
    from_command_line = frozenset(key.replace("-", "_") for key in keys)
    model, rsa, data, training = parts
    return RunArguments(model, rsa, data, training, from_command_line.union(content), from_command_line)


class _Parser(HfArgumentParser):  # type: ignore[misc]  # it has no types
    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage, which has a hundred keys, and exiting."""
        raise ValueError(message.removeprefix("argument "))


def _content(path: str, known: Sequence[str]) -> dict[str, Any]:
    """The keys of a YAML file, except those that are null, which means the default."""
    try:
        content = read_yaml(Path(path).read_text(encoding="utf-8")) or {}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: keys with values are needed, got {type(content).__name__}.")
    sections = {name: content[name] for name in ("model", "data", "training") if isinstance(content.get(name), dict)}
    if sections:
        keys = ((f"{section}.{key}", key) for section, content in sections.items() for key in content)
        old = "; ".join(f"{key} → {RENAMED.get(key, name)}" for key, name in keys)
        raise ValueError(f"{path}: keys have no sections any more and are those of TrainingArguments: {old}.")
    for key in content:
        if key not in known:
            raise ValueError(f"{path}: {_unknown(str(key), known)}")
    return {key: value for key, value in content.items() if value is not None or key == "rsa"}


def _set_entries(content: dict[str, Any], words: Sequence[str], known: Sequence[str]) -> list[str]:
    """Apply `--key.entry value` and `--key.entry=value` to the content of a file; return the other words."""
    rest, others = list(words), list[str]()
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        key, dot, entry = name.partition(".")
        if not (word.startswith("--") and dot and key in known):
            others.append(word)
            continue
        if not equals and not rest:
            raise ValueError(f"{word} has no value.")
        if any(each.partition("=")[0] == f"--{key}" for each in words):
            raise ValueError(f"--{key} and --{name}: one would replace the other. Give the entry in --{key}.")
        mapping = content.get(key) or {}
        if not isinstance(mapping, dict):
            raise ValueError(f"{word}: {key} must be a mapping in the file.")
        content[key] = {**mapping, entry: read_yaml(value if equals else rest.pop(0))}
    return others


def _unknown(name: str, known: Iterable[str]) -> str:
    old = [new for key, new in RENAMED.items() if key.partition(".")[2] == name]
    hint = f" It is now {old[0]}." if old else did_you_mean(name, known)
    return f"unknown key {name!r:.200}.{hint} --list-keys shows all."


def as_mapping(name: str, value: dict[str, Any] | str | None) -> dict[str, Any]:
    """A setting that is a mapping; on a command line, it is written as JSON or YAML."""
    read = read_yaml(value) if isinstance(value, str) else value
    if read is not None and not isinstance(read, dict):
        raise ValueError(f"{name}={value!r:.200}: a mapping is needed, such as '{{key: value}}'.")
    return read or {}
