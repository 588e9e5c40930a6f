"""The settings of a training run: dataclasses, read from a YAML file and from `--key value` on the command line."""

from __future__ import annotations

import difflib
import math
import re
from argparse import SUPPRESS
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from accelerate.utils import LoggerType
from jsonargparse import ArgumentError, ArgumentParser, Namespace, set_loader, set_parsing_settings

from rsa_hf.calibration import CalibrationSettings
from rsa_hf.config import RSAConfig

__all__ = [
    "ConfigError",
    "ModelSettings",
    "RunConfig",
    "TrainingSettings",
    "did_you_mean",
    "read_run_config",
    "read_yaml",
]

DataSettings = TypeVar("DataSettings")


@dataclass
class ModelSettings:
    """The model to train, before it is patched: pretrained (`name_or_path`) or from scratch (`model_type`).

    Args:
        name_or_path: name on the Hub, local folder, or `package:NAME/FOLDER`, a folder in an installed package.
        model_type: a model type of transformers, such as "llama", with random weights and sizes from
            `config_overrides`.
        config_overrides: entries of the model's config to change, such as `hidden_size`.
        tokenizer: source of the tokenizer, written as `name_or_path` is; None: the same as the model's.
        attn_implementation: "sdpa", "eager" or another of transformers'; None: transformers' choice.

    Raises:
        ValueError: not exactly one of `name_or_path` and `model_type` is given.
    """

    name_or_path: str | None = None
    model_type: str | None = None
    config_overrides: dict[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None
    attn_implementation: str | None = None

    def __post_init__(self) -> None:
        if (self.name_or_path is None) == (self.model_type is None):
            raise ValueError(
                f"name_or_path={self.name_or_path!r} and model_type={self.model_type!r}: set one of the two "
                "(name_or_path for a pretrained model, model_type for one from scratch), the other to null."
            )


@dataclass
class TrainingSettings:
    """How the model is trained, and the folder for the results.

    Args:
        output_dir: folder for `metrics.jsonl`, `checkpoints/`, `best/` (its step is in `best.json`) and `final/`.
        learning_rate: AdamW's learning rate of the weights, at its peak.
        rsa_learning_rate: learning rate of gates and rates; None: `parameter_scale` times `learning_rate`.
        weight_decay: weight decay of matrices; biases, norms and RSA parameters are never decayed.
        epochs: passes over the training set; ignored if `max_steps` is set.
        max_steps: number of optimiser steps; None: as many as `epochs` takes. Required for streamed data.
        batch_size: examples per process and micro-batch.
        eval_batch_size: examples per batch in evaluation.
        gradient_accumulation_steps: micro-batches per optimiser step.
        warmup_ratio: fraction of all steps in which the learning rate rises from 0.
        lr_schedule: schedule of the learning rate after the warmup.
        max_grad_norm: maximum norm of the gradient; None: no clipping.
        class_weights: in classification, weight the loss so that each class has the same total weight.
        mixed_precision: "no", "bf16" or "fp16".
        gradient_checkpointing: recompute activations in the backward pass to save memory.
        seed: seed of new weights, data order and dropout.
        log_every_steps: log losses, gates and rates every N steps.
        report_to: trackers that get the log too, by Accelerate's names, such as [tensorboard, wandb]; None: none.
        eval_every_steps: evaluate every N steps, and at the end; None: after each epoch. Streamed data has no epochs.
        save_every_steps: save a checkpoint every N steps, and at the end; None: after each evaluation.
        resume: "auto" continues from the newest checkpoint in `output_dir` if there is one; "never" starts over and
            deletes the checkpoints there; a path continues from that checkpoint and deletes newer ones.

    Raises:
        ValueError: a value is outside its range.
    """

    output_dir: str = "outputs/run"
    learning_rate: float = 2e-5
    rsa_learning_rate: float | None = None
    weight_decay: float = 0.01
    epochs: float = 3.0
    max_steps: int | None = None
    batch_size: int = 16
    eval_batch_size: int = 64
    gradient_accumulation_steps: int = 1
    warmup_ratio: float = 0.1
    lr_schedule: Literal["linear", "cosine", "constant"] = "linear"
    max_grad_norm: float | None = 1.0
    class_weights: bool = False
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    gradient_checkpointing: bool = False
    seed: int = 0
    log_every_steps: int = 10
    report_to: list[str] | None = None
    eval_every_steps: int | None = None
    save_every_steps: int | None = None
    resume: str = "auto"

    def __post_init__(self) -> None:
        steps = ("max_steps", "log_every_steps", "eval_every_steps", "save_every_steps")
        for name in ("batch_size", "eval_batch_size", "gradient_accumulation_steps", *steps):
            self._check(name, lambda value: value >= 1, "a whole number ≥ 1")
        for name in ("learning_rate", "rsa_learning_rate", "epochs", "max_grad_norm"):
            self._check(name, lambda value: 0 < value < math.inf, "a positive number")
        self._check("weight_decay", lambda value: 0 <= value < math.inf, "a number ≥ 0")
        self._check("warmup_ratio", lambda value: 0 <= value <= 1, "a number from 0 to 1")
        # numpy takes seeds of 32 bits, and Accelerate adds the index of the process.
        self._check("seed", lambda value: 0 <= value < 2**31, "a whole number from 0 to 2147483647")
        self._check("output_dir", bool, "the name of a folder")
        trackers = [name for name in LoggerType.list() if name != "all"]
        self._check("report_to", lambda names: set(names) <= set(trackers), f"null or a list of {', '.join(trackers)}")

    def _check(self, name: str, is_allowed: Callable[[Any], bool], words: str) -> None:
        value = getattr(self, name)
        if value is not None and not is_allowed(value):
            raise ValueError(f"{name}={value!r}: {words} is needed.")


@dataclass(frozen=True)
class RSASection(RSAConfig):
    """The section `rsa`: the fields of `RSAConfig`, or `calibrate` in their place.

    Args:
        calibrate: choose the heads by `rsa_hf.calibrate` on the training data, before training.

    Raises:
        TypeError: a field has a type that does not fit.
        ValueError: a field has a value that is not allowed, or is given beside `calibrate`.
    """

    calibrate: CalibrationSettings | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.calibrate, Mapping):
            object.__setattr__(self, "calibrate", CalibrationSettings(**self.calibrate))
        plain = RSAConfig()
        given = [each.name for each in fields(plain) if getattr(self, each.name) != getattr(plain, each.name)]
        if self.calibrate is not None and given:
            raise ValueError(f"calibrate: it chooses the heads itself, so {', '.join(given)} cannot be given too.")

    def without_calibrate(self) -> RSAConfig | None:
        """The fields of `RSAConfig`, if they are in force."""
        values = {each.name: getattr(self, each.name) for each in fields(RSAConfig)}
        return RSAConfig(**values) if self.calibrate is None else None


