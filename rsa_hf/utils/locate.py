"""Where a model is that an installed Python package brings along."""

from __future__ import annotations

import importlib.util
from pathlib import Path

__all__ = ["locate"]

PACKAGE = "package:"


def locate(name: str) -> str:
    """What `from_pretrained` takes for a model's name: `package:NAME/FOLDER` becomes the path of that folder.

    Raises:
        ValueError: the package is not installed, or has no such folder.
    """
    if not name.startswith(PACKAGE):
        return name
    package, _, folder = name.removeprefix(PACKAGE).partition("/")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # of a.b, a is imported to look for b
        spec = None
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    if not places:
        raise ValueError(
            f"{name!r}: the Python package {package!r} is not installed. Install it (the models of the configs "
            "that ship with rsa_hf: pip install 'rsa_hf[demo]'), or name another model."
        )
    path = Path(places[0]) / folder
    if not path.is_dir():
        raise ValueError(f"{name!r}: the package {package!r} has no folder {folder!r} ({path}).")
    return str(path)
