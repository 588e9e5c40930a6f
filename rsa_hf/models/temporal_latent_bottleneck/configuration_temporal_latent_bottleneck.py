"""The configuration of the Temporal Latent Bottleneck."""

from __future__ import annotations

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig

__all__ = ["TemporalLatentBottleneckConfig"]


@strict
class TemporalLatentBottleneckConfig(PreTrainedConfig):
    """Temporal Latent Bottleneck (Didolkar et al., 2022, arXiv:2205.14794).

    Args:
        vocab_size: number of tokens V.
        hidden_size: width n of tokens and of state vectors.
        num_hidden_layers: number of self-attention layers of the fast stream.
        num_attention_heads: number of heads H of self- and cross-attention.
        intermediate_size: inner width of the feed-forward layers.
        chunk_size: number of tokens K in a chunk.
        num_states: number of state vectors N of the slow stream.
        cross_attention_every: R: after every R-th self-attention layer, the fast stream attends to the states.
        dropout: dropout rate of embeddings, attention output and feed-forward layers.
        attention_dropout: dropout rate of the attention weights.
        initializer_range: standard deviation of initial weights.
        layer_norm_eps: epsilon of all layer normalisations.
        tie_word_embeddings: whether the softmax uses the embedding table.
        use_cache: whether to return the state.
    """

    model_type = "temporal_latent_bottleneck"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["state"]

    vocab_size: int = 50257
    hidden_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    intermediate_size: int = 2048
    chunk_size: int = 64
    num_states: int = 16
    cross_attention_every: int = 2
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.0
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.cross_attention_every > self.num_hidden_layers:
            raise ValueError(
                f"cross_attention_every={self.cross_attention_every} must be at most num_hidden_layers="
                f"{self.num_hidden_layers}, or the fast stream never sees the states."
            )
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]
