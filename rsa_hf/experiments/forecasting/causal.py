"""Predict with a causal Transformer: the known steps and, as zeros, those to come are one sequence."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

__all__ = ["CausalForecaster"]


class CausalForecaster(nn.Module):
    """Linear layers before and behind a causal Transformer.

    Args:
        body: takes `inputs_embeds` [B, T, width], returns `last_hidden_state` of that shape.
        width: of the body.
        variables: N.
        time_features: F.
    """

    def __init__(self, body: PreTrainedModel, width: int, variables: int, time_features: int) -> None:
        super().__init__()
        self.body = body
        self.embed = nn.Linear(variables + time_features, width)
        self.head = nn.Linear(width, variables)

    def forward(self, values: Tensor, times: Tensor) -> Tensor:
        """From known values [B, C, N] and times [B, C + H, F] to predictions [B, H, N]."""
        H = times.shape[1] - values.shape[1]
        sequence = torch.cat([nn.functional.pad(values, (0, 0, 0, H)), times], dim=-1)
        states = self.body(inputs_embeds=self.embed(sequence)).last_hidden_state
        prediction: Tensor = self.head(states[:, -H:])
        return prediction
