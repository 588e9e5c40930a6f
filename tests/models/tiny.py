"""Tiny models that carry a state from segment to segment, and how texts are cut into segments."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from families import FULL_PLAN
from rsa_hf import RSAConfig, patch_model

VOCAB, WINDOW, CHUNK = 29, 5, 5
_SHARED = {"vocab_size": VOCAB, "pad_token_id": 0, "eos_token_id": 2, "dropout": 0.0}
_NARROW = {"d_model": 32, "n_head": 8, "d_head": 4, "d_inner": 48}
# Initial weights are large, so that attention is far from uniform.
TINY = {
    "transfo-xl": {
        **_NARROW, "cutoffs": [], "div_val": 1, "n_layer": 2, "mem_len": 40, "clamp_len": -1, "same_length": False,
        "init_std": 0.2, "proj_init_std": 0.2,
    },
    "block-recurrent": {
        **_NARROW, "n_layer": 3, "window_size": WINDOW, "recurrent_layers": [-2], "num_state_vectors": 3,
        # So small that classes of several distances lie within two windows.
        "relative_attention_num_buckets": 4, "relative_attention_max_distance": 6, "dropatt": 0.0,
    },
    "sru_plus_plus": {
        "hidden_size": 12, "projection_size": 16, "num_hidden_layers": 2, "num_attention_heads": 8, "mem_len": 40,
        "attention_dropout": 0.0,
    },
    "temporal_latent_bottleneck": {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 8, "intermediate_size": 48,
        "chunk_size": CHUNK, "num_states": 3, "cross_attention_every": 2, "initializer_range": 0.2,
    },
    "recurrent": {"hidden_size": 12, "num_hidden_layers": 2, "dilations": [1, 3], "initializer_range": 1.0},
}  # fmt: skip
WITH_ATTENTION = [name for name in TINY if name != "recurrent"]


def config(name, **changes):
    return AutoConfig.for_model(name, **{**_SHARED, **TINY[name], **changes})


def build(name, attention="sdpa", rsa=None, auto=AutoModelForCausalLM, **changes):
    """A model, by default a language model; `rsa`: settings of RSAConfig beyond the full plan, {} for none."""
    options = {"attn_implementation": attention} if name in WITH_ATTENTION else {}
    model = auto.from_config(config(name, **changes), **options).eval()
    if name == "sru_plus_plus":
        _put_attention_to_work(model)
    return model if rsa is None else patch_model(model, RSAConfig(**{**FULL_PLAN, **rsa}))


@torch.no_grad()
def _put_attention_to_work(model):
    """In SRU++ it starts with α = 0."""
    for name, parameter in model.named_parameters():
        if name.endswith("alpha"):
            parameter.fill_(1.5)
        elif "bias" in name or "layer_norm" in name:
            parameter.add_(torch.randn(parameter.shape) * 0.3)
        elif parameter.dim() == 2:
            parameter.mul_(2.0)


def text(batch=2, length=24):
    return torch.randint(3, VOCAB, (batch, length))


def run_segments(model, tokens, lengths, **inputs):
    """Logits of a text, segment by segment, each behind the state of those before; and the last state."""
    logits, state = [], None
    for segment in tokens.split(lengths, dim=1):
        out = model(segment, **{model.segment_state: state}, **inputs)
        logits.append(out.logits)
        state = out.get(model.segment_state)
    return torch.cat(logits, dim=1), state


def in_segments(model, tokens, lengths, **inputs):
    return run_segments(model, tokens, lengths, **inputs)[0]


def patched_modules(model):
    """The modules that have RSA heads."""
    return [module for module in model.modules() if hasattr(module, "rsa")]


def values_and_gradients(model, output, **inputs):
    """An output, and the gradients of its product with a fixed weight: of the parameters, and of inputs by name."""
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    model.zero_grad()
    for tensor in inputs.values():
        tensor.grad = None
    (output * weight).sum().backward()
    tensors = {**dict(model.named_parameters()), **inputs}
    return {"output": output.detach(), **{name: t.grad.clone() for name, t in tensors.items() if t.grad is not None}}
