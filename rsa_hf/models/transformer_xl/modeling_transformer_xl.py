r"""Transformer-XL (Dai et al., 2019, arXiv:1901.02860), to be read alongside section 3.

Notation: B rows, T tokens of a segment, M positions of memory, S = M + T keys, H heads of width D.

Each layer attends to the segment and to its memory, the layer's inputs at the M positions before. So the context of a
token grows with every layer (section 3.2). Query t stands at position M + t of the key axis; its distance to key s is
M + t − s. The score of query t and key s is (section 3.3)

    A[t, s] = (q_t + u)ᵀ k_s + (q_t + v)ᵀ r_{M + t − s}        r_i = W_r R_i, R_i sinusoids of the distance i

Distances beyond `clamp_len` count as `clamp_len`. The first term of A is ordinary attention with queries q + u. The
second is added to its scores, so attention goes through transformers' attention interface (`position_bias`), with a
boolean mask that RSA heads read too: their P has T rows and S columns, and the window of `same_length`.

Embedding and softmax are adaptive (see adaptive.py). Parameters have the names and the layout of transformers 4, so
that its checkpoints load unchanged.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from rsa_hf.models import segments
from rsa_hf.models.interface_attention import InterfaceAttention, next_memory, sinusoids, visibility
from rsa_hf.models.transformer_xl.adaptive import AdaptiveEmbedding, AdaptiveLogSoftmax
from rsa_hf.models.transformer_xl.configuration_transformer_xl import TransformerXLConfig

__all__ = ["TransformerXLForCausalLM", "TransformerXLForSequenceClassification", "TransformerXLModel"]


def relative_scores(query: Tensor, position: Tensor) -> Tensor:
    """Scores of each query with the position of each key (paper, appendix B), [B, H, T, S]; undefined where s > M + t.

    `query` is q + v, [B, H, T, D], and `position` is r of the distances S … 0, [H, S + 1, D]. Row t of the result is
    row t of the product with all distances, shifted by T − 1 − t. As there is one distance more than there are keys,
    reading the rows of S + 1 entries as rows of S entries, from entry T on, does this shift: a view, no copy.
    """
    B, H, T, D = query.shape
    R = position.shape[1]
    scores = query.transpose(0, 1).reshape(H, B * T, D) @ position.transpose(1, 2)
    return scores.view(H, B, T * R)[..., T:].view(H, B, T, R - 1).transpose(0, 1)


class TransformerXLAttention(InterfaceAttention):
    """Attention over the memory and the segment with relative positions, with residual and layer normalisation."""

    def __init__(self, config: TransformerXLConfig) -> None:
        inner = config.n_head * config.d_head
        super().__init__(config, config.n_head, inner, config.dropatt)
        self.qkv_net = nn.Linear(config.d_model, 3 * inner, bias=False)
        self.r_net = nn.Linear(config.d_model, inner, bias=False)
        self.o_net = nn.Linear(inner, config.d_model, bias=False)
        self.drop = nn.Dropout(config.dropout)
        self.layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
        if config.untie_r:
            self.r_w_bias = nn.Parameter(torch.empty(config.n_head, config.d_head))
            self.r_r_bias = nn.Parameter(torch.empty(config.n_head, config.d_head))

    def forward(
        self, hidden: Tensor, memory: Tensor, positions: Tensor, visible: Tensor, biases: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor | None]:
        """From a segment, [B, T, d_model], to the output and the attention weights, [B, H, T, S] or None.

        `memory` holds the layer's inputs before the segment, [B, M, d_model], `positions` R of the distances S … 0,
        [S + 1, d_model], and `biases` u and v, [H, D] each, if all layers share them. `visible`, [B or 1, 1, T, S],
        says which keys each query sees.
        """
        text = torch.cat([memory, hidden], dim=1)
        text = self.layer_norm(text) if self.config.pre_lnorm else text
        query, key, value = self.qkv_net(text).unflatten(-1, (3, *self.heads)).permute(2, 0, 3, 1, 4)
        query = query[:, :, -hidden.shape[1] :]
        position = self.r_net(positions).unflatten(-1, self.heads).transpose(0, 1)
        u, v = (self.r_w_bias, self.r_r_bias) if biases is None else biases
        bias = relative_scores((query + v[:, None]) * self.scaling, position)
        output, weights = self.attend(query + u[:, None], key, value, visible, position_bias=bias)
        hidden = hidden + self.drop(self.o_net(output))
        return hidden if self.config.pre_lnorm else self.layer_norm(hidden), weights


class TransformerXLFeedForward(nn.Module):
    """Two linear layers at each position, with residual and layer normalisation."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        self.pre_lnorm = config.pre_lnorm
        self.CoreNet = nn.Sequential(
            nn.Linear(config.d_model, config.d_inner),
            nn.ReLU(inplace=True),
            nn.Dropout(config.dropout),
            nn.Linear(config.d_inner, config.d_model),
            nn.Dropout(config.dropout),
        )
        self.layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_epsilon)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, T, d_model] → [B, T, d_model]."""
        if self.pre_lnorm:
            return cast(Tensor, hidden + self.CoreNet(self.layer_norm(hidden)))
        return cast(Tensor, self.layer_norm(hidden + self.CoreNet(hidden)))


class TransformerXLLayer(GradientCheckpointingLayer):
    """Attention over memory and segment, then the feed-forward layer."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        self.dec_attn = TransformerXLAttention(config)
        self.pos_ff = TransformerXLFeedForward(config)

    def forward(self, hidden: Tensor, *context: Any) -> Tensor:
        """As `TransformerXLAttention.forward`, without the attention weights."""
        return cast(Tensor, self.pos_ff(self.dec_attn(hidden, *context)[0]))


