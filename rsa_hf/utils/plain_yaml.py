"""Read YAML that may come from anyone: plain values alone, of a bounded size, and one kind of error."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable
from typing import Any

import yaml

__all__ = ["read_yaml"]

MAX_VALUES = 100_000  # with every alias written out: a few lines of YAML can stand for more than fits into memory
MAX_DEPTH = 30


class _Loader(yaml.SafeLoader):
    """Reads plain values as YAML 1.2 does, and refuses a key that stands twice.

    In YAML 1.1, PyYAML's language, 1e-4 is a string and the `no` of `mixed_precision: no` is False.
    """

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own class attribute
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        # Refused here, on the way down: PyYAML takes seconds over some thousand brackets.
        if self.depth == MAX_DEPTH:
            raise yaml.YAMLError(f"it is nested more than {MAX_DEPTH} deep")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Nothing: YAML 1.2 has no merge keys, and with `!!merge` a few lines would write out any number of pairs."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = Counter(key.value for key, _ in node.value if isinstance(key.value, str))
        for key, times in keys.items():
            if times > 1:
                line = node.start_mark.line + 1
                raise yaml.YAMLError(f"{key!r} stands more than once in the mapping that starts in line {line}")
        return super().construct_mapping(node, deep)


for _tag, _pattern, _starts in (
    ("null", r"null|~|", ["n", "~", ""]),
    ("bool", r"true|false", ["t", "f"]),
    ("int", r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    ("float", r"[-+]?((\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|\.inf)|\.nan", list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^({_pattern})$"), _starts)


def read_yaml(text: str) -> Any:
    """The value that a text of YAML, or JSON, stands for.

    Raises:
        ValueError: the text is no valid YAML, is nested too deep, or holds too much.
    """
    try:
        content = yaml.load(text, Loader=_Loader)  # a SafeLoader: it builds plain values only
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError) as error:
        # PyYAML lets through what Python says of a value that does not fit its tag, such as `!!bool x`.
        problem = f"{error}" if isinstance(error, yaml.YAMLError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"no valid YAML: {problem}") from error
    _require_small(content)
    return content


def _require_small(content: Any) -> None:
    count, level = 0, [content]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner += value.values()
            elif isinstance(value, (list, tuple, set)):
                inner += value
            count += 1
            if count + len(inner) > MAX_VALUES:
                raise ValueError(f"no file of settings: it holds more than {MAX_VALUES} values")
        level = inner
    if level:
        raise ValueError(f"no file of settings: it is nested more than {MAX_DEPTH} deep, or contains itself")
