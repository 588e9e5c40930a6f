"""Compiles the C++ with the machine's compiler, once, and loads it, which registers its operators."""

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
from multiprocessing.pool import ThreadPool
from pathlib import Path

import torch

from rsa_hf.utils.files import atomic_write

# With their optimisation levels: the operator does little itself, and PyTorch's headers are slow to compile.
SOURCES = {Path(__file__).with_name("scan.cpp"): "-O3", Path(__file__).with_name("operator.cpp"): "-O1"}
HEADER = Path(__file__).with_name("problem.h")
TORCH = Path(torch.__file__).parent
LONGEST = 600  # seconds for the compiler


@functools.lru_cache(maxsize=1)
def library() -> ctypes.CDLL | str:
    """The compiled code, or why there is none.

    The compiler is `$CXX`, else g++, else c++. Its output is kept in `$XDG_CACHE_HOME/rsa_hf`, by default
    `~/.cache/rsa_hf`, under a hash of the source and the command; if that is not writable, each process compiles.
    """
    if sys.platform not in ("linux", "darwin"):
        return f"it is compiled on Linux and macOS alone, and this is {sys.platform}"
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        return "there is no C++ compiler; install g++, or set CXX"
    command = [compiler, "-std=c++20", "-fPIC", *_flags()]
    # The hash includes the kind of processor: machines may share a home directory.
    sources = [source.read_text("utf-8") for source in (*SOURCES, HEADER)]
    name = hashlib.sha256("\0".join([platform.machine(), torch.__version__, *command, *sources]).encode()).hexdigest()
    kept = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rsa_hf" / f"scan-{name[:16]}.so"
    try:
        return ctypes.CDLL(str(kept)) if kept.exists() else _compiled(command, kept)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        lines = [line for line in lines if "error" in line] or lines
        return f"{compiler} fails: {lines[0] if lines else f'exit code {error.returncode}'}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it cannot be compiled and loaded: {error}"


def _compiled(command: list[str], kept: Path) -> ctypes.CDLL:
    def run(*arguments: str) -> None:
        subprocess.run([*command, *arguments], check=True, capture_output=True, timeout=LONGEST)

    with tempfile.TemporaryDirectory() as scratch, ThreadPool(len(SOURCES)) as pool:
        fresh, objects = Path(scratch) / kept.name, [f"{scratch}/{source.stem}.o" for source in SOURCES]
        parts = zip(SOURCES, SOURCES.values(), objects, strict=True)
        pool.starmap(run, [("-c", str(source), level, "-o", name) for source, level, name in parts])
        run("-shared", *objects, f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10", "-o", str(fresh))
        found = ctypes.CDLL(str(fresh))
        with suppress(OSError):
            kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with atomic_write(kept) as temporary:
                shutil.copy(fresh, temporary)
    return found


def _flags() -> list[str]:
    # Only the vector instructions that gain something: memory is the limit.
    has_avx2 = platform.machine() == "x86_64" and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    vectors = ["-mavx2", "-mfma"] if has_avx2 else []
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    # Only the headers of the operators in use: all of PyTorch's would double the time to compile.
    headers = [f"-I{TORCH / 'include'}", "-DAT_PER_OPERATOR_HEADERS", abi]
    # On Linux the threads are PyTorch's own, through the same library. Apple's compiler has none.
    return [*vectors, *headers, *(["-fopenmp"] if sys.platform == "linux" else [])]
