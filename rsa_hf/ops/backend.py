"""The choice of the code for P V: the explicit matrix, chunks in plain PyTorch, or Triton kernels on a GPU.

`RSA_HF_BACKEND=dense|chunked|triton` sets it. By default it is Triton on a GPU that can run it, else plain PyTorch.
The kernels do not support sliding windows and arbitrary masks; plain PyTorch computes those under every setting.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings

import torch
from torch import Tensor

from rsa_hf.ops.types import Rems, SoftmaxBranch

__all__ = ["BACKENDS", "choose_backend"]

BACKENDS = ("dense", "chunked", "triton")
VARIABLE = "RSA_HF_BACKEND"
OLDEST_CAPABILITY = (8, 0)  # Ampere: bfloat16 and tf32 on tensor cores
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def choose_backend(value: Tensor, rems: Rems, softmax: SoftmaxBranch | None) -> str:
    """One of BACKENDS.

    Args:
        value: V.
        rems: the heads.
        softmax: softmax attention and the gate, or None.

    Raises:
        ValueError: RSA_HF_BACKEND is none of BACKENDS.
        RuntimeError: RSA_HF_BACKEND is triton, which cannot run here.
    """
    chosen = os.environ.get(VARIABLE, "")
    if chosen not in ("", *BACKENDS):
        raise ValueError(
            f"{VARIABLE}={chosen!r} is unknown; allowed: {', '.join(BACKENDS)}, or unset for the default."
        )
    if chosen in ("dense", "chunked"):
        return chosen
    if not chosen and value.device.type != "cuda":
        return "chunked"
    obstacle = _obstacle_of_device(value.device) or _obstacle_of_tensors(value, rems, softmax)
    if obstacle is None:
        return "triton"
    if chosen:
        raise RuntimeError(
            f"{VARIABLE}=triton cannot run: {obstacle}. Unset it, or choose one of {', '.join(BACKENDS[:2])}."
        )
    _warn_once(f"RSA computes P V in plain PyTorch, not in Triton: {obstacle}.")
    return "chunked"


@functools.lru_cache(maxsize=64)
def _obstacle_of_device(device: torch.device) -> str | None:
    """Why Triton cannot run on a device, or None."""
    try:
        triton = importlib.import_module("triton")
        interpreted = bool(triton.knobs.runtime.interpret)
    except (ImportError, AttributeError) as error:
        return f"triton ≥ 3.6 cannot be imported ({error}); pip install 'rsa_hf[gpu]' on Linux"
    if interpreted and device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"the tensors are on {device}, and its kernels need an NVIDIA GPU"
    if torch.version.hip is not None:
        return "its kernels are written for NVIDIA GPUs, and this one is run by ROCm"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        return (
            f"{torch.cuda.get_device_name(device)} has compute capability {'.'.join(map(str, capability))}, and "
            f"{'.'.join(map(str, OLDEST_CAPABILITY))} is needed"
        )
    return None


def _obstacle_of_tensors(value: Tensor, rems: Rems, softmax: SoftmaxBranch | None) -> str | None:
    """Why the kernels cannot take these tensors, or None."""
    tensors = {"value": value}
    if softmax is not None:
        tensors["attention"] = softmax.attention
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            return f"{name} is {str(tensor.dtype).removeprefix('torch.')}, and its kernels take {allowed}"
    tensors |= {"decay": rems.decay, "theta": rems.theta}
    if softmax is not None:
        tensors["gate"] = softmax.gate
    for name, tensor in tensors.items():
        if tensor.device != value.device:
            return f"value is on {value.device} and {name} on {tensor.device}"
    return None


@functools.lru_cache(maxsize=64)
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)
