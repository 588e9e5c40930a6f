"""RNN, LSTM, GRU and linear RNN as language models and as classifiers of sequences.

Notation: B rows, T tokens of a segment, n channels, d steps of dilation, k parts of a state: 2 for an LSTM (h, c),
else 1.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from transformers.utils.generic import can_return_tuple

from rsa_hf.models import segments
from rsa_hf.models.recurrent.configuration_recurrent import RecurrentConfig

__all__ = ["RecurrentForCausalLM", "RecurrentForSequenceClassification", "RecurrentModel"]


class LinearRNN(nn.RNNBase):
    """One layer of h_t = W_h h_{t−1} + W_x x_t, without biases, with parameters and initialisation of `torch.nn.RNN`.

    W_h starts uniform in ±1/√n, with a spectral radius of about 1/√3: states neither explode nor vanish at once.
    """

    def __init__(self, input_size: int, hidden_size: int, **options: bool) -> None:
        # The mode only sets the number of gates in the weights: its tanh is in the forward that is overridden here.
        super().__init__("RNN_TANH", input_size, hidden_size, bias=False, **options)

    def forward(self, x: Tensor, lengths: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and last states for inputs [B, T, n], the first `lengths` of them real, that follow a state."""
        lengths = lengths.to(x.device)[:, None]
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        reversed_ = torch.where(positions < lengths, lengths - 1 - positions, positions)
        outputs, last = list[Tensor](), list[Tensor]()
        for direction, suffix in enumerate(("", "_reverse") if self.bidirectional else ("",)):
            order = (reversed_ if direction else positions)[..., None]
            h, states = first[direction], list[Tensor]()
            for written in (x @ self.get_parameter(f"weight_ih_l0{suffix}").T).take_along_dim(order, 1).unbind(1):
                h = written + h @ self.get_parameter(f"weight_hh_l0{suffix}").T
                states.append(h)
            hidden = torch.stack(states, dim=1)
            last.append(hidden.take_along_dim(lengths[..., None] - 1, 1)[:, 0])
            outputs.append(hidden.take_along_dim(order, 1))
        return torch.cat(outputs, dim=-1), torch.stack(last)


_CELLS: dict[str, Any] = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU, "linear": LinearRNN}


class RecurrentLayer(nn.Module):
    """A layer whose state at step t comes from step t − d: d interleaved sub-sequences with the same weights.

    The state, [B, k, d, n], holds the last d steps, oldest first. In a bidirectional layer it is [B, 2k, d, n]: for
    each part, the forward and then the backward direction. The last step of the backward direction is the first of the
    text, so this state cannot be continued.
    """

    def __init__(self, cell: str, input_size: int, hidden_size: int, dilation: int, bidirectional: bool) -> None:
        super().__init__()
        self.hidden_size, self.dilation, self.bidirectional = hidden_size, dilation, bidirectional
        self.parts = 2 if cell == "lstm" else 1
        self.cell = _CELLS[cell](input_size, hidden_size, batch_first=True, bidirectional=bidirectional)

    def forward(self, x: Tensor, lengths: Tensor | None = None, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Run the layer over inputs [B, T, input_size], starting from a state; None: zeros.

        `lengths`, [B], is the number of real steps of each row, which precede its padding; None: all T. Returns the
        outputs, [B, T, n] (2n if bidirectional; undefined at padding), and the state after each row's last real step.
        """
        B, T, _ = x.shape
        d = self.dilation
        if state is None:
            state = x.new_zeros(B, (1 + self.bidirectional) * self.parts, d, self.hidden_size)
        # Row b, step i·d + r is step i of the sub-sequence b·d + r.
        sub_sequences = F.pad(x, (0, 0, 0, -T % d)).unflatten(1, (-1, d)).transpose(1, 2).flatten(0, 1)
        residues = torch.arange(d, device="cpu")
        ends = torch.full((B,), T, device="cpu") if lengths is None else lengths.cpu()
        steps = ((ends[:, None] - residues + d - 1) // d).clamp(min=0)
        output, last = self._run(sub_sequences, steps.flatten(), state)
        output = output.unflatten(0, (B, d)).transpose(1, 2).flatten(1, 2)[:, :T]
        # A sub-sequence without a step keeps its state. Then the steps are sorted, the oldest first.
        last = torch.where((steps > 0)[:, None, :, None].to(x.device), last, state)
        orders = [(ends[:, None] + residues) % d]
        if self.bidirectional:
            orders.append((d - 1 - residues).expand(B, d))
        order = torch.stack(orders, dim=1).repeat(1, self.parts, 1).to(x.device)
        return output, last.gather(2, order[..., None].expand_as(last))

    def _run(self, x: Tensor, steps: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and last states for sub-sequences, [B·d, S, …], the first `steps` of them real."""
        # In torch's layout, [directions, B·d, n] for each part.
        parts = state.unflatten(1, (self.parts, -1)).permute(1, 2, 0, 3, 4).flatten(2, 3).contiguous().unbind()
        first = parts if self.parts > 1 else parts[0]
        steps = steps.clamp(min=1)
        if isinstance(self.cell, LinearRNN):
            output, last = self.cell(x, steps, first)
        elif bool((steps == x.shape[1]).all()):
            output, last = self.cell(x, first)
        else:
            packed = pack_padded_sequence(x, steps, batch_first=True, enforce_sorted=False)
            packed_output, last = self.cell(packed, first)
            output, _ = pad_packed_sequence(packed_output, batch_first=True, total_length=x.shape[1])
        last = torch.cat(last) if isinstance(last, tuple) else last
        return output, last.unflatten(1, (-1, self.dilation)).transpose(0, 1)


class RecurrentPreTrainedModel(segments.SegmentPreTrainedModel):
    """Base class: initialisation, and attributes that differ from those of other models with a state."""

    config_class = RecurrentConfig
    config: RecurrentConfig
    supports_gradient_checkpointing = False
    _supports_sdpa = False

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.RNNBase):
            if not getattr(module.weight_hh_l0, "_is_hf_initialized", False):
                module.reset_parameters()
        else:
            super()._init_weights(module)  # type: ignore[no-untyped-call]


