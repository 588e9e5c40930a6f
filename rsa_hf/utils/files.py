"""Atomic writes of files, and one error for all failed writes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["StorageError", "atomic_write", "storage_errors", "write_text"]

# Errors of writing that are no OSError: safetensors and tokenizers give the number, torch.save gives no reason.
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_TORCH_WRITER = re.compile("inline_container|PytorchStreamWriter|Parent directory .* does not exist")


class StorageError(OSError):
    """A path cannot be written: the disk is full, or the folder is read-only."""


@contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """Raise a `StorageError` for what fails because `folder` cannot be written to; other errors pass.

    Raises:
        StorageError: in place of an OSError and of what safetensors, tokenizers and torch.save raise.
    """
    try:
        yield
    except StorageError:
        raise
    except Exception as error:
        number = _OS_ERROR.search(str(error))
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
        elif number:
            reason = os.strerror(int(number[1]))
        elif _TORCH_WRITER.search(str(error)):
            reason = "a file could not be completed"
        else:
            raise
        raise StorageError(
            f"cannot write to {folder}: {reason}. Free some disk space, raise the limit on file sizes (ulimit -f) or "
            "make the folder writable; or choose another folder."
        ) from error


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Replace a file atomically.

    Args:
        path: the file to write. Its folder must exist.

    Yields:
        A temporary path beside it. What the block writes there replaces `path` when the block ends without an error;
        after an error it is deleted, and `path` is unchanged.

    Raises:
        StorageError: the file cannot be written.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with storage_errors(path.parent):
            yield temporary
            with temporary.open("rb+") as file:  # otherwise the rename may reach the disk before the content
                os.fsync(file.fileno())
            temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, in UTF-8.

    Raises:
        StorageError: the file cannot be written; an existing one is unchanged.
    """
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