@dataclass
class RunConfig(Generic[DataSettings]):
    """All settings of a run.

    Attributes:
        model: the model to train.
        rsa: the RSA heads; None: the plain model.
        data: the task's data, a dataclass of the task.
        training: how the model is trained.
        calibrate: how RSA heads are chosen before training, in place of `rsa`.
    """

    model: ModelSettings
    rsa: RSAConfig | None
    data: DataSettings
    training: TrainingSettings
    calibrate: CalibrationSettings | None = None

    def to_dict(self) -> dict[str, Any]:
        """All settings as plain mappings, lists, numbers and strings."""
        data: Any = self.data
        rsa = None if self.rsa is None else self.rsa.to_dict()
        return {
            "model": asdict(self.model),
            "rsa": rsa if self.calibrate is None else {"calibrate": asdict(self.calibrate)},
            "data": asdict(data),
            "training": asdict(self.training),
        }


# --- reading ------------------------------------------------------------------------------------------------


class ConfigError(ValueError):
    """A setting that is unknown, has the wrong type, or has a value that is not allowed."""


def read_run_config(arguments: Sequence[str], data_type: type[DataSettings]) -> RunConfig[DataSettings]:
    """Read a YAML file and the command-line settings that override it.

    The file has the sections `model`, `rsa` (null, the fields of `RSAConfig`, or `calibrate`), `data` and `training`.
    Keys that it leaves out have their defaults. On the command line a setting is `--section.key value`, or `--key
    value` where only one section has that key; `--key=value` works too. `--rsa null` trains the plain model. A further
    dot sets one entry of a mapping, as in `--config_overrides.hidden_size 64`. Values are read as YAML 1.2.

    Args:
        arguments: the words after the script's name. `--help` prints all keys and exits.
        data_type: the dataclass of the `data` section.

    Returns:
        The settings, with every value of the type of its field.

    Raises:
        ConfigError: the file cannot be read, or a setting is unknown, ambiguous, of the wrong type or not allowed.
    """
    sections: dict[str, Any] = {
        "model": ModelSettings,
        "rsa": RSASection,
        "data": data_type,
        "training": TrainingSettings,
    }
    parser = _parser(sections)
    if {"-h", "--help"} & set(arguments):
        parser.print_help()
        raise SystemExit(0)
    path, overrides = _split(arguments)
    content = _read_file(path, sections)
    for spelled, text in overrides:
        name = _full_name(spelled, sections)
        try:
            _override(content, name, text, sections)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"--{spelled} {text:.200}: {error}") from error
    try:
        values = parser.parse_object(content)
    except (ArgumentError, TypeError, ValueError, OverflowError) as error:
        # jsonargparse has a line for each type that it tried.
        raise ConfigError(" ".join(str(error).replace("Parser key ", "").split())[:2000]) from error
    if "rsa" not in content:
        del sections["rsa"]
    built = {name: _build(name, section, values[name]) for name, section in sections.items()}
    rsa: RSASection | None = built.get("rsa")
    heads, calibration = (None, None) if rsa is None else (rsa.without_calibrate(), rsa.calibrate)
    return RunConfig(built["model"], heads, built["data"], built["training"], calibration)


