r"""P V, mixed into attention, and its gradients: Triton kernels that read and write every tensor once.

Triton is an optional dependency, so the package imports this folder only when it is used.

On a GPU, P V is bound by memory: with C = 64 steps per chunk it takes 44 operations forward, and 41 backward, for each
byte that must move, and an H200 does about 180 in the time of one byte. So the copy bandwidth is the limit.
`scripts/bench_gpu.py` measures how far the kernels are from it (results/bench_gpu.md). Backward programs spill
registers; `tests/ops/compile_for_hopper.py` prints how many bytes.

How the limit is approached:

* A program owns one column block: a head of a row, one of its d residues, `BLOCK` channels. It walks along the
  sequence in chunks of C steps with the state h, one complex number per channel, in registers, so V is read once:

      y_i = Σ_{j<i} F(i − j) v_j + Re(c z^i h)        h' = z^C h + Σ_j z^{C−1−j} v_j

  The first term is a C × C Toeplitz matrix times a tile, on tensor cores; the rest is a few multiply-adds per element.
  The amplitude c is z, or −i z for sin heads (`rem.py`), so every head reads a real part: F(k) = Re(c z^{k−1}).
* Where rows × heads leave the card empty (batch 1), the sequence is cut into splits. A first kernel sums up what
  each split writes into the state; it reads V once more (mostly from the L2 cache, since V is small then). The second
  kernel adds up what is before its split, weighted with z^{L k}: exact at any length.
* An unmasked REM also needs the state from the right of each chunk. The program first walks its split from right to
  left and stores that state of each chunk in memory: two float32 for C values, 6 % more bytes. So V is read twice, the
  second time from L2 as far as it fits, because the walk back begins with what was read last.
* The backward pass does the same with dOut instead of V, right to left. Nothing is kept from the forward pass:
  - ∂/∂gate: ⟨dOut, P V⟩ = ⟨Pᵀ dOut, V⟩, and its parts are computed anyway.
  - ∂/∂rates: inside chunks ⟨dOut, ∂P V⟩ = Σ_{ij} ∂F(i − j) ⟨dout_i, v_j⟩. The weights are the same in every chunk,
    so the C × C inner products are summed over the chunks by the tensor cores, one product instead of two, and
    weighted at the end. Across chunks a second state, q = ∂h/∂decay, goes along with h. θ's gradient is free, from
    ∂z^k/∂θ = i·decay·∂z^k/∂decay.
  - Sums over programs go through a small buffer and a kernel that adds it up in a fixed order: no atomics, the same
    bits in every run.
* Precision. Powers are computed in float64 by `powers_kernel`, C + 1 of them per head, and rounded once to float32.
  States and sums are float32; z^C, which multiplies the state at each chunk, is a sum of two float32. 16-bit
  values are exact operands, so only the Toeplitz matrix is rounded: it is split into two 16-bit matrices, high + low,
  at the cost of a second product that memory traffic hides. float32 values are multiplied as tf32x3.
* Packed documents mask the Toeplitz matrix, and the state ends where a document does. Hidden keys are not loaded.
* In a sliding window that shows N steps back, h covers the N steps before a chunk. The program also reads the C steps
  u_j that leave the window along the chunk, N steps before the chunk's own, mostly from the L2 cache:

      y_i −= Σ_{j<i} F(N + i − j) u_j            h' −= z^N Σ_j z^{C−1−j} u_j

  If N ≤ C, only the last N rows of the chunk write h', and nothing is subtracted from it. Otherwise a row leaves its
  float32 rounding error behind, which decays as the row would have: after T steps at a rate near 1, in the worst case
  6e-8 T/N of P V.

Names: `position` is a place on the key axis, `step` the place in the residue's sub-sequence: position = residue +
d·step. A walk over dOut counts steps from the end of the key axis, which turns Pᵀ into P.
"""

import functools
import importlib

import torch

from rsa_hf.ops.problem import Problem

__all__ = ["obstacle"]

OLDEST_CAPABILITY = (8, 0)  # Ampere: bfloat16 and tf32 on tensor cores
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def obstacle(problem: Problem) -> str | None:
    """Why the kernels cannot compute P V here, or None. Does not import them."""
    device = problem.value.device
    reason = _obstacle_of_device(device)
    if reason is not None:
        return reason
    for name, tensor in {"value": problem.value, "attention": problem.attention}.items():
        if tensor is not None and tensor.dtype not in DTYPES:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            return f"{name} is {str(tensor.dtype).removeprefix('torch.')}, and its kernels take {allowed}"
    for name, tensor in {"attention": problem.attention, **problem.learned._asdict()}.items():
        if tensor is not None and tensor.device != device:
            return f"value is on {device} and {name} on {tensor.device}"
    return None


@functools.lru_cache(maxsize=64)
def _obstacle_of_device(device: torch.device) -> str | None:
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
