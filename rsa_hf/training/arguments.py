"""Read the settings of a run from a YAML file and from `--key value` on the command line."""

from __future__ import annotations

import difflib
import re
from argparse import SUPPRESS
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace, set_loader, set_parsing_settings

from rsa_hf.config import RSAConfig
from rsa_hf.training.settings import ModelSettings, RunConfig, TrainingSettings

__all__ = ["ConfigError", "read_run_config", "read_yaml", "settings_parser"]

DataSettings = TypeVar("DataSettings")


class ConfigError(ValueError):
    """A setting that is unknown, has the wrong type, or has a value that is not allowed."""


def read_run_config(arguments: Sequence[str], data_type: type[DataSettings]) -> RunConfig[DataSettings]:
    """Read a YAML file and the command-line settings that override it.

    The file has the sections `model`, `rsa` (null, or the fields of `RSAConfig`), `data` and `training`. Keys that it
    leaves out have their defaults. On the command line a setting is `--section.key value`, or `--key value` where only
    one section has that key; `--key=value` works too. `--rsa null` trains the plain model. A further dot sets one
    entry of a mapping, as in `--config_overrides.hidden_size 64`. Values are read as YAML 1.2.

    Args:
        arguments: the words after the script's name. `--help` prints all keys and exits.
        data_type: the dataclass of the `data` section.

    Returns:
        The settings, with every value of the type of its field.

    Raises:
        ConfigError: the file cannot be read, or a setting is unknown, ambiguous, of the wrong type or not allowed.
    """
    parser, sections = settings_parser(data_type), _sections(data_type)
    if {"-h", "--help"} & set(arguments):
        parser.print_help()
        raise SystemExit(0)
    path, overrides = _split(arguments)
    content = _read_file(path, sections)
    patched = "rsa" in content
    words: list[str] = []
    for spelled, text in overrides:
        name = _full_name(spelled, sections)
        section, _, key = name.partition(".")
        if name == "rsa":  # takes the place of all that was said before
            content.pop("rsa", None)
            words = [word for word in words if not word.startswith("--rsa")]
        if section == "rsa":
            patched = name != "rsa" or read_yaml(text) is not None
            if not patched:
                continue
        hint = get_type_hints(sections[section]).get(key)
        words.append(f"--{name}={_as_jsonargparse_spells(text, hint)}")
    try:
        values = parser.parse_args(words, namespace=parser.parse_object(content))
    except (ArgumentError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(_one_line(error, sections)) from error
    built = {
        name: _build(name, section, values[name]) for name, section in sections.items() if name != "rsa" or patched
    }
    return RunConfig(built["model"], built.get("rsa"), built["data"], built["training"])


def settings_parser(data_type: type) -> ArgumentParser:
    """The parser of a run's settings; its help lists every key with type, default and docstring."""
    set_loader("yaml1.2", read_yaml, exceptions=(ValueError,))
    # Without these, `class_path: MODULE.NAME` below a key of any type imports that module.
    set_parsing_settings(import_path_denylist=["*"], instantiate_subclass_spec_in_any=False)
    parser = ArgumentParser(
        parser_mode="yaml1.2",
        exit_on_error=False,
        default_env=False,
        add_help=False,
        usage=SUPPRESS,
        description="Keys of CONFIG. --section.key VALUE overrides one, or --key VALUE where only one section has it. "
        "--rsa null trains the plain model.",
    )
    for name, section in _sections(data_type).items():
        parser.add_class_arguments(section, name)
    return parser


def _sections(data_type: type) -> dict[str, Any]:
    return {"model": ModelSettings, "rsa": RSAConfig, "data": data_type, "training": TrainingSettings}


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
        content = read_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}). Give the path of a YAML file.") from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    content = {} if content is None else content
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
        checked[name] = {key: _integer_if_whole(value, hints[key]) for key, value in values.items()}
    return checked


# --- command line -------------------------------------------------------------------------------------------


def _split(arguments: Sequence[str]) -> tuple[Path, list[tuple[str, str]]]:
    """Split the words of a command line into the path of the file, and pairs of key and value."""
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
        raise ConfigError(f"one YAML file is needed before the --key value settings, got {paths or 'none'}.")
    return Path(paths[0]), overrides


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
    near = difflib.get_close_matches(str(name), list(known), n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {name!r:.200}.{hint} Allowed: {', '.join(known)}."


# --- values -------------------------------------------------------------------------------------------------


def _members(hint: Any) -> tuple[Any, ...]:
    """The types that a union allows; of another type, that type."""
    return get_args(hint) or (hint,)


def _integer_if_whole(value: Any, hint: Any) -> Any:
    """Make an integer of 1e4, a float to YAML, for a field that takes integers alone."""
    is_whole = isinstance(value, float) and value.is_integer()
    return int(value) if is_whole and int in _members(hint) and float not in _members(hint) else value


def _as_jsonargparse_spells(text: str, hint: Any) -> str:
    """Spell 1e4 for an integer and -inf for a float as jsonargparse reads them."""
    if text == "-inf" and float in _members(hint):
        return "-.inf"
    is_number = re.fullmatch(r"\d+(\.\d*)?[eE]\+?\d+", text)
    return str(_integer_if_whole(float(text), hint)) if is_number and int in _members(hint) else text


def _build(name: str, section: Any, values: Namespace) -> Any:
    for key, hint in get_type_hints(section).items():
        if values[key] is None and NoneType not in _members(hint):  # which jsonargparse takes for a key left out
            raise ConfigError(f"{name}.{key}=None: {_in_words(hint)} is needed.")
    try:
        return section(**{key: values[key] for key in _keys(section)})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}: {error}") from error


def _one_line(error: Exception, sections: Mapping[str, Any]) -> str:
    """Jsonargparse's message, which has a line for each type that was tried, as one line."""
    text = str(error)
    names = re.findall(r'Parser key "(\w+)\.(\w+)[\w.]*"', text)
    given = re.search(r"(?:Got|Given) value: (.*)", text)
    if names and given:
        section, key = names[-1]
        expected = _in_words(get_type_hints(sections[section])[key])
        return f"{section}.{key}={given[1]:.200}: {expected} is needed."
    return " ".join(text.split())[:2000]


def _in_words(hint: Any) -> str:
    name = hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
    return name.replace("typing.", "")
