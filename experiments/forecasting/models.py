"""The forecasters: Informer and PatchTST, plain, with RSA heads, or with P = 0; and DLinear.

A forecaster maps known values [B, C, N] and the time features of known and future steps [B, C + H, F] to a prediction
[B, H, N] of the whole horizon at once.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import InformerConfig, PatchTSTConfig, PatchTSTForPrediction
from transformers.models.informer.modeling_informer import InformerDecoder, InformerEncoder, InformerPreTrainedModel

from experiments.variants import NO_RECURRENCE, add_rsa
from rsa_hf import RSAConfig

VARIANTS = ("plain", "rsa", NO_RECURRENCE)
FAMILIES = ("informer", "patchtst", "dlinear")
HEADS = 8
DROPOUT = 0.05
STRIDE = 4  # steps between the patches of PatchTST, which are twice as long
AVERAGED = 25  # steps of DLinear's moving average


@dataclass(frozen=True)
class Task:
    """Lengths and widths of a forecaster's input and output."""

    context: int  # known steps, C
    label: int  # known steps that an Informer's decoder is given
    horizon: int  # steps to predict, H
    variables: int  # N
    time_features: int  # F


def make_forecaster(
    family: str, variant: str, task: Task, *, width: int, encoder_layers: int, decoder_layers: int, dilation: int
) -> nn.Module:
    """A forecaster of one of `FAMILIES`, with random weights from torch's random state, the same for all variants.

    An Informer has encoder and decoder layers, PatchTST as many layers as both together. DLinear has no variants.
    """
    if family == "dlinear":
        return DLinear(task)
    if family == "informer":
        forecaster: Any = InformerForecaster(_informer(task, width, encoder_layers, decoder_layers), task)
    else:
        forecaster = PatchForecaster(task, width, encoder_layers + decoder_layers)
        dilation //= STRIDE  # from steps to patches
    # The paper's plans: k = (0, 2, 2, 0, 2, 2) for Informers and (0, 0, 0, 0, 2, 2) for a patched Transformer.
    undilated = 2 if family == "informer" else 0
    plan = RSAConfig(num_cyclical_pairs=undilated, num_dilated_cyclical_pairs=2, dilation=dilation, gate_init=0.0)
    add_rsa(forecaster.body, variant, None if variant == "plain" else plan)
    made: nn.Module = forecaster
    return made


def _informer(task: Task, width: int, encoder_layers: int, decoder_layers: int) -> "OneShotInformer":
    both = {"attention_heads": HEADS, "ffn_dim": 4 * width, "layerdrop": 0.0}
    stacks: dict[str, Any] = {f"{stack}_{name}": n for name, n in both.items() for stack in ("encoder", "decoder")}
    stacks |= dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), DROPOUT)
    stacks |= {"d_model": width, "encoder_layers": encoder_layers, "decoder_layers": decoder_layers}
    stacks |= {"attention_type": "prob", "sampling_factor": 5, "distil": True}
    config = InformerConfig(context_length=task.context, prediction_length=task.label + task.horizon, **stacks)
    # transformers derives it from lags, scales and static features, which are not used here.
    config.feature_size = task.variables + task.time_features
    return OneShotInformer(config)


class OneShotInformer(InformerPreTrainedModel):
    """Encoder and decoder of the Informer, with the original's one-shot prediction (Zhou et al., 2021, section 3.3).

    transformers' `InformerForPrediction` learns a distribution of the next step instead.
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
    """A linear layer on the states of the Informer's decoder, which is given the last known steps and then zeros."""

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


class PatchForecaster(nn.Module):
    """PatchTST (Nie et al., 2023): each variable by itself, in patches that overlap; it reads no time features."""

    def __init__(self, task: Task, width: int, layers: int) -> None:
        super().__init__()
        sizes = {"context_length": task.context, "prediction_length": task.horizon, "d_model": width}
        sizes |= {"num_input_channels": task.variables, "num_hidden_layers": layers, "num_attention_heads": HEADS}
        dropouts = dict.fromkeys(("attention_dropout", "ff_dropout", "head_dropout"), DROPOUT)
        patches = {"patch_length": 2 * STRIDE, "patch_stride": STRIDE, "ffn_dim": 4 * width}
        self.body: Any = PatchTSTForPrediction(PatchTSTConfig(**sizes, **dropouts, **patches))  # type: ignore[arg-type]
        base: Any = self.body.base_model  # a small input for `patch_model`
        base.rsa_probe_inputs = {"past_values": torch.zeros(1, task.context, task.variables)}

    def forward(self, values: Tensor, times: Tensor) -> Tensor:
        """From known values [B, C, N] to predictions [B, H, N]; times are not read."""
        prediction: Tensor = self.body(past_values=values).prediction_outputs
        return prediction


class DLinear(nn.Module):
    """Two linear maps over time, of a moving average and of what is left (Zeng et al., 2023); no attention."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.trend, self.rest = (nn.Linear(task.context, task.horizon) for _ in range(2))

    def forward(self, values: Tensor, times: Tensor) -> Tensor:
        """From known values [B, C, N] to predictions [B, H, N]; times are not read."""
        series = values.transpose(1, 2)
        trend = nn.functional.avg_pool1d(nn.functional.pad(series, (AVERAGED // 2,) * 2, "replicate"), AVERAGED, 1)
        prediction: Tensor = self.trend(trend) + self.rest(series - trend)
        return prediction.transpose(1, 2)
