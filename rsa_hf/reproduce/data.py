"""Where an experiment finds its data: the folder that the environment variable RSA_HF_DATA names."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["VARIABLE", "data_file"]

VARIABLE = "RSA_HF_DATA"


def data_file(relative: str) -> Path:
    """A file of the data folder, for instance `ett/ETTh1.csv.xz`.

    Raises:
        FileNotFoundError: the variable is not set, or there is no such file.
    """
    folder = os.environ.get(VARIABLE)
    if not folder:
        raise FileNotFoundError(
            f"{relative} is needed: set {VARIABLE} to the folder of the data, in which it has that path."
        )
    path = Path(folder) / relative
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; {VARIABLE} is {folder}, in which {relative} is needed.")
    return path
