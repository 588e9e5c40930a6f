"""The configuration of Transformer-XL, with the fields of transformers 4, so that its checkpoints load unchanged."""

import itertools
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from rsa_hf.models.segments import SegmentConfig

__all__ = ["TransformerXLConfig"]


@strict
class TransformerXLConfig(SegmentConfig):
    """Transformer-XL (Dai et al., 2019, arXiv:1901.02860). Defaults are those of the WikiText-103 model.

    Args:
        vocab_size: number of tokens V.
        cutoffs: first token of each band of the adaptive embedding and softmax but the first, tokens being sorted by
            frequency; `[]` gives a plain softmax.
        d_model: width of the hidden states.
        d_embed: width of the embeddings of the most frequent band; None: `d_model`.
        n_head: number of attention heads H.
        d_head: width of a head D.
        d_inner: inner width of the feed-forward layers.
        div_val: factor by which each band's embeddings are narrower than those of the band before; 1: all bands share
            one table.
        pre_lnorm: whether to normalise the input of each block instead of its output.
        n_layer: number of layers.
        mem_len: number of positions that the memory of each layer keeps; also the window of `same_length`.
        clamp_len: maximum distance of positions, to which larger ones are clamped; 0 or less: no maximum.
        same_length: whether every query sees `mem_len` positions, itself included, instead of all there are.
        zero_memory: whether a text is preceded by `mem_len` zero states, which attention sees, as in transformers 4
            and in configs saved by it; False: by nothing, as in the paper.
        proj_share_all_but_first: whether all bands but the first share the embedding's projection with the softmax.
        tie_projs: the same for each of the bands; None: as `proj_share_all_but_first` says.
        tie_word_embeddings: whether the softmax uses the embedding tables.
        untie_r: whether each layer has its own biases u and v.
        dropout: dropout rate of embeddings, positions, attention output and feed-forward layers.
        dropatt: dropout rate of the attention weights.
        init_std: standard deviation of initial weights.
        proj_init_std: standard deviation of the initial projections of embeddings.
        layer_norm_epsilon: epsilon of all layer normalisations.
        use_cache: whether to return the memory.
    """

    model_type = "transfo-xl"
    attribute_map: ClassVar[dict[str, str]] = {
        "n_token": "vocab_size",
        "hidden_size": "d_model",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "head_dim": "d_head",
    }

    vocab_size: int = 267735
    cutoffs: list[int] | tuple[int, ...] = (20000, 40000, 200000)
    d_model: int = 1024
    d_embed: int | None = None
    n_head: int = 16
    d_head: int = 64
    d_inner: int = 4096
    div_val: int = 4
    pre_lnorm: bool = False
    n_layer: int = 18
    mem_len: int = 1600
    clamp_len: int = 1000
    same_length: bool = True
    zero_memory: bool = False
    proj_share_all_but_first: bool = True
    tie_projs: list[bool] | tuple[bool, ...] | None = None
    tie_word_embeddings: bool = True
    untie_r: bool = True
    dropout: float | int = 0.1
    dropatt: float | int = 0.0
    init_std: float | int = 0.02
    proj_init_std: float | int = 0.01
    layer_norm_epsilon: float | int = 1e-5
    eos_token_id: int | list[int] | None = 0

    def __post_init__(self, **kwargs: Any) -> None:
        self.cutoffs = list(self.cutoffs)
        bands = len(self.cutoffs) + 1
        if any(low >= high for low, high in itertools.pairwise([0, *self.cutoffs, self.vocab_size])):
            raise ValueError(f"cutoffs={self.cutoffs} must increase between 0 and vocab_size={self.vocab_size}.")
        if self.embedding_width // self.div_val ** (bands - 1) < 1:
            raise ValueError(f"div_val={self.div_val} must leave band {bands} a width, of {self.embedding_width}.")
        if len(self.projections_tied) != bands:
            raise ValueError(f"tie_projs={self.tie_projs} must have one entry for each of the {bands} bands.")
        if self.mem_len < 0 or (self.same_length and self.mem_len == 0):
            raise ValueError(f"mem_len={self.mem_len} must be ≥ 0, and ≥ 1 with same_length=True, whose window it is.")
        if kwargs.get("attn_type", 0) != 0:
            raise ValueError(f"attn_type={kwargs['attn_type']} must be 0: no other is implemented.")
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]

    @property
    def embedding_width(self) -> int:
        """`d_embed`, or `d_model` if it is None."""
        return self.d_model if self.d_embed is None else self.d_embed

    @property
    def projections_tied(self) -> list[bool]:
        """`tie_projs`, or, if it is None, what `proj_share_all_but_first` says."""
        if self.tie_projs is None:
            return [False] + [self.proj_share_all_but_first] * len(self.cutoffs)
        return list(self.tie_projs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read a saved config; one without `zero_memory` is from transformers 4, which attended to zeros."""
        return super().from_dict({"zero_memory": True, **config_dict}, **kwargs)
