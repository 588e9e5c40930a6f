"""Files of experiments: data in the folder RSA_HF_DATA, and results of long computations kept in RSA_HF_CACHE."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

DATA, CACHE = "RSA_HF_DATA", "RSA_HF_CACHE"


class MissingDataError(FileNotFoundError):
    """A data file is missing."""


def data_file(relative: str) -> Path:
    """A file of the data folder, for instance `ett/ETTh1.csv.xz`; a MissingDataError if it is not there."""
    folder = os.environ.get(DATA)
    if not folder:
        raise MissingDataError(f"{relative} is needed: set {DATA} to the data folder that contains it.")
    path = Path(folder) / relative
    if not path.is_file():
        raise MissingDataError(f"{path} does not exist: {DATA}={folder} must contain {relative}.")
    return path


def cached(what: str, settings: Mapping[str, Any], suffix: str, make: Callable[[Path], None]) -> Path:
    """The file that `make` writes for these settings; made once, also by several processes.

    It is in the folder that the environment variable RSA_HF_CACHE names, `~/.cache/rsa_hf` by default. Delete it after
    a change of the code that makes it. `what` begins its name; its content depends on nothing but `settings`.
    """
    folder = Path(os.environ.get(CACHE, "~/.cache/rsa_hf")).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256(json.dumps(dict(settings), sort_keys=True).encode()).hexdigest()[:16]
    path = folder / f"{what}-{key}{suffix}"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            unfinished = path.with_name(f"unfinished-{path.name}")
            make(unfinished)
            unfinished.replace(path)
    return path
