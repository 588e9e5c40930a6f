"""From tensors and a geometry to launches of the kernels."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

from rsa_hf.ops.mask import Geometry
from rsa_hf.ops.triton.backward import backward_kernel, rates_kernel
from rsa_hf.ops.triton.forward import forward_kernel
from rsa_hf.ops.triton.interpreter import repair_interpreter
from rsa_hf.ops.triton.states import segments_kernel
from rsa_hf.ops.triton.tables import TABLE_ROWS, powers_kernel
from rsa_hf.ops.triton.tuning import Tuning, candidates, fastest
from rsa_hf.ops.types import Gradients, Mixing, Recurrence, working_dtype
from rsa_hf.rem import KINDS

__all__ = ["triton_backward", "triton_forward"]

MOST_SEGMENTS = 32
CHUNKS_OF_SEGMENT = 4  # at least: a segment is worth the state that it has to be handed

repair_interpreter()


def triton_forward(
    value: Tensor, recurrence: Recurrence, geometry: Geometry, mixing: Mixing | None, tuning: Tuning | None = None
) -> Tensor:
    """P V, [B, H, T, D], or, with `mixing`, attention + g (P V − attention), [B, T, H', D].

    Args:
        value: shape [B, Hv, S, D]; float32, bfloat16 or float16.
        recurrence: the heads.
        geometry: who sees whom; neither a window nor `visible`.
        mixing: softmax attention and the gate, or None.
        tuning: block shapes; None: the fastest that is known.
    """
    H = len(recurrence.kinds)
    if mixing is None:
        output = value.new_empty(len(value), H, geometry.query_length, value.shape[3], dtype=working_dtype(value))
    else:
        output = torch.empty_like(mixing.attention, memory_format=torch.contiguous_format)
        output[:, :, H:] = mixing.attention[:, :, H:]
    value = _with_rows(value)

    def run(tuning: Tuning) -> None:
        _Launch(value, recurrence, geometry, mixing, tuning).forward(output)

    with _on(value.device):
        run(tuning or _tuning("forward", run, value, recurrence, geometry, mixing))
    return output


def triton_backward(
    grad: Tensor,
    value: Tensor,
    recurrence: Recurrence,
    geometry: Geometry,
    mixing: Mixing | None,
    tuning: Tuning | None = None,
) -> Gradients:
    """The gradients of `triton_forward`, from the gradient of its output and its own arguments."""
    H, groups = len(recurrence.kinds), recurrence.groups
    dvalue = _empty_rows(value)
    ddecay, dtheta = torch.empty_like(recurrence.decay), torch.empty_like(recurrence.theta)
    dattention = dgate = None
    if mixing is not None:
        dattention, dgate = _empty_rows(mixing.attention), torch.empty_like(mixing.gate)
        dattention[:, :, H:] = grad[:, :, H:]
    length, shared = _length(geometry), triton.cdiv(H, groups)
    dvalue[:, :, length:] = 0
    dvalue[:, shared:] = 0
    # Heads that share values each write their own, in float32; the last group may lack some.
    heads = dvalue
    if groups > 1:
        heads = value.new_empty(len(value), shared * groups, length, value.shape[3], dtype=torch.float32)
        heads[:, H:] = 0
    value, grad = _with_rows(value), _with_rows(grad)

    def run(tuning: Tuning) -> None:
        launch = _Launch(value, recurrence, geometry, mixing, tuning)
        launch.backward(grad, heads, dattention, ddecay, dtheta, dgate)

    with _on(value.device):
        run(tuning or _tuning("backward", run, value, recurrence, geometry, mixing))
    if groups > 1:
        dvalue[:, :shared, :length] = heads.unflatten(1, (shared, groups)).sum(2)
    return Gradients(dvalue, ddecay, dtheta, dattention, dgate)


def _tuning(
    kernel: str, run: Any, value: Tensor, recurrence: Recurrence, geometry: Geometry, mixing: Mixing | None
) -> Tuning:
    options = candidates(kernel, value.shape[3], 8 * value.element_size())
    steps = _length(geometry) // min(recurrence.dilation)
    size = (value.numel().bit_length(), steps.bit_length())
    flags = (geometry.causal, mixing is None, geometry.documents is None, geometry.key_mask is None)
    question = (kernel, value.device, value.dtype, value.shape[3], size, flags)
    return fastest(question, options, run, value.device)


def _length(geometry: Geometry) -> int:
    """Keys that matter: a causal query sees none behind the last query, such as the empty slots of a static cache."""
    return geometry.query_offset + geometry.query_length if geometry.causal else geometry.key_length


def _with_rows(tensor: Tensor) -> Tensor:
    """The tensor with neighbouring channels side by side in memory."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _empty_rows(like: Tensor) -> Tensor:
    """Room for a tensor, in the same order in memory where that has neighbouring channels side by side."""
    kept = like.stride(-1) == 1
    return torch.empty_like(like, memory_format=torch.preserve_format if kept else torch.contiguous_format)


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@functools.lru_cache(maxsize=8)
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.lru_cache(maxsize=32)
def _plan(
    kinds: tuple[str, ...], dilation: tuple[int, ...], residues: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """The heads, the columns and where each head's columns begin, on the device: copied there once, since it waits."""
    heads = [[d, KINDS.index(kind)] for d, kind in zip(dilation, kinds, strict=True)]
    columns = [[head, residue] for head, count in enumerate(residues) for residue in range(count)]
    starts = [sum(residues[:head]) for head in range(len(residues) + 1)]
    heads_on, columns_on, starts_on = (
        torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in (heads, columns, starts)
    )
    return heads_on, columns_on, starts_on


class _Launch:
    """One problem cut up for the kernels by a tuning."""

    def __init__(
        self, value: Tensor, recurrence: Recurrence, geometry: Geometry, mixing: Mixing | None, tuning: Tuning
    ) -> None:
        self.value, self.recurrence, self.geometry, self.mixing = value, recurrence, geometry, mixing
        self.length = _length(geometry)
        B, _, _, self.head_size = value.shape
        H, device = len(recurrence.kinds), value.device
        steps = triton.cdiv(self.length, min(recurrence.dilation))
        self.chunk = min(tuning.chunk, max(triton.next_power_of_2(steps), 16))
        self.tuning = tuning
        self.blocks = triton.cdiv(self.head_size, tuning.block)
        residues = tuple(min(d, self.length) for d in recurrence.dilation)
        self.heads, self.columns, self.starts = _plan(recurrence.kinds, recurrence.dilation, residues, device)
        columns = sum(residues)
        self.segments = _segments(B * columns * self.blocks, triton.cdiv(steps, self.chunk), _processors(device))
        self.programs = B * columns * self.blocks * self.segments
        self.powers = triton.next_power_of_2(self.chunk + 1 + self.segments)
        self.slots = max(
            count * (triton.cdiv(triton.cdiv(self.length, d), self.chunk) - 1)
            for d, count in zip(recurrence.dilation, residues, strict=True)
        )
        self.mask_strides = [0, 0]
        self.key_mask = self.documents = value  # not looked at
        if geometry.key_mask is not None:
            self.key_mask = _with_rows(geometry.key_mask).view(torch.uint8)
            self.mask_strides[0] = self.key_mask.stride(0) if len(self.key_mask) > 1 else 0
        if geometry.documents is not None:
            self.documents = geometry.documents.index
            self.mask_strides[1] = self.documents.stride(0) if len(self.documents) > 1 else 0
        self.table = value.new_empty(H, int(TABLE_ROWS), self.powers, dtype=torch.float32)
        powers_kernel[(H,)](
            recurrence.decay,
            recurrence.theta,
            self.heads,
            self.table,
            self.length,
            recurrence.decay.stride(0),
            recurrence.theta.stride(0),
            CHUNK=self.chunk,
            SEGMENTS=self.segments,
            POWERS=self.powers,
            num_warps=1,
        )

    def forward(self, output: Tensor) -> None:
        """Write the output, but for plain heads."""
        value, geometry, mixing = self.value, self.geometry, self.mixing
        heads_first = output if mixing is None else output.transpose(1, 2)
        attention, gate = (
            (value, value) if mixing is None else (_with_rows(mixing.attention).transpose(1, 2), mixing.gate)
        )
        groups = self.recurrence.groups
        forward_kernel[(self.programs,)](
            value,
            attention,
            gate,
            output,
            self.key_mask,
            self.documents,
            self.columns,
            self.heads,
            self.table,
            self._written(value, 0, self.length, groups, slopes=False),
            self._entering(2),
            len(value),
            len(self.columns),
            len(self.heads),
            self.length,
            geometry.query_offset,
            geometry.query_length,
            groups,
            *value.stride()[:3],
            *attention.stride()[:3],
            *heads_first.stride()[:3],
            gate.stride(0),
            *self.mask_strides,
            self.slots,
            MIXED=mixing is not None,
            MASKED=geometry.key_mask is not None,
            SPLIT=value.element_size() == 2,
            **self._constants(),
        )

    def backward(
        self,
        grad: Tensor,
        dvalue: Tensor,
        dattention: Tensor | None,
        ddecay: Tensor,
        dtheta: Tensor,
        dgate: Tensor | None,
    ) -> None:
        """Write the gradients, but for plain heads and for values that nobody reads."""
        value, geometry, mixing = self.value, self.geometry, self.mixing
        gate = attention = dsoftmax = value
        if mixing is not None and dattention is not None:
            grad, gate = grad.transpose(1, 2), mixing.gate
            attention, dsoftmax = _with_rows(mixing.attention).transpose(1, 2), dattention.transpose(1, 2)
        parts = len(value) * self.blocks * self.segments
        partial = value.new_empty(len(self.columns), parts, 3, dtype=torch.float32)
        backward_kernel[(self.programs,)](
            grad,
            value,
            attention,
            gate,
            dvalue,
            dsoftmax,
            partial,
            self.key_mask,
            self.documents,
            self.columns,
            self.heads,
            self.table,
            self._written(grad, geometry.query_offset, geometry.query_length, 1, slopes=True),
            self._entering(4),
            len(value),
            len(self.columns),
            len(self.heads),
            self.length,
            geometry.query_offset,
            geometry.query_length,
            self.recurrence.groups,
            *grad.stride()[:3],
            *value.stride()[:3],
            *attention.stride()[:3],
            *dvalue.stride()[:3],
            *dsoftmax.stride()[:3],
            gate.stride(0),
            *self.mask_strides,
            self.slots,
            MIXED=mixing is not None,
            MASKED=geometry.key_mask is not None,
            SPLIT=grad.element_size() == 2,
            **self._constants(),
        )
        rates_kernel[(len(self.heads),)](
            partial,
            self.recurrence.decay,
            gate,
            self.heads,
            self.starts,
            ddecay,
            dtheta,
            gate if dgate is None else dgate,
            parts,
            self.recurrence.decay.stride(0),
            gate.stride(0),
            MIXED=mixing is not None,
            BLOCK=256,
            num_warps=1,
        )

    def _written(self, x: Tensor, shift: int, count: int, groups: int, slopes: bool) -> Tensor:
        """What each segment of V or dOut writes into the states."""
        if self.segments == 1:
            return self.table  # not looked at
        segments = self.table.new_empty(self.programs, 2, 4, self.tuning.block)
        constants = self._constants()
        segments_kernel[(self.programs,)](
            x,
            self.key_mask,
            self.documents,
            self.columns,
            self.heads,
            self.table,
            segments,
            len(x),
            len(self.columns),
            self.length,
            shift,
            count,
            groups,
            *x.stride()[:3],
            *self.mask_strides,
            SLOPES=slopes,
            MASKED=self.geometry.key_mask is not None and not slopes,
            REVERSED=slopes,
            **constants,
        )
        return segments

    def _entering(self, states: int) -> Tensor:
        """Room for the states that enter chunks from the right."""
        if self.geometry.causal:
            return self.table  # not looked at
        shape = (len(self.value), self.blocks, len(self.heads), self.slots, states, self.tuning.block)
        return self.table.new_empty(shape)

    def _constants(self) -> dict[str, Any]:
        return {
            "D": self.head_size,
            "BLOCK": self.tuning.block,
            "BLOCKS": self.blocks,
            "CHUNK": self.chunk,
            "SEGMENTS": self.segments,
            "POWERS": self.powers,
            "STAGES": self.tuning.stages,
            "CAUSAL": self.geometry.causal,
            "PACKED": self.geometry.documents is not None,
            "num_warps": self.tuning.warps,
        }


def _segments(programs: int, chunks: int, processors: int) -> int:
    """How many segments give every multiprocessor four programs, a power of two; 1 where they have two anyway."""
    if programs >= 2 * processors:
        return 1
    segments = 1
    while segments < MOST_SEGMENTS and segments * programs < 4 * processors:
        if chunks < 2 * segments * CHUNKS_OF_SEGMENT:
            break
        segments *= 2
    return segments