class TransformerXLPreTrainedModel(segments.SegmentPreTrainedModel):
    """Base class: initialisation, and attributes that differ from those of other models with a state."""

    config_class = TransformerXLConfig
    base_model_prefix = "transformer"
    segment_state = "mems"
    memory_settings = ("mem_len", "same_length", "clamp_len")
    _no_split_modules = ["TransformerXLLayer"]  # noqa: RUF012  (transformers' own type)
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": TransformerXLLayer,
        "attentions": OutputRecorder(TransformerXLAttention, index=1),
    }
    # transformers 4 also saved computed tensors and, for biases that all layers share, one more copy per layer.
    _keys_to_ignore_on_load_unexpected = [  # noqa: RUF012
        r"pos_emb\.inv_freq$",
        r"layers\.\d+\.dec_attn\.r_[rw]_bias$",
    ]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        config = self.config
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, nn.LayerNorm) and name == "weight":
                init.normal_(parameter, mean=1.0, std=config.init_std)
            elif name in ("bias", "cluster_bias"):
                init.zeros_(parameter)
            else:
                std = config.proj_init_std if isinstance(module, nn.ParameterList) else config.init_std
                init.normal_(parameter, std=std)


class TransformerXLModel(TransformerXLPreTrainedModel):
    """Transformer-XL without a head."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__(config)
        self.word_emb = AdaptiveEmbedding(config)
        self.drop = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(TransformerXLLayer(config) for _ in range(config.n_layer))
        if not config.untie_r:
            self.r_w_bias = nn.Parameter(torch.empty(config.n_head, config.d_head))
            self.r_r_bias = nn.Parameter(torch.empty(config.n_head, config.d_head))
        self.post_init()  # type: ignore[no-untyped-call]

    def get_input_embeddings(self) -> nn.Module:
        """The embedding table; if there are several, the adaptive embedding."""
        tables = self.word_emb.emb_layers
        return tables[0] if len(tables) == 1 else self.word_emb

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace what `get_input_embeddings` returns."""
        if len(self.word_emb.emb_layers) == 1:
            self.word_emb.emb_layers[0] = value
        else:
            self.word_emb = value  # type: ignore[assignment]

    @property
    def rsa_probe_inputs(self) -> dict[str, Any]:
        """A small input for `patch_model`, with as many keys as queries: an empty memory before the text."""
        empty = torch.empty(1, 0, self.config.d_model, dtype=self.dtype, device=self.device)
        tokens = torch.arange(1, device=self.device).expand(1, 4)
        return {"input_ids": tokens, "mems": (empty,) * self.config.n_layer}

    @capture_outputs  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        mems: Sequence[Tensor] | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **_: Any,
    ) -> segments.SegmentOutput:
        """Hidden states of a segment.

        For the arguments, see `rsa_hf.models.segments`; `inputs_embeds` are scaled already. The state is the inputs
        of each layer at the last M ≤ `mem_len` positions, [B, M, d_model].
        """
        config = self.config
        embedded = self.embed(self.word_emb, input_ids, inputs_embeds)
        B, T, d_model = embedded.shape
        if mems is None:
            M = config.mem_len if config.zero_memory else 0
            mems = [embedded.new_zeros(B, M, d_model)] * config.n_layer
        M = mems[0].shape[1]
        segments.require_shapes("mems", mems, [(B, M, d_model)] * config.n_layer)
        visible = visibility(T, M, config.mem_len if config.same_length else None, attention_mask, embedded.device)
        # One distance more than there are keys: see `relative_scores`.
        distances = torch.arange(M + T, -1, -1, device=embedded.device)
        if config.clamp_len > 0:
            distances = distances.clamp(max=config.clamp_len)
        positions = self.drop(sinusoids(distances, d_model).to(embedded.dtype))
        biases = None if config.untie_r else (self.r_w_bias, self.r_r_bias)
        hidden = self.drop(embedded)
        next_mems = []
        for layer, memory in zip(self.layers, mems, strict=True):
            next_mems.append(next_memory(memory, hidden, config.mem_len))
            hidden = layer(hidden, memory, positions, visible, biases)
        use_cache = config.use_cache if use_cache is None else use_cache
        return segments.SegmentOutput(
            last_hidden_state=self.drop(hidden), mems=tuple(next_mems) if use_cache and config.mem_len else None
        )


