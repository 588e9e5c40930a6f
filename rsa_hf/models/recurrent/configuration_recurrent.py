"""The configuration of the recurrent networks."""

from typing import Any

from huggingface_hub.dataclasses import strict

from rsa_hf.models.segments import SegmentConfig

__all__ = ["RecurrentConfig"]

CELLS = ("rnn", "lstm", "gru", "linear")


@strict
class RecurrentConfig(SegmentConfig):
    """A stack of recurrent layers between an embedding and a head.

    `cell` is `"rnn"` (Elman's, with tanh), `"lstm"` or `"gru"`, as in `torch.nn`; or `"linear"`, h_t = W_h h_{t−1} +
    W_x x_t, to which RSA heads are equivalent (RSA paper, proposition 1). Recurrent layers start as in `torch.nn`.
    `dilations` holds d_l for each layer l, which carries its state over d_l steps, from h_{t−d} to h_t (Chang et al.,
    2017, Dilated Recurrent Neural Networks).
    """

    model_type = "recurrent"

    vocab_size: int = 50257
    cell: str = "lstm"
    hidden_size: int = 512  # width of the embeddings and of each layer's state, in each direction
    num_hidden_layers: int = 2
    dilations: list[int] | tuple[int, ...] | None = None  # None: 1 everywhere
    bidirectional: bool = False  # whether a second recurrence runs from the end; not for language models
    dropout: float | int = 0.1  # of the embeddings and of each layer's output
    initializer_range: float | int = 0.02  # standard deviation of initial embeddings
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        if self.cell not in CELLS:
            raise ValueError(f"cell={self.cell!r} must be one of {CELLS}.")
        self.dilations = [1] * self.num_hidden_layers if self.dilations is None else list(self.dilations)
        if len(self.dilations) != self.num_hidden_layers or min(self.dilations) < 1:
            raise ValueError(f"dilations={self.dilations} must be ≥ 1, for each of {self.num_hidden_layers} layers.")
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]
