"""Atomic writes of files, and one error for all failed writes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# A failed write of safetensors, tokenizers or torch.save, which raise no OSError.
_FAILED_WRITE = re.compile(r"\(os error \d+\)|inline_container|PytorchStreamWriter|Parent directory .* does not exist")


class StorageError(OSError):
    """A path cannot be written: the disk is full, or the folder is read-only."""


@contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """Raise a `StorageError` for what fails because `folder` cannot be written to; other errors pass."""
    try:
        yield
    except Exception as error:
        is_write = isinstance(error, OSError) or _FAILED_WRITE.search(str(error))
        if isinstance(error, StorageError) or not is_write:
            raise
        reason = getattr(error, "strerror", None) or f"{error!s:.200}"
        raise StorageError(
            f"cannot write to {folder}: {reason}. Free some disk space, raise the limit on file sizes (ulimit -f) or "
            "make the folder writable; or choose another folder."
        ) from error


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Replace a file atomically, by what the block writes to the temporary path beside it, unless it fails.

    A link stays one to the new file; what is no file, such as /dev/stdout, is written to.
    """
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        yield path
        return
    path = path.resolve()
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            with temporary.open("rb+") as file:  # otherwise the rename may reach the disk before the content
                os.fsync(file.fileno())
            temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, in UTF-8."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
