"""Files of experiments: data in the folder RSA_HF_DATA, and results of long computations kept in RSA_HF_CACHE."""

import functools
import hashlib
import json
import lzma
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

DATA, CACHE = "RSA_HF_DATA", "RSA_HF_CACHE"
# The first digits of the SHA-256 of the unpacked content that the stored runs have read.
DIGESTS = {
    "enwik8/enwik8_prefix.xz": "d8b3b95fb4993726",
    "wikitext-2/train.txt.xz": "2e24adb25c1c035d",
    "wikitext-2/valid.txt.xz": "f0737ed31fc13290",
    "wikitext-2/test.txt.xz": "d790b833ef8cf03a",
    "devign/train.jsonl.xz": "1dd700b54225e0a4",
    "devign/valid.jsonl.xz": "251f59ba833c2f79",
    "devign/test.jsonl.xz": "e4deea77ecbe167f",
    "python/train.txt.xz": "c6120e5f0128c597",
    "ett/ETTh1.csv.xz": "f18de3ad269cef59",
    "ett/ETTh2.csv.xz": "a3dc2c597b9218c7",
    "ett/ETTm1.csv.xz": "6ce1759b1a18e332",
    "ett/WTH.csv.xz": "153fead3ea2a83dc",
    "blimp/blimp.jsonl.xz": "646e0c651d305c8b",
}


class MissingDataError(FileNotFoundError):
    """A data file is missing, or another one is in its place."""


def data_file(relative: str) -> Path:
    """A file of the data folder, for instance `ett/ETTh1.csv.xz`.

    Raises:
        MissingDataError: it is not there, or is not the file that the stored runs have read.
    """
    folder = os.environ.get(DATA)
    if not folder:
        raise MissingDataError(f"{relative} is needed: set {DATA} to the data folder that contains it.")
    path = Path(folder) / relative
    if not path.is_file():
        raise MissingDataError(f"{path} does not exist: {DATA}={folder} must contain {relative}.")
    if (expected := DIGESTS.get(relative)) and (found := _digest(path)) != expected:
        raise MissingDataError(
            f"{path} is not the file that the stored runs have read: the SHA-256 of its unpacked content must begin "
            f"with {expected}, got {found}."
        )
    return path


@functools.lru_cache(maxsize=32)
def _digest(path: Path) -> str:
    return hashlib.sha256(lzma.decompress(path.read_bytes())).hexdigest()[:16]


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
