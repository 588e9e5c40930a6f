"""Read the settings of a run from one YAML file and from `--key value` on the command line."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from rsa_hf.config import RSAConfig
from rsa_hf.training.settings import ModelSettings, RunConfig, TrainingSettings
from rsa_hf.utils.brief import brief
from rsa_hf.utils.plain_yaml import read_yaml

__all__ = ["ConfigError", "read_run_config"]

DataSettings = TypeVar("DataSettings")


class ConfigError(ValueError):
    """A setting that is unknown, of the wrong type, or not allowed."""


def read_run_config(arguments: Sequence[str], data_type: type[DataSettings]) -> RunConfig[DataSettings]:
    """Read a YAML file and the command-line settings that override it.

    The file has the sections `model`, `rsa` (null, or the fields of `RSAConfig`), `data` and `training`; what
    it leaves out has its default. On the command line a setting is `--section.key value`, or `--key value`
    where only one section has that key; `=` may stand for the space. `--rsa null` takes the RSA heads off.
    One entry of a mapping is set with a further dot, as in `--config_overrides.hidden_size 64`. Values are
    read as YAML.

    Args:
        arguments: what stands after the script's name. `--help` prints all keys and exits.
        data_type: the dataclass of the `data` section.

    Returns:
        The settings, all of the right type.

    Raises:
        ConfigError: the file cannot be read, or a setting is unknown, ambiguous, of the wrong type or not
            allowed.
    """
    sections = {"model": ModelSettings, "rsa": RSAConfig, "data": data_type, "training": TrainingSettings}
    if {"-h", "--help"} & set(arguments):
        print(_help(sections))
        raise SystemExit(0)
    path, overrides = _split_arguments(arguments)
    content = _read_yaml(path)
    for section in content:
        if section not in sections:
            raise ConfigError(f"{path}: {_unknown('section', section, sections)}")
    for spelled, text in overrides:
        _override(content, sections, spelled, text)
    return RunConfig(
        model=_build("model", ModelSettings, content.get("model")),
        rsa=None if content.get("rsa") is None else _build("rsa", RSAConfig, content["rsa"]),
        data=_build("data", data_type, content.get("data")),
        training=_build("training", TrainingSettings, content.get("training")),
    )


def _help(sections: dict[str, type]) -> str:
    lines = ["usage: SCRIPT CONFIG.yaml [--key value | --section.key value | --key=value] …", ""]
    for name, section in sections.items():
        lines.append(f"{name}:" + (" (or null: the plain model)" if name == "rsa" else ""))
        lines += [f"  {field.name} (default: {_default(field)!r})" for field in fields(section)]
    return "\n".join(lines)


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


# --- YAML ---------------------------------------------------------------------------------------------------


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = read_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path} ({error.strerror}). Give the path of a YAML file.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no valid YAML: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is {error}") from error
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds {type(content).__name__}, not a mapping of sections to settings.")
    return content


# --- command line -------------------------------------------------------------------------------------------


def _split_arguments(arguments: Sequence[str]) -> tuple[Path, list[tuple[str, str]]]:
    paths: list[str] = []
    overrides: list[tuple[str, str]] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            paths.append(word)
        elif "=" in word:
            key, _, value = word[2:].partition("=")
            overrides.append((key, value))
        elif not rest or rest[0].startswith("--"):
            raise ConfigError(f"{word} has no value. Write {word} VALUE, or {word}=VALUE.")
        else:
            overrides.append((word[2:], rest.pop(0)))
    if len(paths) != 1:
        got = f"got {', '.join(map(repr, paths))}" if paths else "got none"
        raise ConfigError(f"one YAML file is needed before the --key value settings, {got}.")
    return Path(paths[0]), overrides


def _override(content: dict[str, Any], sections: dict[str, type], spelled: str, text: str) -> None:
    try:
        value = read_yaml(text)
    except ValueError as error:
        raise ConfigError(f"--{spelled} {text:.200}: the value is {error}") from error
    if spelled == "rsa":
        content["rsa"] = value
        return
    section, key, entry = _locate(sections, spelled)
    target = content.get(section)
    if target is None:
        target = content[section] = {}
    if not isinstance(target, dict):
        return  # `_build` says what is wrong with the file's section
    if entry is None:
        # A name such as 2024 is a number to YAML, but on the command line nobody quotes twice.
        is_name = isinstance(value, (int, float)) and str in _members(get_type_hints(sections[section])[key])
        target[key] = text if is_name else value
    else:
        mapping = target.get(key) or {}
        if not isinstance(mapping, dict):
            raise ConfigError(f"--{spelled}: {section}.{key} is {brief(mapping)}, not a mapping with entries.")
        target[key] = {**mapping, entry: value}


def _locate(sections: dict[str, type], spelled: str) -> tuple[str, str, str | None]:
    """The section, the key and, for an entry of a mapping, its name."""
    first, _, rest = spelled.partition(".")
    if first in sections:
        key, _, entry = rest.partition(".")
        if not key:
            raise ConfigError(f"--{spelled} is a section. Set one of its keys, as in --{first}.KEY VALUE.")
        if key not in _keys(sections[first]):
            raise ConfigError(f"--{spelled}: {_unknown('key', key, _keys(sections[first]))}")
        return first, key, entry or None
    owners = [name for name, section in sections.items() if first in _keys(section)]
    if len(owners) > 1:
        choices = " or ".join(f"--{owner}.{spelled}" for owner in owners)
        raise ConfigError(f"--{spelled} is in more than one section. Write {choices}.")
    if not owners:
        known = [key for section in sections.values() for key in _keys(section)]
        raise ConfigError(f"--{spelled}: {_unknown('key', first, [*dict.fromkeys(known), 'rsa'])}")
    return owners[0], first, rest or None


# --- sections -----------------------------------------------------------------------------------------------


def _build(name: str, section: type[Any], values: Any) -> Any:
    """Make a section's dataclass of a mapping."""
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise ConfigError(f"{name}={brief(values)}: a mapping of keys to values is needed.")
    for key in values:
        if key not in _keys(section):
            raise ConfigError(f"{name}: {_unknown('key', key, _keys(section))}")
    if section is not RSAConfig:  # which checks its own types, and lets -inf pass as a word
        types_of = get_type_hints(section)
        values = {key: _convert(f"{name}.{key}", value, types_of[key]) for key, value in values.items()}
    for field in fields(section):
        if field.name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(f"{name}.{field.name} is missing; it has no default.")
    try:
        return section(**values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}: {error}") from error


