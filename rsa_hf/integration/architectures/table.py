"""Attention modules that do not use transformers' attention interface: where their values, outputs and masks are.

`connect` in `integration/attention.py` wraps one method of each such class, once in a process. An instance gets only
its `rsa` child, so copies, pickles and wrapped or quantised projections work without special code. Some classes have a
method that computes attention from Q, K and V (own_method.py); in others the forward does it all (own_forward.py).
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from rsa_hf.integration.architectures.own_forward import Run, deberta_values, deberta_visible, own_forward
from rsa_hf.integration.architectures.own_method import run_attn, run_gpt2, run_gpt_neo, run_openai_gpt, run_xlnet
from rsa_hf.utils.versions import CACHE


@dataclass(frozen=True)
class Architecture:
    """One class of attention modules.

    `run` takes the module, the original method, its arguments by name, and `mix`. It runs the method, and the result
    of `mix` replaces the output of attention.
    """

    model: str  # the model's folder in `transformers.models`
    name: str  # of the class
    run: Run = field(default=run_attn, repr=False)
    method: str = "_attn"  # the method that is wrapped
    parameters: tuple[str, ...] = ("query", "key", "value", "attention_mask")  # those of the method that `run` reads
    is_always_causal: bool = False  # by a mask of its own, or flash attention's, whatever `config.is_causal` says

    @property
    def path(self) -> str:
        """The full name of the module."""
        return f"transformers.models.{self.model}.modeling_{self.model}"


def _forward(model: str, name: str, heads: str, **options: Any) -> Architecture:
    """A row from the arguments of `own_forward`."""
    parameters = ["hidden_states", "attention_mask", *(options[key] for key in ("cache", "others") if key in options)]
    if options.get("positions"):
        parameters.append("position_ids")
    run, is_flash = own_forward(heads, **options), "Flash" in name
    return Architecture(model, name, run, "forward", tuple(parameters), is_always_causal=is_flash)


_ENCODER_DECODER: dict[str, Any] = {"cache": CACHE, "causal": "is_decoder"}
# BART's and BERT's former attention: one forward for encoders, decoders and cross-attention.
_BART: dict[str, Any] = {
    "heads": "num_heads",
    "projection": "out_proj",
    "others": "key_value_states",
    **_ENCODER_DECODER,
}
_BERT: dict[str, Any] = {"heads": "num_attention_heads", "others": "encoder_hidden_states", **_ENCODER_DECODER}
_DEBERTA: dict[str, Any] = {"heads": "num_attention_heads", "causal": False, "read_mask": deberta_visible}
_DENSE: dict[str, Any] = {"heads": "num_heads", "cache": "layer_past", "projection": "dense"}
_UPCAST: dict[str, Any] = {"run": run_gpt2, "method": "_upcast_and_reordered_attn"}

ARCHITECTURES = (
    _forward("bloom", "BloomAttention", **_DENSE),
    Architecture("codegen", "CodeGenAttention"),  # as GPT-J, through the interface from transformers 5.24 on
    _forward("deberta", "DisentangledSelfAttention", source="in_proj", values=deberta_values, **_DEBERTA),
    _forward("deberta_v2", "DisentangledSelfAttention", source="value_proj", **_DEBERTA),
    Architecture("decision_transformer", "DecisionTransformerGPT2Attention", **_UPCAST),
    _forward("falcon", "FalconAttention", **_DENSE),
    _forward("falcon", "FalconFlashAttention2", positions=True, **_DENSE),
    # GPT-2's attention uses the interface except with `reorder_and_upcast_attn`.
    Architecture("gpt2", "GPT2Attention", **_UPCAST),
    Architecture("gpt_neo", "GPTNeoSelfAttention", run_gpt_neo, is_always_causal=True),
    _forward("gpt_neo", "GPTNeoFlashAttention2", "num_heads", cache="layer_past", projection="out_proj"),
    Architecture("gpt_neox_japanese", "GPTNeoXJapaneseAttention"),
    Architecture("gptj", "GPTJAttention"),
    _forward("gptj", "GPTJFlashAttention2", "num_attention_heads", cache="layer_past", projection="out_proj"),
    _forward("informer", "InformerProbSparseAttention", "num_heads", projection="out_proj", **_ENCODER_DECODER),
    _forward("megatron_bert", "MegatronBertSelfAttention", **_BERT),
    _forward("mpnet", "MPNetSelfAttention", "num_attention_heads", source="v", projection="o", causal=False),
    _forward("mpt", "MptAttention", "n_heads", cache=CACHE, projection="out_proj", read_mask=torch.logical_not),
    _forward("mvp", "MvpAttention", **_BART),
    Architecture(
        "openai", "Attention", run_openai_gpt, parameters=("q", "k", "v", "attention_mask"), is_always_causal=True
    ),
    _forward("rembert", "RemBertSelfAttention", **_BERT),
    _forward("roformer", "RoFormerSelfAttention", **_BERT),
    _forward("trocr", "TrOCRAttention", **_BART),
    _forward("xglm", "XGLMAttention", **_BART),
    Architecture(
        "xlnet",
        "XLNetRelativeAttention",
        run_xlnet,
        method="rel_attn_core",
        parameters=("v_head_h", "k_head_r", "attn_mask"),
    ),
)
