"""P V, alone or mixed into attention: one read of V and of attention, one write."""

import triton
import triton.language as tl

from rsa_hf.ops.triton.states import (
    _advance,
    _borders,
    _load_rows,
    _load_states,
    _positions,
    _program,
    _reading,
    _seen,
    _states_of_split,
    _store_rows,
    _walk,
    _writing,
)
from rsa_hf.ops.triton.tables import TABLE_ROWS, WRITE, _multiply, _split, _steps_of_split, _toeplitz


@triton.jit
def _add_readout(acc, h_real, h_imaginary, reading, reached):
    """Add Re(z^k h), row by row, where the state reaches."""
    real, imaginary, _, _ = reading
    real, imaginary = (real * reached)[:, None], (imaginary * reached)[:, None]
    return acc + real * h_real[None, :] - imaginary * h_imaginary[None, :]


@triton.jit
def _lerp(a, b, weight):
    """The mixture a + weight (b − a): exactly a where the weight is 0, exactly b where it is 1."""
    return tl.where(weight < 0.5, a + weight * (b - a), b - (1.0 - weight) * (b - a))


@triton.jit
def forward_kernel(
    value,
    attention,
    gate,
    output,
    key_mask,
    segment_ids,
    columns,
    heads,
    table,
    splits,
    entering,
    rows,
    num_columns,
    num_heads,
    length,
    offset,
    queries,
    heads_per_value,
    value_b,
    value_h,
    value_s,
    attention_b,
    attention_h,
    attention_t,
    output_b,
    output_h,
    output_t,
    gate_stride,
    mask_b,
    segments_b,
    slots,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    POWERS: tl.constexpr,
    STAGES: tl.constexpr,
    CAUSAL: tl.constexpr,
    MIXED: tl.constexpr,
    MASKED: tl.constexpr,
    PACKED: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """P V, or attention + g (P V − attention) with MIXED.

    Where:
        value: V, [B, Hv, S, D].
        attention: [B, T, H', D]; not looked at without MIXED.
        gate: (H,).
        output: [B, T, H', D] with MIXED, else [B, H, T, D].
        key_mask: [B or 1, S] bytes, 0 where a key is hidden; with MASKED.
        segment_ids: [B, S], which document each position belongs to; with PACKED.
        columns: head and residue of each column, [columns, 2].
        heads: dilation and kind of each head, [H, 2].
        table: of `powers_kernel`.
        splits: from `splits_kernel`, unless there is one split.
        entering: for unmasked REMs, room for [B, BLOCKS, H, slots, 2, BLOCK].
        length: how many keys there are to read.
        offset: position of the first query.
    """
    head, residue, row, block, split, _column = _program(columns, num_columns, rows, BLOCKS)
    d = tl.load(heads + 2 * head)
    table += head * TABLE_ROWS * POWERS
    steps = tl.cdiv(length - residue, d)
    per_split = _steps_of_split(length, d, CHUNK, SPLITS)
    first = split * (per_split // CHUNK)
    last = tl.minimum(first + per_split // CHUNK, tl.cdiv(steps, CHUNK))
    channels = block * BLOCK + tl.arange(0, BLOCK)
    value += row * value_b + (head // heads_per_value).to(tl.int64) * value_h
    output += row * output_b + head.to(tl.int64) * output_h
    key_mask += row * mask_b
    segment_ids += row * segments_b
    i = tl.arange(0, CHUNK)
    high = _toeplitz(table, WRITE, CHUNK, CAUSAL, POWERS)
    low = high
    if SPLIT:
        high, low = _split(high, value.dtype.element_ty)
    if MIXED:
        attention += row * attention_b + head.to(tl.int64) * attention_h
        weight = tl.load(gate + head * gate_stride).to(tl.float32)

    apart = tl.num_programs(0).to(tl.int64) // SPLITS
    splits += (tl.program_id(0) - split * apart) * (8 * BLOCK)
    stride = apart * (8 * BLOCK)
    if not CAUSAL:
        slot = ((row * BLOCKS + block) * num_heads + head) * slots
        entering += (slot + residue * (tl.cdiv(tl.cdiv(length, d), CHUNK) - 1)) * (2 * BLOCK)
        h_real, h_imaginary, q_real, q_imaginary = _states_of_split(
            splits,
            segment_ids,
            table,
            split,
            stride,
            steps,
            per_split,
            residue,
            d,
            BLOCK,
            CHUNK,
            SPLITS,
            POWERS,
            False,
            PACKED,
            False,
            FROM_RIGHT=True,
        )
        _walk(
            h_real,
            h_imaginary,
            q_real,
            q_imaginary,
            value,
            value_s,
            0,
            length,
            key_mask,
            segment_ids,
            table,
            entering,
            channels,
            first,
            last,
            steps,
            residue,
            d,
            D,
            BLOCK,
            CHUNK,
            POWERS,
            STAGES,
            False,
            MASKED,
            PACKED,
            False,
            FROM_RIGHT=True,
            KEPT=True,
        )
        # Other threads read what these have written.
        tl.debug_barrier()
    h_real, h_imaginary, q_real, q_imaginary = _states_of_split(
        splits,
        segment_ids,
        table,
        split,
        stride,
        steps,
        per_split,
        residue,
        d,
        BLOCK,
        CHUNK,
        SPLITS,
        POWERS,
        False,
        PACKED,
        False,
        FROM_RIGHT=False,
    )
    # Before the first query there are only states to carry, and behind the last one nothing is left to do.
    begin = tl.minimum(tl.maximum(tl.maximum(offset - residue, 0) // (d * CHUNK), first), last)
    h_real, h_imaginary, q_real, q_imaginary = _walk(
        h_real,
        h_imaginary,
        q_real,
        q_imaginary,
        value,
        value_s,
        0,
        length,
        key_mask,
        segment_ids,
        table,
        entering,
        channels,
        first,
        begin,
        steps,
        residue,
        d,
        D,
        BLOCK,
        CHUNK,
        POWERS,
        STAGES,
        False,
        MASKED,
        PACKED,
        False,
        FROM_RIGHT=False,
        KEPT=False,
    )
    end = tl.minimum(tl.cdiv(tl.maximum(offset + queries - residue, 0), d * CHUNK), last)
    writing = _writing(table, CHUNK - 1 - i, CHUNK, False, POWERS)
    from_left = _reading(table, i + 1, False, POWERS)
    from_right = _reading(table, CHUNK - i, False, POWERS)
    for number in tl.range(0, end - begin, num_stages=STAGES):
        chunk = begin + number
        position, inside = _positions(chunk, steps, residue, d, CHUNK, False)
        query = position - offset
        asked = inside & (query >= 0) & (query < queries)
        if MIXED:
            softmax = _load_rows(attention, query, attention_t, asked, channels, D, BLOCK).to(tl.float32)
        x = _load_rows(value, position, value_s, _seen(key_mask, position, inside, MASKED), channels, D, BLOCK)
        acc = tl.zeros([CHUNK, BLOCK], tl.float32)
        if PACKED:
            own = tl.load(segment_ids + position, mask=inside, other=-1)
            same = own[:, None] == own[None, :]
            acc = _multiply(tl.where(same, high, 0.0), tl.where(same, low, 0.0), x, acc, SPLIT)
        else:
            acc = _multiply(high, low, x, acc, SPLIT)
        if not CAUSAL:
            reached, taken, keep = _borders(segment_ids, chunk, steps, residue, d, CHUNK, False, PACKED, True)
            pointers = entering + chunk.to(tl.int64) * (2 * BLOCK) + tl.arange(0, BLOCK)
            has_place = (chunk + 1) * CHUNK < steps + tl.zeros([BLOCK], tl.int32)
            b_real, b_imaginary, _e_real, _e_imaginary = _load_states(pointers, has_place, BLOCK, False)
            acc = _add_readout(acc, b_real, b_imaginary, from_right, reached)
        reached, taken, keep = _borders(segment_ids, chunk, steps, residue, d, CHUNK, False, PACKED, False)
        acc = _add_readout(acc, h_real, h_imaginary, from_left, reached)
        h_real, h_imaginary, q_real, q_imaginary = _advance(
            h_real,
            h_imaginary,
            q_real,
            q_imaginary,
            x.to(tl.float32),
            writing,
            taken,
            keep,
            False,
        )
        if MIXED:
            acc = _lerp(softmax, acc, weight)
        _store_rows(output, query, output_t, asked, channels, acc, D, BLOCK)