def _parser(sections: Mapping[str, Any]) -> ArgumentParser:
    """The parser of the sections; its help lists every key with type, default and docstring."""
    set_loader("yaml1.2", read_yaml, exceptions=(ValueError,))
    # Without these, `class_path: MODULE.NAME` below a key of any type imports that module.
    set_parsing_settings(
        import_path_denylist=["*"],
        import_path_allowlist=["rsa_hf.config", "rsa_hf.HeadConfig", "rsa_hf.calibration"],  # of dataclasses in fields
        instantiate_subclass_spec_in_any=False,
    )
    parser = ArgumentParser(
        parser_mode="yaml1.2",
        exit_on_error=False,
        default_env=False,
        add_help=False,
        usage=SUPPRESS,
        description="Keys of CONFIG. --section.key VALUE overrides one, or --key VALUE where only one section has it. "
        "--rsa null trains the plain model.",
    )
    for name, section in sections.items():
        parser.add_class_arguments(section, name)
    return parser


def _build(name: str, section: Any, values: Namespace) -> Any:
    for key, hint in get_type_hints(section).items():
        if values[key] is None and NoneType not in _members(hint):  # which jsonargparse takes for a key left out
            raise ConfigError(f"{name}.{key}=None: a value of type {getattr(hint, '__name__', hint)} is needed.")
    try:
        return section(**{key: _as_mapping(values[key]) for key in _keys(section)})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}: {error}") from error


def _as_mapping(value: Any) -> Any:
    """A value in which dataclasses are mappings, as `RSASection` takes them."""
    if isinstance(value, (list, tuple)):
        return type(value)(_as_mapping(entry) for entry in value)
    return value.as_dict() if isinstance(value, Namespace) else value


# --- YAML ---------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """The core schema of YAML 1.2 for plain values, without repeated keys.

    In YAML 1.1, PyYAML's default, 1e-4 is a string and the `no` of `mixed_precision: no` is False.
    """

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own class attribute

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = Counter(key.value for key, _ in node.value if isinstance(key.value, str))
        for key, times in keys.items():
            if times > 1:
                line = node.start_mark.line + 1
                raise yaml.YAMLError(f"{key!r} is given more than once in the mapping that starts in line {line}")
        return super().construct_mapping(node, deep)


for _tag, _pattern, _starts in (
    ("null", r"null|~|", ["n", "~", ""]),
    ("bool", r"true|false", ["t", "f"]),
    ("int", r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    # Beside .inf also -inf, which a shut gate is written as.
    ("float", r"[-+]?((\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|\.inf)|-inf|\.nan", list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^({_pattern})$"), _starts)


def _construct_float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    return float(loader.construct_scalar(node).replace(".inf", "inf").replace(".nan", "nan"))


_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)


def read_yaml(text: str) -> Any:
    """Read plain values from a text of YAML 1.2 or JSON.

    Raises:
        ValueError: the text is not valid YAML, or asks for other than plain values.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506  (a SafeLoader: it builds plain values only)
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        # A value that does not fit its tag, such as `!!bool x`, makes PyYAML raise errors of Python's own.
        raise ValueError(f"not valid YAML: {' '.join(str(error).split())}") from error


