"""Atomic writes of files and folders, a lock on an output folder, and one error for all failed writes.

`atomic_write` (a file) and `written_whole` (a folder) write to a temporary path beside the target, flush it to disk
and rename it. While a folder is replaced, its predecessor is kept as `.NAME.old`; `recover` restores it if the
process was killed between the two renames.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

__all__ = [
    "StorageError",
    "atomic_write",
    "discard",
    "emptied",
    "put_in_place",
    "recover",
    "sole_writer",
    "storage_errors",
    "write_text",
    "written_whole",
]

_LOCK_FILE = ".lock"
# Errors of writing that are no OSError: safetensors and tokenizers give the number, torch.save gives no reason.
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_TORCH_WRITER = re.compile("inline_container|PytorchStreamWriter|Parent directory .* does not exist")


class StorageError(OSError):
    """A path cannot be written: the disk is full, the folder is read-only, or another process is using it."""


@contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """Raise `StorageError` for every error of writing inside the block. Use it around steps that only write.

    Args:
        folder: the folder written to, for the message.

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
            f"cannot write to {folder}: {reason}. Free some disk space, raise the limit on file "
            "sizes (ulimit -f) or make the folder writable; or choose another folder (of a run: training.output_dir)."
        ) from error


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Create a folder if needed and lock it against other processes until the block or this process ends.

    Args:
        folder: the folder to lock.

    Raises:
        StorageError: another process holds the lock, or the folder cannot be written to.
    """
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / _LOCK_FILE)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            raise StorageError(
                f"another process is writing into {folder} (it holds {folder / _LOCK_FILE}). Wait until it ends, or "
                "choose another folder (of a run: training.output_dir)."
            ) from None
    try:
        yield
    finally:
        lock.release()


# --- files ----------------------------------------------------------------------------------------------------------


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
    temporary = _beside(path, "tmp")
    try:
        with storage_errors(path.parent):
            yield temporary
            _flush(temporary)
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


# --- folders --------------------------------------------------------------------------------------------------------


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """Replace a folder atomically. Only one process may enter.

    Args:
        folder: the folder to write. If it is a symbolic link, its target is replaced and the link stays.

    Yields:
        An empty temporary folder beside it. It replaces `folder` when the block ends without an error; after an error
        it is deleted, and `folder` is unchanged.

    Raises:
        StorageError: the folder cannot be written, or `folder` is a file.
    """
    folder = _without_link(folder)
    if folder.is_file():
        raise StorageError(f"{folder} is a file. Move it, or choose another folder.")
    try:
        with storage_errors(folder.parent):
            yield emptied(folder)
            put_in_place(folder)
    except Exception:
        shutil.rmtree(_beside(folder, "tmp"), ignore_errors=True)  # it may fill the disk
        raise


def emptied(folder: Path) -> Path:
    """Create the temporary folder of `folder`, empty. The first half of `written_whole`, for several processes."""
    temporary = _beside(folder, "tmp")
    _remove(temporary)
    temporary.mkdir(parents=True)
    return temporary


def put_in_place(folder: Path) -> None:
    """Flush the temporary folder of `folder` to disk and let it replace `folder`. The second half."""
    temporary, old = _beside(folder, "tmp"), _beside(folder, "old")
    for path in (*temporary.rglob("*"), temporary):
        _flush(path)
    if folder.exists():
        _remove(old)
        folder.rename(old)
    temporary.rename(folder)
    _flush(folder.parent)
    _remove(old)


def discard(folder: Path) -> None:
    """Delete a folder. A process that is killed meanwhile leaves `.NAME.tmp`, not a partial `folder`."""
    temporary = _beside(folder, "tmp")
    _remove(temporary)
    folder.rename(temporary)
    _remove(temporary)


def recover(folder: Path) -> None:
    """Clean up after a process that was killed while writing `folder`: restore `.NAME.old`, delete leftovers."""
    folder = _without_link(folder)
    old = _beside(folder, "old")
    if old.exists() and not folder.exists():
        old.rename(folder)
    _remove(old)
    _remove(_beside(folder, "tmp"))


def _without_link(folder: Path) -> Path:
    return folder.resolve() if folder.is_symlink() else folder  # the target of a link need not exist


def _beside(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{kind}")


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _flush(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to disk. Otherwise a rename may reach the disk first."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open folders
    descriptor = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
