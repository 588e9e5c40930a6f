"""Folders that are written whole or not at all, by one process at a time; errors that say what to free or change.

A folder is written beside its place, as `.NAME.tmp`, flushed to the disk, and then renamed. What it replaces stands
aside as `.NAME.old` until then; `recover` puts that back after a process that was killed in between.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

__all__ = [
    "StorageError",
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
# Not all writers raise an OSError: safetensors and tokenizers say "(os error 28)", and torch.save does not tell why.
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_TORCH_WRITER = re.compile("inline_container|PytorchStreamWriter|Parent directory .* does not exist")
_MIB = 2**20


class StorageError(OSError):
    """A folder cannot be written into: a full disk, a folder that is read-only, or one that another process uses."""


@contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """Let errors of writing into a folder say what to free or change; for steps that write, and read nothing else.

    Raises:
        StorageError: instead of what the operating system, safetensors, tokenizers and torch.save raise then.
    """
    try:
        yield
    except StorageError:
        raise
    except Exception as error:
        told = _OS_ERROR.search(str(error))
        if isinstance(error, OSError):
            code = error.errno
        elif told or _TORCH_WRITER.search(str(error)):
            code = int(told[1]) if told else None
        else:
            raise
        raise StorageError(_in_words(folder, code)) from error


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder, which is made, until the block ends or this process does.

    Raises:
        StorageError: another process is in it, or it cannot be written into.
    """
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / _LOCK_FILE)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            raise StorageError(
                f"another process is writing into {folder} (it holds {folder / _LOCK_FILE}). Wait until it ends, or "
                "choose another one (of a run: training.output_dir)."
            ) from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """A temporary folder to write into, which takes the place of `folder` when the block ends without an error.

    After an error it is deleted, and `folder` is as it was. Only one process may enter. Of a link to a folder the
    folder is replaced, and the link stays.

    Raises:
        StorageError: it cannot be written, or `folder` is a file.
    """
    folder = _without_link(folder)
    if folder.exists() and not folder.is_dir():
        raise StorageError(
            f"{folder} is a file, and a folder is to be written there. Move it, or choose another name."
        )
    try:
        with storage_errors(folder.parent):
            yield emptied(folder)
            put_in_place(folder)
    except Exception:
        shutil.rmtree(_beside(folder, "tmp"), ignore_errors=True)  # it may fill the disk
        raise


def write_text(path: Path, text: str) -> None:
    """Write a file, whole or not at all.

    Raises:
        StorageError: it cannot be written; what stood there is as it was.
    """
    temporary = _beside(path, "tmp")
    try:
        with storage_errors(path.parent):
            temporary.write_text(text, encoding="utf-8")
            _flush(temporary)
            temporary.replace(path)
    except StorageError:
        with suppress(OSError):
            temporary.unlink()
        raise


def emptied(folder: Path) -> Path:
    """The temporary folder that is to become `folder`: made, or emptied of what a killed process has left."""
    temporary = _beside(folder, "tmp")
    _remove(temporary)
    temporary.mkdir(parents=True)
    return temporary


def put_in_place(folder: Path) -> None:
    """Let the temporary folder of `emptied` become `folder`, once all that it holds is on the disk."""
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
    """Delete a folder; a process that is killed in between leaves nothing that looks like it."""
    temporary = _beside(folder, "tmp")
    _remove(temporary)
    folder.rename(temporary)
    _remove(temporary)


def recover(folder: Path) -> None:
    """Clear up what a killed process has left beside a folder; put back what it had moved aside."""
    folder = _without_link(folder)
    old = _beside(folder, "old")
    if old.exists() and not folder.exists():
        old.rename(folder)
    _remove(old)
    _remove(_beside(folder, "tmp"))


def _without_link(folder: Path) -> Path:
    """What a link points to, there or not; any other path as it is."""
    return folder.resolve() if folder.is_symlink() else folder


def _beside(folder: Path, kind: str) -> Path:
    return folder.with_name(f".{folder.name}.{kind}")


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk: a rename may get there before what it names."""
    if path.is_dir() and os.name == "nt":
        return  # Windows opens no folders
    descriptor = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _in_words(folder: Path, code: int | None) -> str:
    """What went wrong and what to do; the code is that of the operating system, None where it is not known."""
    reason = "a file there could not be completed" if code is None else os.strerror(code)
    full = code in (None, errno.ENOSPC, errno.EDQUOT)
    limit = _largest_file() if code in (None, errno.EFBIG) else None
    free = _free_bytes(folder) if full else None
    facts, advice = [], []
    if free is not None:
        facts.append(f"{free / _MIB:,.1f} MiB are free")
    if full:
        advice.append("free some space")
    if limit is not None:
        facts.append(f"this process may write files of at most {limit / _MIB:,.1f} MiB")
        advice.append("raise that limit (ulimit -f)")
    if not advice:
        advice.append("make it a folder that this process can write into")
    known = f" ({'; '.join(facts)})" if facts else ""
    to_do = ", or ".join([*advice, "choose another one (of a run: training.output_dir)"])
    return f"cannot write to {folder}: {reason}{known}. {to_do[0].upper()}{to_do[1:]}."


def _free_bytes(folder: Path) -> int | None:
    for place in (folder, *folder.absolute().parents):
        with suppress(OSError):
            return shutil.disk_usage(place).free
    return None


def _largest_file() -> int | None:
    """The limit that `ulimit -f` shows, in bytes; None where there is none."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if limit == resource.RLIM_INFINITY else limit
