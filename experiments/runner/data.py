"""Find data files in the folder that the environment variable RSA_HF_DATA names."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["VARIABLE", "MissingDataError", "data_file"]

VARIABLE = "RSA_HF_DATA"


class MissingDataError(FileNotFoundError):
    """A data file is missing."""


def data_file(relative: str) -> Path:
    """A file of the data folder, for instance `ett/ETTh1.csv.xz`.

    Raises:
        MissingDataError: the variable is not set, or there is no such file.
    """
    folder = os.environ.get(VARIABLE)
    if not folder:
        raise MissingDataError(f"{relative} is needed: set {VARIABLE} to the data folder that contains it.")
    path = Path(folder) / relative
    if not path.is_file():
        raise MissingDataError(f"{path} does not exist: {VARIABLE}={folder} must contain {relative}.")
    return path
