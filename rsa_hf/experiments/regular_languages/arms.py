"""The networks that are compared: a small GPT-2 with and without RSA heads, and recurrent networks.

GPT-2's position embeddings are zeros here (Kazemnejad et al., 2023, The impact of positional encoding on length
generalization in Transformers): learned ones end with the longest string trained on. The causal mask and a token at
the beginning let it count. Position ids that are all 0 would not do, since they say that every token begins a text
of its own, packed into one row. The sinusoidal arms have the embeddings of Vaswani et al. (2017), which have no end.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2Model

from rsa_hf.config import RSAConfig
from rsa_hf.models.recurrent import RecurrentConfig, RecurrentModel
from rsa_hf.patching import patch_model

__all__ = ["ARMS", "CELLS", "StepPredictor", "make_arm", "rsa_plan"]

HEADS = 8
LONGEST = 151
TRANSFORMERS = ("rsa", "transformer", "rsa-sinusoidal", "transformer-sinusoidal")
CELLS = {"lstm": "lstm", "gru": "gru", "linear-rnn": "linear"}
ARMS = (*TRANSFORMERS, *CELLS)


def rsa_plan() -> RSAConfig:
    """Half of the heads: a slow and an alternating one (λ > 0, λ < 0), and a cyclical pair; the gate begins at ½."""
    return RSAConfig(num_regular=2, num_cyclical_pairs=1, gate_init=0.0)


class StepPredictor(nn.Module):
    """A causal network with a linear layer that says of each character whether it may come next.

    Args:
        body: from tokens [B, T] to an output with `last_hidden_state` [B, T, n].
        hidden_size: n.
        num_targets: K, the characters and the end.
    """

    def __init__(self, body: nn.Module, hidden_size: int, num_targets: int) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(hidden_size, num_targets)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, T, K] behind each of the tokens [B, T]."""
        logits: Tensor = self.head(self.body(tokens, use_cache=False).last_hidden_state)
        return logits


def make_arm(arm: str, num_characters: int, width: int, layers: int) -> StepPredictor:
    """A fresh network; the weights come from torch's random state.

    Args:
        arm: one of `ARMS`.
        num_characters: K − 1. A token for the beginning comes on top, and a target for the end.
        width: n, of all arms; a multiple of 8, the number of attention heads.
        layers: of all arms.

    Raises:
        ValueError: there is no such arm.
    """
    if arm not in ARMS:
        raise ValueError(f"arm={arm!r}: one of {', '.join(ARMS)} is needed.")
    size = num_characters + 1
    if arm in CELLS:
        config = RecurrentConfig(
            vocab_size=size, cell=CELLS[arm], hidden_size=width, num_hidden_layers=layers, dropout=0.0
        )
        return StepPredictor(RecurrentModel(config), width, size)
    body = GPT2Model(
        GPT2Config(
            vocab_size=size,
            n_positions=LONGEST,
            n_embd=width,
            n_layer=layers,
            n_head=HEADS,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    with torch.no_grad():
        body.wpe.weight.copy_(_sinusoids(width) if arm.endswith("-sinusoidal") else torch.zeros(LONGEST, width))
    body.wpe.weight.requires_grad_(False)
    predictor = StepPredictor(body, width, size)
    if arm.startswith("rsa"):
        patch_model(body, rsa_plan())
    return predictor


def _sinusoids(width: int) -> Tensor:
    """The embeddings of Vaswani et al. (2017), section 3.5: [LONGEST, width]."""
    pace = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    angle = torch.arange(LONGEST)[:, None] * pace
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)
