"""The variants of a model that experiments compare.

* `plain`: the model as it is.
* `two free lags`: `RSAConfig.from_scratch`.
* `paper's form`: the same without free lags: all heads in cyclical pairs of the paper's REMs.
* `rsa`: the paper's form, with gates and rates that learn 20 times as fast as the weights, as with `RSAConfig()`.
* `no recurrence`: `rsa` with P = 0, so that gates only damp attention.
* `short convolution`: learned weights for the last four tokens instead of a REM; `token shift`: for the last one;
  `learned toeplitz`: for all. They learn as fast as the weights, and their gates 20 times as fast.

And positions, with or without RSA:

* `linear biases`: ALiBi (Press et al., 2022) instead of the model's own positions.
* `rotary`, `sinusoidal`: these positions instead of GPT-2's learned ones.
* `two free lags without positions`: RSA instead of positions.

Some replace the RSA heads (`forms.py`): rows are not padded, and there is no cache.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedModel

from experiments.forms import FormHeads
from rsa_hf import RSAConfig, RSAHeads, patch_model

DEFAULT, PAPER, NO_RECURRENCE = "two free lags", "paper's form", "no recurrence"
CONVOLUTION, SHIFT, TOEPLITZ = "short convolution", "token shift", "learned toeplitz"
LINEAR_BIASES, ROTARY, SINUSOIDAL, UNPLACED = "linear biases", "rotary", "sinusoidal", f"{DEFAULT} without positions"
LAGS = {TOEPLITZ: None, CONVOLUTION: 4, SHIFT: 1}  # number of learned lags; None: all
VARIANTS = ("plain", DEFAULT, PAPER, "rsa", NO_RECURRENCE, *LAGS, LINEAR_BIASES, UNPLACED)
OF_GPT2 = (ROTARY, SINUSOIDAL)


def patched_modules(model: nn.Module) -> Iterator[tuple[nn.Module, RSAHeads]]:
    """The patched modules with their RSA heads."""
    for module in list(model.modules()):
        if isinstance(heads := getattr(module, "rsa", None), RSAHeads):
            yield module, heads


def add_rsa(model: PreTrainedModel, variant: str, config: RSAConfig | None) -> None:
    """Patch a model in place, with P = 0 if the variant is `no recurrence`; leave it as it is without a config."""
    if config is not None:
        patch_model(model, config)
    if variant == NO_RECURRENCE:
        for module, heads in patched_modules(model):
            module.rsa = FormHeads(heads, "nothing")


def variant_config(variant: str, num_heads: int) -> RSAConfig | None:
    """The config of a variant of a model with H heads a layer; None for those without RSA heads."""
    if variant in ("plain", LINEAR_BIASES, *OF_GPT2):
        return None
    default = RSAConfig.from_scratch(num_heads)
    paper = replace(default, num_free_lags=0)
    return {DEFAULT: default, UNPLACED: default, PAPER: paper}.get(variant, replace(paper, parameter_scale=20.0))


def make_variant(variant: str, model: PreTrainedModel, longest: int) -> nn.Module:
    """Turn a plain model into one of `VARIANTS`, or a GPT-2 into one of `OF_GPT2`; in place, but for `rotary`.

    `linear biases` and `two free lags without positions` are for a GPT-2 or a Llama. No input is longer than `longest`
    tokens.
    """
    if variant == ROTARY:
        return rotary_gpt2(model)
    if variant == SINUSOIDAL:
        return set_positions(model, sinusoids(longest, model.config.n_embd))
    if variant in (LINEAR_BIASES, UNPLACED):
        remove_positions(model)
    if variant == LINEAR_BIASES:
        return ALiBi(model, longest)
    add_rsa(model, variant, variant_config(variant, model.config.num_attention_heads))
    for module, heads in patched_modules(model):
        if variant in LAGS:
            module.rsa = FormHeads(heads, "kernel", LAGS[variant] or longest - 1)
    return model


class ALiBi(nn.Module):
    """A causal model with a bias −slope · τ on its attention scores, one slope per head, as a 4-D mask."""

    bias: Tensor

    def __init__(self, model: PreTrainedModel, longest: int) -> None:
        super().__init__()
        self.model = model
        H = model.config.num_attention_heads
        slopes = torch.tensor([2.0 ** (-8 * (h + 1) / H) for h in range(H)])
        position = torch.arange(longest)
        lag = position[:, None] - position
        bias = (-slopes[:, None, None] * lag).masked_fill(lag < 0, torch.finfo(torch.float32).min)
        self.register_buffer("bias", bias[None], persistent=False)

    def forward(self, input_ids: Tensor, **keywords: Any) -> Any:
        """The output of the model."""
        T = input_ids.shape[1]
        return self.model(input_ids, attention_mask=self.bias[:, :, :T, :T], **keywords)


def rotary_gpt2(model: PreTrainedModel) -> PreTrainedModel:
    """A GPT-2 with rotary positions and new weights: a GPT-NeoX of the same sizes, its layers one after another."""
    config: Any = model.config
    sizes: dict[str, Any] = {"rotary_pct": 1.0, "use_parallel_residual": False, "tie_word_embeddings": True}
    sizes |= {"vocab_size": config.vocab_size, "hidden_size": config.n_embd, "intermediate_size": 4 * config.n_embd}
    sizes |= {"num_hidden_layers": config.n_layer, "num_attention_heads": config.n_head}
    sizes |= {"max_position_embeddings": config.n_positions, "hidden_act": config.activation_function}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, bos_token_id=None, eos_token_id=None))


def remove_positions(model: Any) -> None:
    """Make a GPT-2 or a Llama blind to positions, but for its causal mask."""
    if model.config.model_type == "gpt2":
        set_positions(model, torch.zeros(()))
    else:
        model.model.rotary_emb.inv_freq.zero_()  # all angles are 0


def set_positions(model: Any, values: Tensor) -> nn.Module:
    """Fix the position embeddings of a GPT-2."""
    positions = model.transformer.wpe.weight.requires_grad_(False)
    positions.copy_(values.expand_as(positions))
    fixed: nn.Module = model
    return fixed


def sinusoids(longest: int, width: int) -> Tensor:
    """Sinusoidal positions [T, D] (Vaswani et al., 2017, section 3.5), as large as GPT-2's first embeddings."""
    angles = torch.arange(longest)[:, None] / 10_000 ** (torch.arange(0, width, 2) / width)
    return 0.02 * math.sqrt(2) * torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
