"""Recurrent networks stepped by hand, with PyTorch's cells."""

import torch
from torch import nn
from torch.func import functional_call


class LinearCell(nn.Module):
    """One step of h_t = W_h h_{t−1} + W_x x_t."""

    def __init__(self, input_size, hidden_size):
        super().__init__()
        self.weight_ih = nn.Parameter(torch.empty(hidden_size, input_size))
        self.weight_hh = nn.Parameter(torch.empty(hidden_size, hidden_size))

    def forward(self, x, h=None):
        written = nn.functional.linear(x, self.weight_ih)
        return written if h is None else written + nn.functional.linear(h, self.weight_hh)


CELLS = {"rnn": nn.RNNCell, "lstm": nn.LSTMCell, "gru": nn.GRUCell, "linear": LinearCell}


def steps_by_hand(kind, layer, inputs, *, suffix="_l0", state=None, dilation=1):
    """Run a layer over one text, h_t from h_{t−d}, with its own weights, so that they get gradients.

    The suffix of the names of the weights tells the direction. A state is (h,) or (h, c), None for zeros. Returns the
    output of each step, and the last state.
    """
    weights = {name.removesuffix(suffix): w for name, w in layer.cell.named_parameters() if name.endswith(suffix)}
    cell = CELLS[kind](weights["weight_ih"].shape[1], weights["weight_hh"].shape[1])
    states = []
    for t, x in enumerate(inputs):
        before = states[t - dilation] if t >= dilation else state
        if before is not None and kind != "lstm":
            [before] = before
        after = functional_call(cell, weights, (x, before))
        states.append(after if kind == "lstm" else (after,))
    return [step[0] for step in states], states[-1] if states else state
