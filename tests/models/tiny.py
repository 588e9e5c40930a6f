"""Tiny models that carry a state from segment to segment, texts in segments, and attention written as loops."""

import math

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from families import FULL_PLAN
from references import equation_4
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
        # So small that buckets of several distances lie within two windows.
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
BANDS = {"cutoffs": [9, 14, 20], "div_val": 2}
# Other settings of the models, as "name:setting".
SETTINGS = {
    "transfo-xl:window": {**BANDS, "mem_len": 7, "same_length": True},
    "transfo-xl:zeros": {"mem_len": 7, "same_length": True, "zero_memory": True},
    "block-recurrent:two": {"n_layer": 4, "recurrent_layers": [1, 2]},
    **{f"recurrent:{cell}": {"cell": cell, "dilations": [2, 5]} for cell in ("rnn", "gru", "linear")},
}


def config(name, **changes):
    model_type = name.partition(":")[0]
    fields = {**_SHARED, **TINY.get(model_type, {}), **SETTINGS.get(name, {}), **changes}
    return AutoConfig.for_model(model_type, **fields)


def build(name, attention="sdpa", rsa=None, auto=AutoModelForCausalLM, **changes):
    """A tiny model, patched with the full plan and the settings in `rsa`; None leaves it plain."""
    options = {} if name.startswith("recurrent") else {"attn_implementation": attention}
    model = auto.from_config(config(name, **changes), **options).eval()
    if name == "sru_plus_plus":
        _put_attention_to_work(model)
    return model if rsa is None else patch_model(model, RSAConfig(**{**FULL_PLAN, **rsa}))


@torch.no_grad()
def _put_attention_to_work(model):
    """Attention in SRU++ starts with α = 0, which would hide it."""
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
    """The logits of a text that is read segment by segment with carried state, and the last state."""
    logits, state = [], None
    for segment in tokens.split(lengths, dim=1):
        out = model(segment, **{model.segment_state: state}, **inputs)
        logits.append(out.logits)
        state = out.get(model.segment_state)
    return torch.cat(logits, dim=1), state


def in_segments(model, tokens, lengths, **inputs):
    return run_segments(model, tokens, lengths, **inputs)[0]


def difference(a, b):
    return float((a - b).detach().abs().max())


def values_and_gradients(model, output, **inputs):
    """The output, and the gradients of its product with a fixed weight, for parameters and for inputs by name."""
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    model.zero_grad()
    for tensor in inputs.values():
        tensor.grad = None
    (output * weight).sum().backward()
    tensors = {**dict(model.named_parameters()), **inputs}
    return {"output": output.detach(), **{name: t.grad.clone() for name, t in tensors.items() if t.grad is not None}}


def attention_by_hand(module, query, key, value, sees=None, bias=None):
    """Attention for one row as a loop over queries, with RSA heads by dense P if the module has any.

    Args:
        module: the attention module, or None.
        query: [T, H, D].
        key: [S, H, D].
        value: [S, H, D].
        sees: maps a query's index to the indices of the keys that it sees; "all" for all keys, None for causal.
        bias: maps a query's and a key's index to the bias of their scores, [H].

    Returns:
        The heads side by side, [T, H · D].
    """
    T, S, D = len(query), len(key), query.shape[-1]
    sees = {None: lambda t: range(S - T + t + 1), "all": lambda t: range(S)}.get(sees, sees)
    visible, rows = torch.zeros(1, 1, T, S), []
    for t in range(T):
        scores = [(query[t] * key[s]).sum(-1) / math.sqrt(D) + (bias(t, s) if bias else 0) for s in sees(t)]
        weights = torch.stack(scores, -1).softmax(-1)
        rows.append(sum(weights[:, i, None] * value[s] for i, s in enumerate(sees(t))))
        visible[..., t, sees(t)] = 1
    output = torch.stack(rows)
    if hasattr(module, "rsa"):
        output = equation_4(module.rsa, output[None], value.transpose(0, 1)[None], visible=visible.bool())[0]
    return output.flatten(1)
