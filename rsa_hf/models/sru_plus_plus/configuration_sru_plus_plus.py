"""The configuration of SRU++."""

from huggingface_hub.dataclasses import strict

from rsa_hf.models.segments import SegmentConfig

__all__ = ["SRUPlusPlusConfig"]


@strict
class SRUPlusPlusConfig(SegmentConfig):
    """SRU++ (Lei, 2021, arXiv:2102.12459). Defaults are those of the base model on enwik8, for 256 bytes."""

    model_type = "sru_plus_plus"

    vocab_size: int = 256
    hidden_size: int = 3072  # width d of the embeddings and of each layer's recurrence
    projection_size: int = 768  # width d′ of attention, usually much smaller
    num_hidden_layers: int = 10
    num_attention_heads: int = 1  # H, each of width d′ / H; the paper has 1
    mem_len: int = 1024  # number of positions M before a segment that attention sees
    highway_bias: float | int = -2.0  # initial bias of the highway gate; below 0, a layer starts near the identity
    dropout: float | int = 0.22  # of the embeddings, of the input of W_o, and of the last layer's output
    attention_dropout: float | int = 0.22  # of the attention weights
    layer_norm_epsilon: float | int = 1e-5
    tie_word_embeddings: bool = False
