r"""P V, mixed into attention, and its gradients on a CPU: C++ that walks along the sequence.

The C++ is compiled when it is first needed, in about ten seconds, and kept in the user's cache (`build.py`). It
needs only a compiler; without one, `ops/pytorch.py` computes the same in plain PyTorch, more slowly.

On a CPU the recurrence itself is the cheapest way to compute P V: a few multiplications for each number, so most time
goes into reading V. With the rate z and the amplitude c of a head (`rem.py`),

    y_t = Re s_t        s_t = Σ_{j<t} c z^{t−1−j} v_j        s_{t+1} = z s_t + c v_t

so the forward pass is one walk over V. The backward pass needs nothing that the forward pass computed:

    dV            Pᵀ dY: a walk over dY, in the other direction
    ∂/∂rates      a = Σ_t ⟨dy_t, h_t⟩ and b = Σ_t ⟨dy_t, q_t⟩, summed up on a walk over V. h is s with the amplitude 1,
                  and q_{t+1} = ∂h_{t+1}/∂z = h_t + z q_t. With ∂/∂z = c b + a ∂c/∂z, ∂/∂decay = Re (e^{iθ} ∂/∂z) and
                  ∂/∂θ = Re (i z ∂/∂z)
    ∂/∂gate       Re (c a) − Σ_t ⟨dy_t, attention_t⟩, on the same walk

If the first K weights are free, their differences from the paper's, times the K values before, are added at each step.

An unmasked REM is a walk in each direction. A head dilated by d has d states, which take turns. A state ends where its
document does, and hidden keys are not read. Rows and heads are divided among threads, and each sum has one order, so
the number of threads does not change a bit.

A sliding window of w positions: the keys are cut into blocks of w. What a query sees of its own block is a walk that
restarts in each block. Of the block before, query k sees the keys after k: z^k Σ_{j>k} c z^{w−1−j} v_j, a sum that is
accumulated from the end of that block and kept for each k. Nothing is subtracted, so nothing cancels,
however slow the decay.

Precision: states and sums of 32 steps have the dtype of the values, the rest is float64. Rounded to float32, z would
cause an error of k roundings at a lag of k, so after every 32 keys the states are corrected for the rounding. There
subnormal states become 0: long decays end in them, and they are slow.
"""

import torch
from torch import Tensor

from rsa_hf.ops.cpp.build import library
from rsa_hf.ops.problem import Problem

__all__ = ["obstacle"]

_OF_PYTORCH = {Tensor, torch.nn.Parameter, type(None)}


def obstacle(problem: Problem) -> str | None:
    """Why the C++ cannot compute P V here, or None. Compiles it first if needed."""
    if not problem.value.is_cpu:
        return f"a tensor is on {problem.value.device}, and it is for CPUs"
    for tensor in problem.tensors:
        if type(tensor) not in _OF_PYTORCH:
            return f"a tensor is a {type(tensor).__name__}, whose memory cannot be read"
    found = library()
    return found if isinstance(found, str) else None
