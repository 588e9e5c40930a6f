"""One recurrent layer of `torch.nn` (or a linear one), dilated and behind padding, with a state that is carried on."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from rsa_hf.models.recurrent.linear import LinearRNN

__all__ = ["RecurrentLayer"]

_CELLS: dict[str, type[nn.RNN] | type[nn.LSTM] | type[nn.GRU] | type[LinearRNN]] = {
    "rnn": nn.RNN,
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "linear": LinearRNN,
}


class RecurrentLayer(nn.Module):
    """A layer whose state at step t comes from step t − d: d interleaved sub-sequences with the same weights.

    The state is of shape [B, k, d, n]: k = 2 parts for an LSTM (h, c), else 1; the last d steps, oldest first. It is
    of shape [B, 2k, d, n] where bidirectional: of each part the way there, then the way back, whose last step is the
    first of the text.

    Args:
        cell: `"rnn"`, `"lstm"`, `"gru"` or `"linear"`.
        input_size: width of the inputs.
        hidden_size: n.
        dilation: d.
        bidirectional: also from the end to the beginning; then no state goes in.
    """

    def __init__(self, cell: str, input_size: int, hidden_size: int, dilation: int, bidirectional: bool) -> None:
        super().__init__()
        self.hidden_size, self.dilation, self.bidirectional = hidden_size, dilation, bidirectional
        self.parts = 2 if cell == "lstm" else 1
        self.cell = _CELLS[cell](input_size, hidden_size, batch_first=True, bidirectional=bidirectional)

    def forward(self, x: Tensor, lengths: Tensor | None = None, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Run the layer over a segment.

        Args:
            x: inputs, shape [B, T, input_size].
            lengths: number of real steps of each row, which come first; shape [B], None: all T.
            state: of the segment before, shape [B, k, d, n]; None: zeros, as it has to be where bidirectional.

        Returns:
            The outputs, [B, T, n] (2n where bidirectional; behind a row's length they mean nothing), and the state
            behind the last real step of each row.
        """
        B, T, _ = x.shape
        d = self.dilation
        if state is None:
            state = x.new_zeros(B, (1 + self.bidirectional) * self.parts, d, self.hidden_size)
        # Row b, step i·d + r is step i of the sub-sequence b·d + r.
        sub_sequences = F.pad(x, (0, 0, 0, -T % d)).unflatten(1, (-1, d)).transpose(1, 2).flatten(0, 1)
        residues = torch.arange(d)
        ends = torch.full((B,), T) if lengths is None else lengths.cpu()
        steps = ((ends[:, None] - residues + d - 1) // d).clamp(min=0)
        output, last = self._run(sub_sequences, steps.flatten(), state)
        output = output.unflatten(0, (B, d)).transpose(1, 2).flatten(1, 2)[:, :T]
        # A sub-sequence without a step has kept its state; then the oldest comes first again.
        last = torch.where((steps > 0)[:, None, :, None].to(x.device), last, state)
        orders = [(ends[:, None] + residues) % d]
        if self.bidirectional:
            orders.append((d - 1 - residues).expand(B, d))
        order = torch.stack(orders, dim=1).repeat(1, self.parts, 1).to(x.device)
        return output, last.gather(2, order[..., None].expand_as(last))

    def _run(self, x: Tensor, steps: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and last states of sub-sequences [B·d, steps, …] of so many real steps each."""
        first: Tensor | tuple[Tensor, ...] | None = None
        if not self.bidirectional:
            parts = [part.flatten(0, 1)[None].contiguous() for part in state.unbind(1)]
            first = tuple(parts) if len(parts) > 1 else parts[0]
        if bool((steps == x.shape[1]).all()):
            output, last = self.cell(x, first)
        else:
            packed = pack_padded_sequence(x, steps.clamp(min=1), batch_first=True, enforce_sorted=False)
            packed_output, last = self.cell(packed, first)
            output, _ = pad_packed_sequence(packed_output, batch_first=True, total_length=x.shape[1])
        ways = torch.cat(last) if isinstance(last, tuple) else last
        return output, ways.unflatten(1, (-1, self.dilation)).transpose(0, 1)
