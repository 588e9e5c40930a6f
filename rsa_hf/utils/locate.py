"""Paths, and names of models that an installed Python package ships, as people write them."""

import importlib.util
import os
from pathlib import Path

PREFIX = "package:"


def expanded(path: str) -> str:
    """A path with `~` and `$VARIABLES` replaced, which a shell does not do in files and after `=`."""
    return os.path.expanduser(os.path.expandvars(path))


def locate(name: str) -> str:
    """What `from_pretrained` takes: the folder of `package:NAME/FOLDER` in an installed package, else `expanded`.

    A ValueError if there is no such package or folder.
    """
    if not name.startswith(PREFIX):
        place = expanded(name)
        if (place.startswith((".", "/")) or Path(place).is_file()) and not Path(place).is_dir():
            raise ValueError(f"{name}: there is no such folder. Name one of a checkpoint, or a model on the Hub.")
        return place
    package, _, folder = name.removeprefix(PREFIX).partition("/")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # the parent of a.b is not installed, or the name is empty
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"{name!r}: {package!r} is not installed (for our configs: pip install 'rsa_hf[demo]').")
    path = Path(spec.submodule_search_locations[0], folder)
    if not path.is_dir():
        raise ValueError(f"{name!r}: the package {package!r} has no folder {folder!r} ({path}).")
    return str(path)
