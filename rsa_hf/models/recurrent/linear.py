"""A linear RNN with the interface of `torch.nn.RNN`, which has no such nonlinearity."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

__all__ = ["LinearRNN"]


class LinearRNN(nn.RNNBase):
    """One layer of h_t = W_h h_{t−1} + W_x x_t, step by step, without biases.

    It starts as `torch.nn` has it, uniformly in ±1/√n: the spectral radius of W_h is then about 1/√3, so that states
    neither explode nor vanish within a few steps.

    Args:
        input_size: width of the inputs.
        hidden_size: n.
        batch_first: has to be True.
        bidirectional: also from the end to the beginning.
    """

    def __init__(self, input_size: int, hidden_size: int, batch_first: bool, bidirectional: bool) -> None:
        # The mode says how many gates the weights hold, no more: its tanh would be in a forward that is not used.
        super().__init__(
            "RNN_TANH", input_size, hidden_size, bias=False, batch_first=batch_first, bidirectional=bidirectional
        )

    def forward(
        self, x: Tensor | PackedSequence, first: Tensor | None = None
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """Run the layer as `torch.nn.RNN` runs.

        Args:
            x: inputs, shape [B, T, input_size], or rows of several lengths, packed.
            first: the states before the first step, shape [directions, B, n]; None: zeros.

        Returns:
            The states, [B, T, directions · n] or packed, and the last ones of each way, [directions, B, n].
        """
        if isinstance(x, PackedSequence):
            padded, lengths = pad_packed_sequence(x, batch_first=True)
            states, last = self._ways(padded, lengths.to(padded.device), first)
            return pack_padded_sequence(states, lengths, batch_first=True, enforce_sorted=False), last
        return self._ways(x, torch.full((len(x),), x.shape[1], device=x.device), first)

    def _ways(self, x: Tensor, lengths: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        turned = torch.where(positions < lengths[:, None], lengths[:, None] - 1 - positions, positions)
        outputs, last = list[Tensor](), list[Tensor]()
        for way, suffix in enumerate(("", "_reverse") if self.bidirectional else ("",)):
            order = (turned if way else positions)[..., None]
            h = x.new_zeros(len(x), self.hidden_size) if first is None else first[way]
            states = list[Tensor]()
            for written in (x @ self.get_parameter(f"weight_ih_l0{suffix}").T).take_along_dim(order, 1).unbind(1):
                h = written + h @ self.get_parameter(f"weight_hh_l0{suffix}").T
                states.append(h)
            hidden = torch.stack(states, dim=1)
            last.append(hidden.take_along_dim(lengths[:, None, None] - 1, 1)[:, 0])
            outputs.append(hidden.take_along_dim(order, 1))
        return torch.cat(outputs, dim=-1), torch.stack(last)
