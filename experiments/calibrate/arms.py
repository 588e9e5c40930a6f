"""The variants of a calibrated model: what `calibrate` has chosen, and rivals that take it apart.

* `plain`: the model as it is.
* `calibrated`: the plan that `calibrate` returns.
* `token bias`: the logits shifted by how much more often a token occurs in the rows to calibrate on than the model
  expects; `calibrated with token bias`: that of the calibrated model.
* `byte trigrams`: counts of three bytes in the text that a model of bytes was pretrained on, in place of the model.
* `no recurrence`: the calibrated heads and gates with P = 0.
* `scaled heads`: the calibrated heads, each multiplied by a learned factor in place of a REM.
* `all heads scaled`: every head of the model multiplied by a learned factor.
* `smallest lora`: PEFT's LoRA of rank 1, on the modules that PEFT chooses.
* `lora on the rows`: the same, trained on the rows to calibrate on alone; `ia3 on the rows`: PEFT's IA³ (Liu et al.,
  2022), a factor for each channel of keys and values, and inside the feed-forward layers; `factors on the rows`:
  for each head of a Llama a factor for its scores, a temperature, and one for its output.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from experiments.forms import FormHeads
from experiments.variants import NO_RECURRENCE, patched_modules
from rsa_hf import HeadConfig, RSAConfig, RSAHeads, patch_model

PLAIN, CALIBRATED, LORA = "plain", "calibrated", "smallest lora"
SCALED, ALL_SCALED = "scaled heads", "all heads scaled"
TOKEN_BIAS, CALIBRATED_BIAS = "token bias", "calibrated with token bias"
TRIGRAMS = "byte trigrams"
ADAPTERS_ON_ROWS = LORA_ON_ROWS, IA3_ON_ROWS = "lora on the rows", "ia3 on the rows"
FACTORS_ON_ROWS = "factors on the rows"
ON_THE_ROWS = *ADAPTERS_ON_ROWS, FACTORS_ON_ROWS


def make_variant(variant: str, model: PreTrainedModel, plan: RSAConfig) -> Any:
    """Turn a plain model into what a variant is before training, in place."""
    if variant == FACTORS_ON_ROWS:
        heads = model.config.num_attention_heads
        for layer in model.requires_grad_(False).model.layers:
            before, after = layer.self_attn.q_proj, layer.self_attn.o_proj
            before.factor, after.factor = (nn.Parameter(torch.zeros(heads)) for _ in range(2))
            before.register_forward_hook(lambda projection, _, queries: _scaled(queries, projection.factor))
            after.register_forward_pre_hook(lambda projection, args: _scaled(args[0], projection.factor))
        return model
    if variant in (LORA, *ON_THE_ROWS):
        config = peft.IA3Config() if variant == IA3_ON_ROWS else peft.LoraConfig(r=1, lora_alpha=1)
        return peft.get_peft_model(model, config)
    if variant == ALL_SCALED:
        places = range(model.config.num_hidden_layers), range(model.config.num_attention_heads)
        plan = RSAConfig(heads=tuple(HeadConfig(i, j, "regular", 0.5, 0.0) for i in places[0] for j in places[1]))
    if variant in (PLAIN, TOKEN_BIAS, TRIGRAMS) or plan.heads == ():
        return model
    patch_model(model, plan)
    for module, heads in patched_modules(model):
        if variant == NO_RECURRENCE:
            module.rsa = FormHeads(heads, "nothing")
        elif variant in (SCALED, ALL_SCALED):
            module.rsa = ScaledHeads(heads)
    return model


def _scaled(values: Tensor, factors: Tensor) -> Tensor:
    """Queries or outputs of heads, [B, T, H · D], times one factor for each head, given as its difference from 1."""
    return ((1 + factors).repeat_interleave(values.shape[-1] // len(factors)) * values).to(values.dtype)


@torch.no_grad()
def add_token_bias(model: PreTrainedModel, batches: Iterable[Mapping[str, Tensor]]) -> None:
    """Add to the logits of each token log((n + 1) / (p + 1)), with its count n in some rows and the model's sum p."""
    counts, expected = torch.ones(2, model.config.vocab_size, dtype=torch.float64, device=model.device)
    for batch in batches:
        ids = batch["input_ids"].to(model.device)
        counts += ids[:, 1:].flatten().bincount(minlength=len(counts))
        expected += model(input_ids=ids).logits[:, :-1].float().softmax(-1).sum((0, 1))
    bias = (counts / expected).log()
    head: nn.Module = model.get_output_embeddings()
    head.register_forward_hook(lambda _, inputs, logits: logits + bias.to(logits))


class ScaledHeads(RSAHeads):
    """The heads of RSA heads without their REMs: attention multiplied by a learned factor each, which starts at 1."""

    def __init__(self, heads: RSAHeads) -> None:
        super().__init__(heads.spec)
        self.requires_grad_(False)
        self.factor = nn.Parameter(torch.zeros(len(heads.spec.layout.rows)))

    def forward(self, attention: Tensor, *value_and_mask: Any) -> Tensor:
        """Attention [B, T, H, D] with some of its heads scaled."""
        factors = self.factor.new_ones(attention.shape[2])
        factors[list(self.spec.layout.heads)] += self.factor * self.spec.layout.scale
        return (factors[:, None] * attention).to(attention.dtype)