class TransformerXLForCausalLM(TransformerXLPreTrainedModel, segments.SegmentForCausalLM):
    """Transformer-XL with an adaptive (or, without cutoffs, plain) softmax; its logits are log-probabilities.

    With labels, a model in training mode with cutoffs returns no logits: the adaptive softmax exists to avoid
    computing those of every token.
    """

    def build_head(self, config: TransformerXLConfig) -> None:
        """Create the softmax, and tie its parameters to the embedding's; projections have a setting of their own."""
        self.crit = AdaptiveLogSoftmax(config)
        bands, tied = self.crit.bands, dict[str, str]()
        if config.tie_word_embeddings:
            tied = {f"out_layers.{i}.weight": f"emb_layers.{i}.weight" for i in range(len(bands.tables))}
        if bands.projected:
            shared = [i for i, tie in enumerate(config.projections_tied) if tie]
            tied |= {f"out_projs.{i}": f"emb_projs.{0 if bands.one_table else i}" for i in shared}
        self._tied_weights_keys = {f"crit.{own}": f"transformer.word_emb.{source}" for own, source in tied.items()}

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """The tied parameters, which depend on more than `tie_word_embeddings`."""
        return dict(self._tied_weights_keys)

    def get_output_embeddings(self) -> nn.Module | None:
        """The layer of the softmax; None if there are several."""
        return self.crit.out_layers[0] if len(self.crit.out_layers) == 1 else None

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace what `get_output_embeddings` returns."""
        self.crit.out_layers[0] = new_embeddings

    def predict(
        self, hidden: Tensor, kept: slice | Tensor, labels: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor | None, Tensor | None]:
        """Log-probabilities of the positions `kept`, and the loss of hidden states [B, T, d_model]."""
        predicting, targets, loss = hidden, kwargs.get("shift_labels"), None
        if targets is None and labels is not None:
            predicting, targets = hidden[:, :-1], labels[:, 1:]
        if targets is not None:
            counted = targets != -100
            total = self.crit.negative_log_likelihood(predicting[counted], targets[counted]).sum()
            count = kwargs.get("num_items_in_batch")
            count = counted.sum().clamp(min=1) if count is None else torch.as_tensor(count, device=total.device)
            loss = total / count
            if self.training and self.config.cutoffs:
                return None, loss
        return self.crit(hidden[:, kept]), loss


class TransformerXLForSequenceClassification(TransformerXLPreTrainedModel, segments.SegmentForSequenceClassification):
    """Transformer-XL with a linear classifier on the last token that is not padding."""
