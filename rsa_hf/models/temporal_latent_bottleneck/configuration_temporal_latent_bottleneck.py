"""The configuration of the Temporal Latent Bottleneck."""

from typing import Any

from huggingface_hub.dataclasses import strict

from rsa_hf.models.segments import SegmentConfig

__all__ = ["TemporalLatentBottleneckConfig"]


@strict
class TemporalLatentBottleneckConfig(SegmentConfig):
    """Temporal Latent Bottleneck (Didolkar et al., 2022, arXiv:2205.14794)."""

    model_type = "temporal_latent_bottleneck"

    vocab_size: int = 50257
    hidden_size: int = 512  # width n of tokens and of state vectors
    num_hidden_layers: int = 6  # self-attention layers of the fast stream
    num_attention_heads: int = 8  # heads H of self- and cross-attention
    intermediate_size: int = 2048  # inner width of the feed-forward layers
    chunk_size: int = 64  # number of tokens K in a chunk
    num_states: int = 16  # number of state vectors N of the slow stream
    cross_attention_every: int = 2  # R: after every R-th self-attention layer, the fast stream attends to the states
    dropout: float | int = 0.1  # of embeddings, attention output and feed-forward layers
    attention_dropout: float | int = 0.0  # of the attention weights
    initializer_range: float | int = 0.02
    layer_norm_eps: float | int = 1e-5
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        if self.cross_attention_every > self.num_hidden_layers:
            every, layers = self.cross_attention_every, self.num_hidden_layers
            raise ValueError(f"cross_attention_every={every} must be at most num_hidden_layers={layers}.")
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]