class RecurrentModel(RecurrentPreTrainedModel):
    """Embedding and recurrent layers, without a head."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config)
        n = config.hidden_size
        self.embeddings: nn.Module = nn.Embedding(config.vocab_size, n, padding_idx=config.pad_token_id)
        width = 2 * n if config.bidirectional else n
        assert config.dilations is not None
        self.layers: Any = nn.ModuleList(
            RecurrentLayer(config.cell, width if i else n, n, d, config.bidirectional)
            for i, d in enumerate(config.dilations)
        )
        self.dropout = nn.Dropout(config.dropout)
        self.post_init()  # type: ignore[no-untyped-call]

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        state: Sequence[Tensor] | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        detach_state: bool = True,
        **_: Any,
    ) -> segments.SegmentOutput:
        """Hidden states of a segment, [B, T, n], or [B, T, 2n] for a bidirectional network.

        For the arguments, see `rsa_hf.models.segments`. Padding may stand on either side or between tokens; the
        state skips it. The state is [B, k, d, n] for each layer; a bidirectional network takes none. With
        `detach_state=False` gradients flow back through the state into the segment before.
        """
        if state is not None and self.config.bidirectional:
            raise ValueError("a bidirectional network takes no state: its backward direction begins at the end.")
        hidden = self.embed(self.embeddings, input_ids, inputs_embeds)
        if state is not None:
            needed = [(len(hidden), layer.parts, layer.dilation, layer.hidden_size) for layer in self.layers]
            segments.require_shapes("state", state, needed)
        order, lengths = _real_first(attention_mask, hidden.shape[1])
        before = None if order is None else order.argsort(dim=1)
        hidden = self.dropout(hidden)
        all_hidden, last = [hidden], list[Tensor]()
        hidden = _reordered(hidden, order)
        for i, layer in enumerate(self.layers):
            hidden, after = layer(hidden, lengths, None if state is None else state[i])
            hidden = self.dropout(hidden)
            all_hidden.append(_reordered(hidden, before))
            last.append(after.detach() if detach_state else after)
        use_cache = self.config.use_cache if use_cache is None else use_cache
        return segments.SegmentOutput(
            last_hidden_state=all_hidden[-1],
            state=tuple(last) if use_cache else None,
            hidden_states=tuple(all_hidden) if output_hidden_states else None,
        )


def _real_first(attention_mask: Tensor | None, T: int) -> tuple[Tensor | None, Tensor | None]:
    """The order [B, T] that puts real tokens before padding, and their number [B]; None without padding."""
    real = None if attention_mask is None else attention_mask[:, -T:].bool()
    if real is None or bool(real.all()):
        return None, None
    return (~real).int().argsort(dim=1, stable=True), real.sum(dim=1)


def _reordered(x: Tensor, order: Tensor | None) -> Tensor:
    return x if order is None else x.gather(1, order[..., None].expand_as(x))


class RecurrentForCausalLM(RecurrentPreTrainedModel, segments.SegmentForCausalLM):
    """A recurrent network that predicts the next token."""

    def __init__(self, config: RecurrentConfig) -> None:
        if config.bidirectional:
            raise ValueError("bidirectional=True: a language model would see what it predicts.")
        super().__init__(config)


class RecurrentForSequenceClassification(RecurrentPreTrainedModel, segments.SegmentForSequenceClassification):
    """A recurrent network with a linear classifier on the last token (for the backward direction, the first)."""

    def build_head(self, config: RecurrentConfig) -> None:
        """The classifier, with a bias."""
        self.score = nn.Linear((1 + config.bidirectional) * config.hidden_size, config.num_labels or 0)

    def features(self, hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
        """The states to classify: [B, T, n] → [B, n], or [B, T, 2n] → [B, 2n]."""
        forwards, backwards = hidden.tensor_split([self.config.hidden_size], dim=2)
        mask = None if attention_mask is None else attention_mask[:, -hidden.shape[1] :].flip(1)
        return torch.cat(
            [segments.at_last_token(forwards, attention_mask), segments.at_last_token(backwards.flip(1), mask)], dim=-1
        )
