"""Plain values from YAML."""

import re
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """Reads `no` and `on` as words and 1e-4 as a number, as YAML 1.2 does: `eval_strategy: no` is not False."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own class attribute
        first: [(tag, pattern) for tag, pattern in known if not tag.endswith((":bool", ":timestamp"))]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"the key {key!r} stands twice")
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^(true|false|True|False)$"), list("tfTF"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    # Infinity is what the json module writes.
    re.compile(r"^[-+]?(([0-9]+(\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+|Infinity)$"),
    list("-+.0123456789I"),
)


def read_yaml(text: str) -> Any:
    """Read YAML or JSON; a ValueError if it is not valid, or asks for anything but plain values."""
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        # A value that does not fit its tag, such as `!!bool x`, makes PyYAML raise Python's own errors.
        raise ValueError(f"not valid YAML: {' '.join(str(error).split())}") from error
