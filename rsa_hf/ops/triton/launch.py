"""Launches the kernels: P V and its gradients from a `Problem`."""

import functools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from rsa_hf.ops.mask import AttentionMask
from rsa_hf.ops.problem import Layout, Learned, Problem
from rsa_hf.ops.triton.backward import backward_kernel, learned_kernel
from rsa_hf.ops.triton.forward import forward_kernel
from rsa_hf.ops.triton.states import splits_kernel
from rsa_hf.ops.triton.step import step_kernel
from rsa_hf.ops.triton.tables import TABLE_ROWS, Shape, powers_kernel
from rsa_hf.ops.triton.tuning import Tuning, block_of, candidates, fastest
from rsa_hf.rem import kept_constants, other_heads

MOST_SPLITS = 32
STEPS_AT_A_TIME = 64  # of one query
CHUNKS_OF_SPLIT = 4  # at least, so that a split is worth the state handed to it


def triton_forward(problem: Problem, tuning: Tuning | None = None) -> Tensor:
    """The output of a problem in float32, bfloat16 or float16: a step, or a problem without `visible`.

    `tuning` has the block shapes; None: the fastest known ones, measured first if there are none.
    """
    output = problem.empty_output()
    if problem.attention is not None:
        _copy_other_heads(problem.attention, output, problem.layout.heads)
    problem = problem._replace(value=_with_rows(problem.value))

    def run(tuning: Tuning) -> None:
        _Launch(problem, tuning).forward(output)

    with _on(output.device):
        if problem.mask.is_step:
            _step(problem, output)
            return output
        run(tuning or _tuning("forward", run, problem))
    return output


def triton_backward(grad: Tensor, problem: Problem, tuning: Tuning | None = None) -> tuple[Tensor | None, ...]:
    """The gradients of `problem.tensors`, from that of the output."""
    value, attention, learned, layout, num_key_value_groups, mask = problem
    dvalue, dattention = _empty_rows(value), None
    if attention is not None:
        dattention = _empty_rows(attention)
        _copy_other_heads(grad, dattention, layout.heads)
    gradients = Learned(*(None if x is None else x.new_empty(x.shape) for x in learned))
    length = mask.seen_length
    if length < dvalue.shape[2]:
        dvalue[:, :, length:] = 0
    # Heads that share a value head each write a gradient in float32.
    of_heads = dvalue
    if num_key_value_groups > 1:
        num_heads = value.shape[1] * num_key_value_groups
        of_heads = value.new_empty(len(value), num_heads, length, value.shape[3], dtype=torch.float32)
    for plain in other_heads(layout.heads, of_heads.shape[1]):
        of_heads[:, plain] = 0
    problem, grad = problem._replace(value=_with_rows(value)), _with_rows(grad)

    def run(tuning: Tuning) -> None:
        _Launch(problem, tuning).backward(grad, of_heads, dattention, gradients)

    with _on(value.device):
        run(tuning or _tuning("backward", run, problem))
    if num_key_value_groups > 1:
        dvalue[:, :, :length] = of_heads.unflatten(1, (-1, num_key_value_groups)).sum(2)
    return dvalue, dattention, *gradients


def _step(problem: Problem, output: Tensor) -> None:
    value, attention, learned, layout, num_key_value_groups, mask = problem
    B, D = len(value), value.shape[3]
    row = mask.key_mask if mask.visible is None else mask.visible[:, 0, 0]
    block, is_mixed = block_of(D), attention is not None
    flags = (True, is_mixed, row is not None, False, False, False, layout.num_free_lags, layout.scale)
    shape = Shape(D, block, triton.cdiv(D, block), STEPS_AT_A_TIME, 1, 0, 1, *flags)
    heads, _, _ = _plan(layout, (1,) * len(layout.rows), value.device)
    key_mask = value if row is None else _with_rows(row).view(torch.uint8)
    step_kernel[(B * len(layout.rows) * shape.blocks,)](
        _strided(value),
        _strided(value if attention is None else _with_rows(attention).transpose(1, 2)),
        tuple(value if tensor is None else tensor.contiguous() for tensor in learned),
        _strided(output.transpose(1, 2) if is_mixed else output),
        (key_mask, key_mask.stride(0) if len(key_mask) > 1 else 0),
        heads if mask.query_position is None else mask.query_position,
        heads,
        (len(layout.rows), num_key_value_groups),
        mask.query_offset,
        _farthest(mask),
        SHAPE=shape,
        KNOWN=mask.query_position is None,
        num_warps=4,
    )


