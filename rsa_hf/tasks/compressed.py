"""Open data files, plain or compressed."""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

__all__ = ["open_compressed"]


@contextmanager
def open_compressed(path: str | Path, plain: str) -> Iterator[IO[bytes]]:
    """Open a data file for reading bytes.

    Args:
        path: a file that ends in `.gz`, `.xz` or `plain`.
        plain: the ending of an uncompressed file, such as ".txt".

    Raises:
        OSError: the file cannot be opened.
        ValueError: it has another ending, or its compressed content is truncated or corrupt.
    """
    openers: dict[str, Any] = {plain: open, ".gz": gzip.open, ".xz": lzma.open}
    ending = Path(path).suffix
    if ending not in openers:
        raise ValueError(f"{path} ends in {ending!r}; allowed are {', '.join(openers)}. Rename or convert it.")
    try:
        with openers[ending](path, "rb") as file:
            yield file
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise ValueError(f"{path} is truncated or corrupt ({error}). Copy or download it again.") from error
