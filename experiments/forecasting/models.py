"""The forecasters: Informer, a LogSparse Transformer and Transformer-XL, plain, with RSA heads, or with P = 0.

A forecaster maps known values [B, C, N] and the time features of known and future steps [B, C + H, F] to a prediction
[B, H, N] of the whole horizon at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2Model, InformerConfig, PreTrainedModel
from transformers.models.informer.modeling_informer import InformerDecoder, InformerEncoder, InformerPreTrainedModel

from experiments.byte_models import small_gpt2
from experiments.variants import NO_RECURRENCE, add_rsa
from rsa_hf.config import RSAConfig
from rsa_hf.models.transformer_xl import TransformerXLConfig, TransformerXLModel
from rsa_hf.ops.read_mask import HIDDEN_AT_OR_BELOW

__all__ = ["FAMILIES", "VARIANTS", "LogSparseModel", "Task", "make_forecaster", "rsa_plan"]

VARIANTS = ("plain", "rsa", NO_RECURRENCE)
FAMILIES = ("informer", "log-sparse", "transformer-xl")
HEADS = 8
DROPOUT = 0.05
KERNEL = 6  # of LogSparse's convolutions
# A bias on attention scores that makes their softmax vanish, but is not read as a mask, which would hide P V too.
NOT_ATTENDED = HIDDEN_AT_OR_BELOW / 2


@dataclass(frozen=True)
class Task:
    """Lengths and widths of a forecaster's input and output.

    Attributes:
        context: number of known steps, C.
        label: number of known steps that an Informer's decoder is given.
        horizon: number of steps to predict, H.
        variables: number of variables, N.
        time_features: number of time features, F.
    """

    context: int
    label: int
    horizon: int
    variables: int
    time_features: int


def rsa_plan(family: str, dilation: int) -> RSAConfig:
    """The paper's plans: k = (0, 2, 2, 0, 2, 2) for Informers and (0, 0, 0, 0, 2, 2) for the others."""
    undilated = 2 if family == "informer" else 0
    return RSAConfig(num_cyclical_pairs=undilated, num_dilated_cyclical_pairs=2, dilation=dilation, gate_init=0.0)


def make_forecaster(
    family: str, variant: str, task: Task, *, width: int, encoder_layers: int, decoder_layers: int, dilation: int
) -> InformerForecaster | CausalForecaster:
    """A forecaster of one of `FAMILIES`, with random weights from torch's random state, the same for all variants.

    An Informer has encoder and decoder layers, the others as many layers as both together. The width must be a
    multiple of 8, the number of heads.
    """
    layers = encoder_layers + decoder_layers
    forecaster: InformerForecaster | CausalForecaster
    if family == "informer":
        forecaster = InformerForecaster(_informer(task, width, encoder_layers, decoder_layers), task)
    elif family == "log-sparse":
        gpt2 = small_gpt2(1, task.context + task.horizon, width, layers, HEADS, DROPOUT)
        forecaster = CausalForecaster(LogSparseModel(gpt2), width, task)
    else:
        forecaster = CausalForecaster(_transformer_xl(width, layers), width, task)
    add_rsa(forecaster.body, variant, None if variant == "plain" else rsa_plan(family, dilation))
    return forecaster


def _informer(task: Task, width: int, encoder_layers: int, decoder_layers: int) -> OneShotInformer:
    both = {"attention_heads": HEADS, "ffn_dim": 4 * width, "layerdrop": 0.0}
    stacks: dict[str, Any] = {f"{stack}_{name}": n for name, n in both.items() for stack in ("encoder", "decoder")}
    config = InformerConfig(
        context_length=task.context,
        prediction_length=task.label + task.horizon,  # the length of the decoder's input
        attention_type="prob",
        sampling_factor=5,
        distil=True,
        d_model=width,
        encoder_layers=encoder_layers,
        decoder_layers=decoder_layers,
        dropout=DROPOUT,
        attention_dropout=DROPOUT,
        activation_dropout=DROPOUT,
        **stacks,
    )
    # transformers derives it from lags, scales and static features, which are not used here.
    config.feature_size = task.variables + task.time_features
    return OneShotInformer(config)


