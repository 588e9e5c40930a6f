"""Launches of the kernels: P V and its gradients from tensors and an `AttentionMask`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from rsa_hf.ops.buffers import copy_other_heads, empty_output, empty_rows, with_rows
from rsa_hf.ops.mask import AttentionMask
from rsa_hf.ops.triton.backward import backward_kernel, rates_kernel
from rsa_hf.ops.triton.forward import forward_kernel
from rsa_hf.ops.triton.states import splits_kernel
from rsa_hf.ops.triton.tables import TABLE_ROWS, Shape, powers_kernel
from rsa_hf.ops.triton.tuning import Tuning, candidates, fastest
from rsa_hf.rem import KINDS, Rems, kept_constants, other_heads

MOST_SPLITS = 32
CHUNKS_OF_SPLIT = 4  # at least: a split is worth the state that it has to be handed


def triton_forward(
    value: Tensor,
    rems: Rems,
    mask: AttentionMask,
    attention: Tensor | None,
    gate: Tensor | None,
    tuning: Tuning | None = None,
) -> Tensor:
    """P V, [B, H, T, D]; or, with `attention`, (1 − g) · attention + g · P V, [B, T, H', D].

    Args:
        value: shape [B, Hv, S, D]; float32, bfloat16 or float16.
        rems: the heads.
        mask: which keys each query sees; without a sliding window and `visible`.
        attention: attention's output, or None.
        gate: g of each head, or None.
        tuning: block shapes; None: the fastest known ones.
    """
    output = empty_output(value, rems, mask, attention)
    if attention is not None:
        copy_other_heads(attention, output, rems)
    value = with_rows(value)

    def run(tuning: Tuning) -> None:
        _Launch(value, rems, mask, attention, gate, tuning).forward(output)

    with _on(value.device):
        run(tuning or _tuning("forward", run, value, rems, mask, attention))
    return output


def triton_backward(
    grad: Tensor,
    value: Tensor,
    rems: Rems,
    mask: AttentionMask,
    attention: Tensor | None,
    gate: Tensor | None,
    tuning: Tuning | None = None,
) -> tuple[Tensor | None, ...]:
    """The gradients of `triton_forward` with respect to V, the rates, attention and gate, from that of its output."""
    num_key_value_groups = rems.num_key_value_groups
    dvalue = empty_rows(value)
    rates = [
        None if rate is None else torch.empty_like(rate, memory_format=torch.contiguous_format) for rate in rems.rates
    ]
    dattention = dgate = None
    if attention is not None and gate is not None:
        dattention, dgate = empty_rows(attention), torch.empty_like(gate)
        copy_other_heads(grad, dattention, rems)
    length = mask.seen_length
    dvalue[:, :, length:] = 0
    # Heads that share a value head each write a gradient in float32.
    heads = dvalue
    if num_key_value_groups > 1:
        num_heads = value.shape[1] * num_key_value_groups
        heads = value.new_empty(len(value), num_heads, length, value.shape[3], dtype=torch.float32)
    for plain in other_heads(rems.heads, heads.shape[1]):
        heads[:, plain] = 0
    value, grad = with_rows(value), with_rows(grad)

    def run(tuning: Tuning) -> None:
        launch = _Launch(value, rems, mask, attention, gate, tuning)
        launch.backward(grad, heads, dattention, rates, dgate)

    with _on(value.device):
        run(tuning or _tuning("backward", run, value, rems, mask, attention))
    if num_key_value_groups > 1:
        dvalue[:, :, :length] = heads.unflatten(1, (-1, num_key_value_groups)).sum(2)
    return dvalue, *rates, dattention, dgate


def _tuning(kernel: str, run: Any, value: Tensor, rems: Rems, mask: AttentionMask, attention: Tensor | None) -> Tuning:
    options = candidates(kernel, value.shape[3], 8 * value.element_size())
    steps = mask.seen_length // min(rems.dilation)
    size = (value.numel().bit_length(), steps.bit_length())
    flags = (mask.causal, attention is None, mask.documents is None, mask.key_mask is None)
    question = (kernel, value.device, value.dtype, value.shape[3], size, flags)
    return fastest(question, options, run, value.device)


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the current one, on which Triton launches."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@functools.lru_cache(maxsize=8)
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@kept_constants(32)
def _plan(
    kinds: tuple[str, ...],
    dilation: tuple[int, ...],
    indices: tuple[int, ...],
    residues: tuple[int, ...],
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor]:
    """The heads, the columns and the first column of each head, on the device."""
    heads = [[d, KINDS.index(kind), index] for d, kind, index in zip(dilation, kinds, indices, strict=True)]
    columns = [[head, residue] for head, count in enumerate(residues) for residue in range(count)]
    starts = [sum(residues[:head]) for head in range(len(residues) + 1)]
    heads_on, columns_on, starts_on = (
        torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in (heads, columns, starts)
    )
    return heads_on, columns_on, starts_on


@functools.lru_cache(maxsize=256)
def _divide(
    batch: int,
    head_size: int,
    length: int,
    dilation: tuple[int, ...],
    processors: int,
    tuning: Tuning,
    flags: tuple[bool, ...],
) -> tuple[int, int, tuple[int, ...], Shape]:
    """Programs, states that enter the chunks of a head from the right, residues of each head, and what to compile for.

    `flags` are the last fields of `Shape`. Cached, because every layer asks the same, and a GPU waits for the answer.
    """
    steps = triton.cdiv(length, min(dilation))
    chunk, blocks = min(tuning.chunk, max(triton.next_power_of_2(steps), 16)), triton.cdiv(head_size, tuning.block)
    residues = tuple(min(d, length) for d in dilation)
    programs = batch * sum(residues) * blocks
    splits = _splits(programs, triton.cdiv(steps, chunk), processors)
    powers = triton.next_power_of_2(chunk + 1 + splits)
    shape = Shape(head_size, tuning.block, blocks, chunk, splits, powers, tuning.stages, *flags)
    slots = max(
        count * (triton.cdiv(triton.cdiv(length, d), chunk) - 1) for d, count in zip(dilation, residues, strict=True)
    )
    return programs * splits, slots, residues, shape


class _Launch:
    """One problem, divided into programs by a tuning."""

    def __init__(
        self,
        value: Tensor,
        rems: Rems,
        mask: AttentionMask,
        attention: Tensor | None,
        gate: Tensor | None,
        tuning: Tuning,
    ) -> None:
        self.value, self.rems, self.mask = value, rems, mask
        # Where there is none, V is a placeholder that is not read.
        self.attention = value if attention is None else with_rows(attention).transpose(1, 2)
        self.amplitude = value if rems.amplitude is None else rems.amplitude.contiguous()
        self.gate, self.is_mixed = value if gate is None else gate, attention is not None
        self.length, self.warps = mask.seen_length, tuning.warps
        B, H, device = len(value), len(rems.heads), value.device
        flags = (
            mask.causal,
            self.is_mixed,
            mask.key_mask is not None,
            mask.documents is not None,
            rems.amplitude is not None,
            value.element_size() == 2,
        )
        self.programs, self.slots, residues, self.shape = _divide(
            B, value.shape[3], self.length, rems.dilation, _processors(device), tuning, flags
        )
        self.heads, self.columns, self.starts = _plan(rems.kinds, rems.dilation, rems.heads, residues, device)
        self.table = value.new_empty(H, int(TABLE_ROWS), self.shape.powers, dtype=torch.float32)
        key_mask = value if mask.key_mask is None else with_rows(mask.key_mask).view(torch.uint8)
        document_ids = value if mask.documents is None else mask.documents
        masks = tuple((tensor, tensor.stride(0) if len(tensor) > 1 else 0) for tensor in (key_mask, document_ids))
        # What all kernels that walk along the sequence take.
        self.tables = (*masks, self.columns, self.heads, self.table)
        self.sizes = (B, len(self.columns), H, self.length, mask.query_offset, mask.query_length)
        powers_kernel[(H,)](
            _per_head(rems.decay),
            _per_head(rems.theta),
            self.amplitude,
            self.heads,
            self.table,
            self.length,
            SHAPE=self.shape,
            num_warps=1,
        )

    def forward(self, output: Tensor) -> None:
        """Write the output of the RSA heads."""
        value, num_key_value_groups = self.value, self.rems.num_key_value_groups
        forward_kernel[(self.programs,)](
            _strided(value),
            _strided(self.attention),
            _per_head(self.gate),
            _strided(output.transpose(1, 2) if self.is_mixed else output),
            *self.tables,
            self._written(value, 0, self.length, num_key_value_groups, backward=False),
            self._entering(2),
            (*self.sizes, num_key_value_groups, self.slots),
            SHAPE=self.shape,
            num_warps=self.warps,
        )

    def backward(
        self,
        grad: Tensor,
        dvalue: Tensor,
        dattention: Tensor | None,
        rates: Sequence[Tensor | None],
        dgate: Tensor | None,
    ) -> None:
        """Write the gradients of the RSA heads and of the values they read."""
        value, mask = self.value, self.mask
        grad = grad.transpose(1, 2) if self.is_mixed else grad
        parts = len(value) * self.shape.blocks * self.shape.splits
        partial = value.new_empty(len(self.columns), parts, 5, dtype=torch.float32)
        backward_kernel[(self.programs,)](
            _strided(grad),
            _strided(value),
            _strided(self.attention),
            _per_head(self.gate),
            _strided(dvalue),
            _strided(value if dattention is None else dattention.transpose(1, 2)),
            partial,
            *self.tables,
            self._written(grad, mask.query_offset, mask.query_length, 1, backward=True),
            self._entering(4),
            (*self.sizes, self.rems.num_key_value_groups, self.slots),
            SHAPE=replace(self.shape, halves=grad.element_size() == 2),
            num_warps=self.warps,
        )
        rates_kernel[(len(self.heads),)](
            partial,
            _per_head(self.rems.decay),
            _per_head(self.rems.theta),
            self.amplitude,
            _per_head(self.gate),
            self.heads,
            self.starts,
            *(self.amplitude if rate is None else rate for rate in rates),
            self.gate if dgate is None else dgate,
            parts,
            MIXED=self.is_mixed,
            FREE=self.shape.free,
            BLOCK=256,
            num_warps=1,
        )

    def _written(self, x: Tensor, shift: int, count: int, num_key_value_groups: int, backward: bool) -> Tensor:
        """What each split of V or dOut adds to the states."""
        if self.shape.splits == 1:
            return self.table  # a placeholder, not read
        splits = self.table.new_empty(self.programs, 2, 4, self.shape.block)
        splits_kernel[(self.programs,)](
            _strided(x),
            *self.tables,
            splits,
            (len(x), len(self.columns), self.length, shift, count, num_key_value_groups),
            SHAPE=self.shape,
            BACKWARD=backward,
            num_warps=self.warps,
        )
        return splits

    def _entering(self, states: int) -> Tensor:
        """Memory for the states that enter chunks from the right."""
        if self.mask.causal:
            return self.table  # a placeholder, not read
        shape = (len(self.value), self.shape.blocks, len(self.heads), self.slots, states, self.shape.block)
        return self.table.new_empty(shape)


def _strided(tensor: Tensor) -> tuple[Tensor, int, int, int]:
    """A tensor of four axes, the last one contiguous, as the kernels take it."""
    b, h, t, _ = tensor.stride()
    return tensor, b, h, t


def _per_head(tensor: Tensor) -> tuple[Tensor, int]:
    return tensor, tensor.stride(0)


def _splits(programs: int, chunks: int, processors: int) -> int:
    """Number of splits, a power of two, for four programs per multiprocessor; 1 if there are two without splits."""
    if programs >= 2 * processors:
        return 1
    splits = 1
    while splits < MOST_SPLITS and splits * programs < 4 * processors:
        if chunks < 2 * splits * CHUNKS_OF_SPLIT:
            break
        splits *= 2
    return splits
