"""Keep what takes long to compute and several runs start from, such as pretrained weights."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

__all__ = ["VARIABLE", "kept"]

VARIABLE = "RSA_HF_CACHE"


def kept(what: str, settings: Mapping[str, Any], suffix: str, make: Callable[[Path], None]) -> Path:
    """The file that `make` writes for these settings; made once, also by several processes.

    Files are in the folder that the environment variable RSA_HF_CACHE names, `~/.cache/rsa_hf` by default. Delete them
    after a change of the code that makes them.

    Args:
        what: begins the name of the file.
        settings: all that the content depends on, as JSON values.
        suffix: ends the name of the file.
        make: writes to a path.
    """
    folder = Path(os.environ.get(VARIABLE, "~/.cache/rsa_hf")).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256(json.dumps(dict(settings), sort_keys=True).encode()).hexdigest()[:16]
    path = folder / f"{what}-{key}{suffix}"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            unfinished = path.with_name(f"unfinished-{path.name}")
            make(unfinished)
            unfinished.replace(path)
    return path