def _tuning(kernel: str, run: Any, problem: Problem) -> Tuning:
    value, mask = problem.value, problem.mask
    options = candidates(kernel, value.shape[3], 8 * value.element_size())
    steps = mask.seen_length // min(row.dilation for row in problem.layout.rows)
    size = (value.numel().bit_length(), steps.bit_length())
    masks = (mask.documents is None, mask.key_mask is None, mask.sliding_window is None)
    question = (kernel, value.device, value.dtype, value.shape[3], size, mask.causal, problem.attention is None, masks)
    return fastest(question, options, run, value.device)


def _copy_other_heads(layer: Tensor, into: Tensor, heads: tuple[int, ...]) -> None:
    """Copy the plain heads of [B, T, H, D]."""
    for plain in other_heads(heads, layer.shape[2]):
        into[:, :, plain] = layer[:, :, plain]


def _with_rows(tensor: Tensor) -> Tensor:
    """The tensor, or a copy, with contiguous channels, as the kernels read it."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _empty_rows(like: Tensor) -> Tensor:
    """An empty tensor with contiguous channels, in the memory order of `like` if that has contiguous channels."""
    kept = like.stride(-1) == 1
    return torch.empty_like(like, memory_format=torch.preserve_format if kept else torch.contiguous_format)


def _farthest(mask: AttentionMask) -> int:
    """The longest lag that the mask's window shows."""
    return min(mask.sliding_window or mask.key_length, mask.key_length) - 1


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the current one, on which Triton launches."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@functools.lru_cache(maxsize=8)
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@kept_constants(32)
def _plan(layout: Layout, residues: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The heads, the columns and the first column of each head, on the device."""
    columns = [[head, residue] for head, count in enumerate(residues) for residue in range(count)]
    starts = [sum(residues[:head]) for head in range(len(residues) + 1)]
    heads_on, columns_on, starts_on = (
        torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in (layout.rows, columns, starts)
    )
    return heads_on, columns_on, starts_on


@functools.lru_cache(maxsize=256)
def _divide(
    batch: int, head_size: int, length: int, layout: Layout, processors: int, tuning: Tuning, flags: tuple[bool, ...]
) -> tuple[int, int, tuple[int, ...], Shape]:
    """Number of programs, of states that enter a head's chunks from the right, of residues of each head; the `Shape`.

    `flags` are fields of `Shape`. Cached, because every layer asks the same, and a GPU waits for the answer.
    """
    dilation = [row.dilation for row in layout.rows]
    steps = triton.cdiv(length, min(dilation))
    chunk, blocks = min(tuning.chunk, max(triton.next_power_of_2(steps), 16)), triton.cdiv(head_size, tuning.block)
    residues = tuple(min(d, length) for d in dilation)
    programs = batch * sum(residues) * blocks
    splits = _splits(programs, triton.cdiv(steps, chunk), processors)
    causal, mixed, masked, packed, windowed, halves = flags
    powers = triton.next_power_of_2(chunk + 1 + splits + windowed)
    shape = Shape(
        *(head_size, tuning.block, blocks, chunk, splits, powers, tuning.stages),
        *(causal, mixed, masked, packed, windowed, halves),
        *(layout.num_free_lags, layout.scale),
    )
    slots = max(
        count * (triton.cdiv(triton.cdiv(length, d), chunk) - 1) for d, count in zip(dilation, residues, strict=True)
    )
    return programs * splits, slots, residues, shape


class _Launch:
    """One problem, divided into programs by a tuning."""

    def __init__(self, problem: Problem, tuning: Tuning) -> None:
        self.problem = problem
        value, attention, learned, layout, self.num_key_value_groups, self.mask = problem
        # If a tensor is missing, another one is a placeholder that is not read.
        self.value, self.is_mixed = value, attention is not None
        self.attention = value if attention is None else _with_rows(attention).transpose(1, 2)
        self.learned = tuple(value if tensor is None else tensor.contiguous() for tensor in learned)
        self.length, self.warps = self.mask.seen_length, tuning.warps
        B, R, device = len(value), len(layout.rows), value.device
        key_mask, document_ids = self.mask.key_mask, self.mask.documents
        halves = value.element_size() == 2
        farthest = _farthest(self.mask)
        is_windowed = farthest < self.length - 1
        self.farthest = farthest if is_windowed else 0  # if not read, the same number for all
        flags = (self.mask.causal, self.is_mixed, key_mask is not None, document_ids is not None, is_windowed, halves)
        self.programs, self.slots, self.residues, self.shape = _divide(
            B, value.shape[3], self.length, layout, _processors(device), tuning, flags
        )
        self.heads, self.columns, self.starts = _plan(layout, self.residues, device)
        self.table = value.new_empty(R, int(TABLE_ROWS), self.shape.powers, dtype=torch.float32)
        key_mask = value if key_mask is None else _with_rows(key_mask).view(torch.uint8)
        document_ids = value if document_ids is None else document_ids
        masks = tuple((tensor, tensor.stride(0) if len(tensor) > 1 else 0) for tensor in (key_mask, document_ids))
        # What all kernels that walk along the sequence take.
        self.shared = (*masks, self.columns, self.heads, self.table)
        self.sizes = (B, len(self.columns), R, self.length, self.mask.query_offset, self.mask.query_length)
        numbers = (self.length, self.farthest)
        powers_kernel[(R,)](self.learned, self.heads, self.table, *numbers, SHAPE=self.shape, num_warps=1)

    def forward(self, output: Tensor) -> None:
        """Write the output of the RSA heads."""
        value = self.value
        forward_kernel[(self.programs,)](
            _strided(value),
            _strided(self.attention),
            self.learned,
            _strided(output.transpose(1, 2) if self.is_mixed else output),
            self.shared,
            self._written(value, 0, self.length, self.num_key_value_groups, backward=False),
            self._entering(2),
            (*self.sizes, self.num_key_value_groups, self.slots, self.farthest),
            SHAPE=self.shape,
            num_warps=self.warps,
        )

    def backward(self, grad: Tensor, dvalue: Tensor, dattention: Tensor | None, gradients: Learned) -> None:
        """Write the gradients of the RSA heads, of the values they read, and of what is learned."""
        value, mask = self.value, self.mask
        grad = grad.transpose(1, 2) if self.is_mixed else grad
        parts = len(value) * self.shape.blocks * self.shape.splits
        partial = value.new_empty(len(self.columns), parts, 5 + self.shape.lags, dtype=torch.float32)
        backward_kernel[(self.programs,)](
            _strided(grad),
            _strided(value),
            _strided(self.attention),
            self.learned,
            _strided(dvalue),
            _strided(value if dattention is None else dattention.transpose(1, 2)),
            partial,
            self.shared,
            self._written(grad, mask.query_offset, mask.query_length, 1, backward=True),
            self._entering(4),
            (*self.sizes, self.num_key_value_groups, self.slots, self.farthest),
            SHAPE=replace(self.shape, halves=grad.element_size() == 2),
            num_warps=self.warps,
        )
        mu, eta, nu, _, free_lags = (0 if tensor is None else len(tensor) for tensor in gradients)
        heads = max(triton.next_power_of_2(len(self.heads)), 2)
        learned_kernel[(mu + eta + nu + free_lags,)](
            partial,
            self.learned,
            tuple(partial if tensor is None else tensor for tensor in gradients),
            self.heads,
            self.starts,
            (mu, eta, nu, len(self.heads), parts, max(self.residues) * parts),
            SHAPE=self.shape,
            HEADS=heads,
            BLOCK=max(512 // heads, 4),
            num_warps=4,
        )

    def _written(self, x: Tensor, shift: int, count: int, num_key_value_groups: int, backward: bool) -> Tensor:
        """What each split of V or dOut adds to the states."""
        if self.shape.splits == 1:
            return self.table  # a placeholder, not read
        splits = self.table.new_empty(self.programs, 2, 4, self.shape.block)
        splits_kernel[(self.programs,)](
            _strided(x),
            self.shared,
            splits,
            (len(x), len(self.columns), self.length, shift, count, num_key_value_groups, self.farthest),
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


def _splits(programs: int, chunks: int, processors: int) -> int:
    """Number of splits, a power of two, for four programs per multiprocessor; 1 if there are already two."""
    if programs >= 2 * processors:
        return 1
    splits = 1
    while splits < MOST_SPLITS and splits * programs < 4 * processors:
        if chunks < 2 * splits * CHUNKS_OF_SPLIT:
            break
        splits *= 2
    return splits
