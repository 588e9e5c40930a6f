"""The configuration of the Block-Recurrent Transformer."""

from __future__ import annotations

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig

__all__ = ["BlockRecurrentConfig"]


@strict
class BlockRecurrentConfig(PreTrainedConfig):
    """Block-Recurrent Transformer (Hutchins et al., 2022, arXiv:2203.07852). Defaults are those of the paper.

    Args:
        vocab_size: number of tokens V.
        d_model: width of the hidden states and of the state vectors.
        n_head: number of attention heads H.
        d_head: width of a head D.
        d_inner: inner width of the feed-forward layers.
        n_layer: number of layers.
        window_size: number of tokens W between two updates of the state; also the number of positions that a token
            sees back, itself included.
        recurrent_layers: indices of the recurrent layers, negative ones counted from the end; `[]` gives a
            Transformer-XL with a sliding window.
        num_state_vectors: number of state vectors N of each recurrent layer.
        cell: how a state is updated: `"dual"` gates the outputs of attention and of the feed-forward layer, `"single"`
            that of the feed-forward layer alone, `"skip"` has no feed-forward layer.
        gate: `"fixed"`: learned, but the same at all times; or `"lstm"`: computed from the inputs.
        relative_attention_num_buckets: number of buckets of distances, as in T5.
        relative_attention_max_distance: all distances from this one on share a bucket.
        dropout: dropout rate of embeddings, attention output and feed-forward layers, but not of the state's updates.
        dropatt: dropout rate of the attention weights of tokens.
        layer_norm_epsilon: epsilon of all layer normalisations.
        tie_word_embeddings: whether the softmax uses the embedding table.
        use_cache: whether to return the memory.
    """

    model_type = "block-recurrent"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["mems"]
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "head_dim": "d_head",
    }

    vocab_size: int = 32000
    d_model: int = 1024
    n_head: int = 8
    d_head: int = 128
    d_inner: int = 4096
    n_layer: int = 12
    window_size: int = 512
    recurrent_layers: list[int] | tuple[int, ...] = (-3,)
    num_state_vectors: int = 512
    cell: str = "skip"
    gate: str = "fixed"
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    dropout: float | int = 0.05
    dropatt: float | int = 0.05
    layer_norm_epsilon: float = 1e-6
    tie_word_embeddings: bool = True
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.recurrent_layers = list(self.recurrent_layers)
        for name, allowed in (("cell", ("skip", "single", "dual")), ("gate", ("fixed", "lstm"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {allowed}.")
        places, L = self.recurrent_places, self.n_layer
        if any(not -L <= i < L for i in self.recurrent_layers) or len(places) < len(self.recurrent_layers):
            raise ValueError(f"recurrent_layers={self.recurrent_layers} must be different, from {-L} to {L - 1}.")
        buckets, furthest = self.relative_attention_num_buckets, self.relative_attention_max_distance
        if buckets < 2 or furthest <= buckets // 2:
            raise ValueError(
                f"relative_attention_num_buckets={buckets} must be ≥ 2, and "
                f"relative_attention_max_distance={furthest} more than half of it."
            )
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]

    @property
    def recurrent_places(self) -> list[int]:
        """Indices of the recurrent layers counted from the first layer, in order."""
        return sorted({i % self.n_layer for i in self.recurrent_layers})