def _transformer_xl(width: int, layers: int) -> TransformerXLModel:
    """Transformer-XL without memory: a window is one segment."""
    vocabulary: dict[str, Any] = {"vocab_size": 1, "cutoffs": [], "div_val": 1}
    memory: dict[str, Any] = {"mem_len": 0, "clamp_len": -1, "same_length": False}
    shape: dict[str, Any] = {"d_model": width, "n_head": HEADS, "d_head": width // HEADS, "d_inner": 4 * width}
    config = TransformerXLConfig(**vocabulary, **memory, **shape, n_layer=layers, dropout=DROPOUT, dropatt=DROPOUT)
    return TransformerXLModel(config)


class OneShotInformer(InformerPreTrainedModel):
    """Encoder and decoder of the Informer, with the original's one-shot prediction (Zhou et al., 2021, section 3.3).

    The decoder is given the last known steps and zeros for the future ones, and its states there are the prediction.
    transformers' `InformerForPrediction` learns a distribution of the next step instead.

    Args:
        config: `feature_size` is the width of the input, `context_length` and `prediction_length` are the input
            lengths of encoder and decoder.
    """

    def __init__(self, config: InformerConfig) -> None:
        super().__init__(config)
        self.encoder = InformerEncoder(config)
        self.decoder = InformerDecoder(config)
        self.post_init()  # type: ignore[no-untyped-call]

    @property
    def rsa_probe_inputs(self) -> dict[str, Any]:
        """A small input for `patch_model`, with different lengths of encoder and decoder."""
        x = torch.zeros(1, 8, self.config.feature_size, device=self.device)
        return {"known": x, "start": x[:, :5]}

    def forward(self, known: Tensor, start: Tensor) -> Tensor:
        """From [B, C, features] and [B, L, features] to the decoder's states [B, L, d_model]."""
        encoded = self.encoder(inputs_embeds=known).last_hidden_state
        decoded = self.decoder(inputs_embeds=start, encoder_hidden_states=encoded, use_cache=False)
        states: Tensor = decoded.last_hidden_state
        return states


class InformerForecaster(nn.Module):
    """A linear layer on the Informer's decoder states."""

    def __init__(self, body: OneShotInformer, task: Task) -> None:
        super().__init__()
        self.body, self.task = body, task
        self.head = nn.Linear(body.config.d_model, task.variables)

    def forward(self, values: Tensor, times: Tensor) -> Tensor:
        """From known values [B, C, N] and times [B, C + H, F] to predictions [B, H, N]."""
        C, H = values.shape[1], times.shape[1] - values.shape[1]
        first = C - self.task.label
        known = torch.cat([values, times[:, :C]], dim=-1)
        start = torch.cat([nn.functional.pad(values[:, first:], (0, 0, 0, H)), times[:, first:]], dim=-1)
        prediction: Tensor = self.head(self.body(known, start)[:, -H:])
        return prediction


class CausalForecaster(nn.Module):
    """Linear layers before and after a causal Transformer, whose input is the known steps followed by zeros."""

    def __init__(self, body: PreTrainedModel, width: int, task: Task) -> None:
        super().__init__()
        self.body = body
        self.embed = nn.Linear(task.variables + task.time_features, width)
        self.head = nn.Linear(width, task.variables)

    def forward(self, values: Tensor, times: Tensor) -> Tensor:
        """From known values [B, C, N] and times [B, C + H, F] to predictions [B, H, N]."""
        H = times.shape[1] - values.shape[1]
        sequence = torch.cat([nn.functional.pad(values, (0, 0, 0, H)), times], dim=-1)
        states = self.body(inputs_embeds=self.embed(sequence)).last_hidden_state
        prediction: Tensor = self.head(states[:, -H:])
        return prediction


class LogSparseModel(GPT2Model):
    """GPT-2 without a head, with attention in the style of LogSparse (Li et al., 2019).

    Position t attends to itself and to t − 1, t − 2, t − 4, t − 8, …; queries and keys are causal convolutions over
    the last positions. The recurrence of RSA heads is not sparse: it sees the whole past.

    Args:
        config: of GPT-2; `n_positions` is the longest sequence.
    """

    lag_bias: Tensor

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        for block in self.h:
            attention = block.get_submodule("attn")
            attention.c_attn = ConvolvedProjection(config.n_embd)
        position = torch.arange(config.n_positions)
        lag = position[:, None] - position
        attended = (lag >= 0) & (lag & (lag - 1) == 0)  # 0 and the powers of two
        bias = torch.where(attended, 0.0, NOT_ATTENDED).masked_fill(lag < 0, torch.finfo(torch.float32).min)
        self.register_buffer("lag_bias", bias[None, None], persistent=False)

    def forward(self, *args: Any, inputs_embeds: Tensor | None = None, **keywords: Any) -> Any:
        """As `GPT2Model.forward`, without cache and mask."""
        T = (keywords["input_ids"] if inputs_embeds is None else inputs_embeds).shape[1]
        keywords |= {"attention_mask": self.lag_bias[:, :, :T, :T], "use_cache": False}
        return super().forward(*args, inputs_embeds=inputs_embeds, **keywords)


class ConvolvedProjection(nn.Module):
    """Queries and keys as causal convolutions, values as a linear map."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(width, 2 * width, KERNEL)
        self.value = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """From [B, T, width] to queries, keys and values, [B, T, 3 · width]."""
        padded = nn.functional.pad(hidden.transpose(1, 2), (KERNEL - 1, 0))
        return torch.cat([self.convolution(padded).transpose(1, 2), self.value(hidden)], dim=-1)