def _read_file(path: Path, sections: Mapping[str, Any]) -> dict[str, Any]:
    """Read the sections of a file that are not null, and check the names of sections and keys."""
    try:
        content = read_yaml(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}). Give the path of a YAML file.") from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: sections with settings are needed, got {type(content).__name__}.")
    checked: dict[str, Any] = {}
    for name, values in content.items():
        if name not in sections:
            raise ConfigError(f"{path}: {_unknown('section', name, sections)}")
        if values is None:
            continue
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: {name}={values!r:.200}: a mapping of keys to values is needed.")
        hints = get_type_hints(sections[name])
        for key in values:
            if key not in _keys(sections[name]):
                raise ConfigError(f"{path}: {name}: {_unknown('key', key, _keys(sections[name]))}")
        checked[name] = {key: _fitted(value, hints[key]) for key, value in values.items()}
    return checked


# --- command line -------------------------------------------------------------------------------------------


def _split(arguments: Sequence[str]) -> tuple[Path, list[tuple[str, str]]]:
    """Split the words of a command line into the path of the file, and pairs of key and value."""
    paths: list[str] = []
    overrides: list[tuple[str, str]] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            paths.append(word)
        elif equals:
            overrides.append((key, value))
        elif not rest or rest[0].startswith("--"):
            raise ConfigError(f"{word} has no value. Write {word} VALUE, or {word}=VALUE.")
        else:
            overrides.append((key, rest.pop(0)))
    if len(paths) != 1:
        raise ConfigError(f"one YAML file is needed before the --key value settings, got {paths or 'none'}.")
    return Path(paths[0]), overrides


def _override(content: dict[str, Any], name: str, text: str, sections: Mapping[str, Any]) -> None:
    """Set a section, a key or an entry of a mapping in the content of a file; null removes a section."""
    section, _, key = name.partition(".")
    if not key:
        content[section] = read_yaml(text)
        if content[section] is None:
            del content[section]
        return
    key, _, entry = key.partition(".")
    hint = get_type_hints(sections[section])[key]
    values = content.setdefault(section, {})
    if entry:
        values[key] = {**(values.get(key) or {}), entry: _value(text, (Any, *get_args(hint))[-1])}
    else:
        values[key] = _value(text, hint)


def _value(text: str, hint: Any) -> Any:
    """The value of a field or entry of this type that is written so on a command line."""
    is_text = str in _members(hint) and not (text == "null" and NoneType in _members(hint))
    return text if is_text else _fitted(read_yaml(text), hint)


def _full_name(spelled: str, sections: Mapping[str, Any]) -> str:
    """The name of a setting with its section."""
    first, _, rest = spelled.partition(".")
    if first in sections:
        key = rest.partition(".")[0]
        if key and key not in _keys(sections[first]):
            raise ConfigError(f"--{spelled}: {_unknown('key', key, _keys(sections[first]))}")
        return spelled
    owners = [name for name, section in sections.items() if first in _keys(section)]
    if len(owners) > 1:
        choices = " or ".join(f"--{owner}.{spelled}" for owner in owners)
        raise ConfigError(f"--{spelled} is in more than one section. Write {choices}.")
    if not owners:
        known = [key for section in sections.values() for key in _keys(section)]
        raise ConfigError(f"--{spelled}: {_unknown('key', first, [*dict.fromkeys(known), 'rsa'])}")
    return f"{owners[0]}.{spelled}"


def _keys(section: type[Any]) -> list[str]:
    return [field.name for field in fields(section)]


def _unknown(what: str, name: object, known: Iterable[str]) -> str:
    return f"unknown {what} {name!r:.200}.{did_you_mean(str(name), known)} Allowed: {', '.join(known)}."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence with the known name that is most like an unknown one; empty if none is."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _members(hint: Any) -> tuple[Any, ...]:
    """The types that a union allows; of another type, that type."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _fitted(value: Any, hint: Any) -> Any:
    """Make an integer of 1e4, a float to YAML, for a field that takes integers alone, and a list of a single name."""
    members = _members(hint)
    if isinstance(value, str) and list[str] in members:
        return [value]
    is_whole = isinstance(value, float) and value.is_integer()
    return int(value) if is_whole and int in members and float not in members else value
