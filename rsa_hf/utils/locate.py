"""Names of models that an installed Python package ships."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from rsa_hf.utils.paths import expanded

__all__ = ["locate"]

PREFIX = "package:"


def locate(name: str) -> str:
    """Resolve `package:NAME/FOLDER` to the path of a folder inside an installed package.

    Args:
        name: a model's name as settings spell it.

    Returns:
        What `from_pretrained` takes: in any other name, `~` and `$VARIABLES` are replaced.

    Raises:
        ValueError: the package is not installed, or it has no such folder.
    """
    if not name.startswith(PREFIX):
        return expanded(name)
    package, _, folder = name.removeprefix(PREFIX).partition("/")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # the parent of a.b is not installed, or the name is empty
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"{name!r}: the Python package {package!r} is not installed. Install it (for the models of the configs "
            "that ship with rsa_hf: pip install 'rsa_hf[demo]'), or name another model."
        )
    path = Path(spec.submodule_search_locations[0], folder)
    if not path.is_dir():
        raise ValueError(f"{name!r}: the package {package!r} has no folder {folder!r} ({path}).")
    return str(path)
