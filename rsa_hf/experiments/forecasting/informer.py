"""The Informer (Zhou et al., 2021) of transformers, with its paper's way to predict: all of the horizon at once.

transformers' own `InformerForPrediction` learns a distribution of the next step from future values that it is shown.
Here the decoder is given the last known steps and zeros for those to come (generative-style decoder, section 3.3), and
what it makes of the zeros is the prediction.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import InformerConfig
from transformers.models.informer.modeling_informer import InformerDecoder, InformerEncoder, InformerPreTrainedModel

__all__ = ["InformerForecaster", "OneShotInformer"]


class OneShotInformer(InformerPreTrainedModel):
    """Encoder and decoder.

    Args:
        config: its `feature_size` is the width of the input, `context_length` and `prediction_length` the lengths of
            the encoder's and of the decoder's.
    """

    def __init__(self, config: InformerConfig) -> None:
        super().__init__(config)
        self.encoder = InformerEncoder(config)
        self.decoder = InformerDecoder(config)
        self.post_init()  # type: ignore[no-untyped-call]

    @property
    def rsa_probe_inputs(self) -> dict[str, Any]:
        """A small input for `patch_model`, of two lengths."""
        x = torch.zeros(1, 8, self.config.feature_size, device=self.device)
        return {"known": x, "start": x[:, :5]}

    def forward(self, known: Tensor, start: Tensor) -> Tensor:
        """From [B, C, features] and [B, L, features] to the decoder's states [B, L, d_model]."""
        encoded = self.encoder(inputs_embeds=known).last_hidden_state
        decoded = self.decoder(inputs_embeds=start, encoder_hidden_states=encoded, use_cache=False)
        states: Tensor = decoded.last_hidden_state
        return states


class InformerForecaster(nn.Module):
    """A linear layer on the decoder's states.

    Args:
        body: encoder and decoder.
        variables: N.
        label: known steps that the decoder is given.
    """

    def __init__(self, body: OneShotInformer, variables: int, label: int) -> None:
        super().__init__()
        self.body = body
        self.label = label
        self.head = nn.Linear(body.config.d_model, variables)

    def forward(self, values: Tensor, times: Tensor) -> Tensor:
        """From known values [B, C, N] and times [B, C + H, F] to predictions [B, H, N]."""
        C, H = values.shape[1], times.shape[1] - values.shape[1]
        known = torch.cat([values, times[:, :C]], dim=-1)
        given = nn.functional.pad(values[:, C - self.label :], (0, 0, 0, H))
        start = torch.cat([given, times[:, C - self.label :]], dim=-1)
        prediction: Tensor = self.head(self.body(known, start)[:, -H:])
        return prediction
