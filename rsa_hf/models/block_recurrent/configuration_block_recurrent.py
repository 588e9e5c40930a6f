"""The configuration of the Block-Recurrent Transformer."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from rsa_hf.models.segments import SegmentConfig

__all__ = ["BlockRecurrentConfig"]


@strict
class BlockRecurrentConfig(SegmentConfig):
    """Block-Recurrent Transformer (Hutchins et al., 2022, arXiv:2203.07852). Defaults are those of the paper.

    `cell` selects how a state is updated: `"dual"` gates the outputs of both attention and the feed-forward layer,
    `"single"` only that of the feed-forward layer, and `"skip"` has no feed-forward layer. The `gate` is `"fixed"`
    (learned, but the same at all times) or `"lstm"` (computed from the inputs).
    """

    model_type = "block-recurrent"
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "head_dim": "d_head",
    }

    vocab_size: int = 32000
    d_model: int = 1024  # width of the hidden states and of the state vectors
    n_head: int = 8  # number of attention heads H
    d_head: int = 128  # width of a head D
    d_inner: int = 4096  # inner width of the feed-forward layers
    n_layer: int = 12
    window_size: int = 512  # tokens W between two updates of the state; a token sees W positions, its own included
    recurrent_layers: list[int] | tuple[int, ...] = (-3,)  # their indices; empty: Transformer-XL with a window
    num_state_vectors: int = 512  # N, in each recurrent layer
    cell: str = "skip"
    gate: str = "fixed"
    relative_attention_num_buckets: int = 32  # of distances, as in T5
    relative_attention_max_distance: int = 128  # all distances from this one on share a bucket
    dropout: float | int = 0.05  # of embeddings, attention output and feed-forward layers, not of the states
    dropatt: float | int = 0.05  # of the attention weights of tokens
    layer_norm_epsilon: float | int = 1e-6
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        self.recurrent_layers = list(self.recurrent_layers)
        if self.cell not in ("skip", "single", "dual") or self.gate not in ("fixed", "lstm"):
            raise ValueError(f"gate={self.gate!r}, cell={self.cell!r} must be fixed or lstm; skip, single or dual.")
        places, L = self.recurrent_places, self.n_layer
        if any(not -L <= i < L for i in self.recurrent_layers) or len(places) < len(self.recurrent_layers):
            raise ValueError(f"recurrent_layers={self.recurrent_layers} must be different, from {-L} to {L - 1}.")
        buckets, furthest = self.relative_attention_num_buckets, self.relative_attention_max_distance
        if buckets < 2 or furthest <= buckets // 2:
            raise ValueError(f"relative_attention_num_buckets={buckets} must be ≥ 2, and its half below {furthest}.")
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]

    @property
    def recurrent_places(self) -> list[int]:
        """Indices of the recurrent layers counted from the first layer, in order."""
        return sorted({i % self.n_layer for i in self.recurrent_layers})
