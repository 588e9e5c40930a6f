"""The machine and the package versions that a run was measured with."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

__all__ = ["machine", "versions"]

CPU_INFO = Path("/proc/cpuinfo")


def machine() -> str:
    """Name of the GPU, or of the processor with the number of threads."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    threads = torch.get_num_threads()
    name = models[0] if models else platform.processor() or platform.machine()
    return f"{name}, {threads} thread{'s' if threads > 1 else ''}"


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that measured values depend on."""
    found = {"python": platform.python_version()}
    for package in ("rsa_hf", "torch", "transformers", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed: run from its sources"
    return found