def _keys(section: type[Any]) -> list[str]:
    return [field.name for field in fields(section)]


def _unknown(what: str, name: object, known: Iterable[str]) -> str:
    known = list(known)
    near = difflib.get_close_matches(brief(name).strip("'"), known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {brief(name)}.{hint} Allowed: {', '.join(known)}."


def _members(expected: Any) -> tuple[Any, ...]:
    """The types that a type allows: the members of a union, else itself."""
    return get_args(expected) if get_origin(expected) in (Union, types.UnionType) else (expected,)


def _convert(name: str, value: Any, expected: Any) -> Any:
    """Bring a value to the type of its field.

    Raises:
        ConfigError: it does not fit.
    """
    for member in _members(expected):
        converted = _convert_to_one(value, member)
        if converted is not _NO_FIT:
            return converted
    quotes = " Put it in quotes." if str in _members(expected) and isinstance(value, (int, float)) else ""
    raise ConfigError(f"{name}={brief(value)}: {_describe(expected)} is needed, got {type(value).__name__}.{quotes}")


_NO_FIT = object()


def _convert_to_one(value: Any, expected: Any) -> Any:
    origin = get_origin(expected)
    if origin is Literal:
        return value if value in get_args(expected) else _NO_FIT
    if origin in (list, tuple):
        if not isinstance(value, (list, tuple)):
            return _NO_FIT
        entries = [_convert_to_one(entry, get_args(expected)[0]) for entry in value]
        return _NO_FIT if _NO_FIT in entries else origin(entries)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if expected is float:
        try:
            return float(value) if is_number else _NO_FIT
        except OverflowError:  # a whole number beyond what a float holds
            return _NO_FIT
    if expected is int:
        return int(value) if is_number and value == value // 1 else _NO_FIT
    if expected is Any:
        return value
    return value if isinstance(value, origin or expected) else _NO_FIT


def _describe(expected: Any) -> str:
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a string",
        dict: "a mapping",
    }
    names |= {list: "a list", tuple: "a list", types.NoneType: "null"}
    words = []
    for member in _members(expected):
        if get_origin(member) is Literal:
            words.append(f"one of {', '.join(get_args(member))}")
        else:
            words.append(names[get_origin(member) or member])
    return " or ".join(words)
