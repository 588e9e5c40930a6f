"""Compiles `scan.cpp` with the machine's compiler, once, and loads it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import torch

from rsa_hf.utils.files import atomic_write

SOURCE = Path(__file__).with_name("scan.cpp")
LONGEST = 120  # seconds for the compiler


@functools.lru_cache(maxsize=1)
def library() -> ctypes.CDLL | str:
    """The compiled code, or why there is none.

    The compiler is `$CXX`, else g++, else c++. What it makes is kept in `$XDG_CACHE_HOME/rsa_hf`, by default
    `~/.cache/rsa_hf`, under a hash of the source and the command; where that cannot be written, each process compiles.
    """
    if sys.platform not in ("linux", "darwin"):
        return f"it is compiled on Linux and macOS alone, and this is {sys.platform}"
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        return "there is no C++ compiler; install g++, or set CXX"
    command = [compiler, "-O3", "-std=c++17", "-shared", "-fPIC", *_flags()]
    # With the kind of processor: machines may share a home.
    name = hashlib.sha256(SOURCE.read_bytes() + "\0".join([platform.machine(), *command]).encode()).hexdigest()
    kept = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rsa_hf" / f"scan-{name[:16]}.so"
    try:
        return ctypes.CDLL(str(kept)) if kept.exists() else _compiled(command, kept)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        return f"{compiler} fails: {lines[0] if lines else f'exit code {error.returncode}'}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it cannot be compiled and loaded: {error}"


def _compiled(command: list[str], kept: Path) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch) / kept.name
        subprocess.run([*command, "-o", str(fresh), str(SOURCE)], check=True, capture_output=True, timeout=LONGEST)
        found = ctypes.CDLL(str(fresh))
        with suppress(OSError):
            kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with atomic_write(kept) as temporary:
                shutil.copy(fresh, temporary)
    return found


def _flags() -> list[str]:
    # The vectors of the processor, as far as they gain something: memory is the limit.
    has_avx2 = platform.machine() == "x86_64" and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    # On Linux the threads are PyTorch's own, by the same library. Apple's compiler has none.
    return [*(["-mavx2", "-mfma"] if has_avx2 else []), *(["-fopenmp"] if sys.platform == "linux" else [])]
