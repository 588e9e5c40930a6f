"""The kernels of flash_attn on the CPU, to run transformers' own flash attention code.

They follow the documentation of flash_attn 2: queries are the last of the keys (bottom-right alignment), a window
counts from the diagonal and includes both ends, causal attention sees nothing ahead, and a query without keys gives
zeros. Unpadding, packed documents and windows are transformers' code.
"""

import sys
import types

import torch
import torch.nn.functional as F
from transformers import modeling_flash_attention_utils as flash_utils


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, deterministic=False
):
    """Attention of q [B, T, H, D] to k, v [B, S, Hkv, D]; returns [B, T, H, D]."""
    assert not softcap
    T, S = q.shape[1], k.shape[1]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    ahead = torch.arange(S)[None, :] - (S - T + torch.arange(T))[:, None]
    left, right = window_size
    right = 0 if causal else right
    hidden = torch.zeros(T, S, dtype=torch.bool)
    if left >= 0:
        hidden |= ahead < -left
    if right >= 0:
        hidden |= ahead > right
    out = F.scaled_dot_product_attention(q, k, v, ~hidden, dropout_p, scale=softmax_scale, enable_gqa=True)
    return out.masked_fill(hidden.all(-1)[:, None], 0.0).transpose(1, 2)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, deterministic=False,
):  # fmt: skip
    """The same for packed sequences: q [ΣT, H, D], k, v [ΣS, Hkv, D], and their cumulative lengths."""
    lengths_q, lengths_k = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    assert (sum(lengths_q), sum(lengths_k)) == (len(q), len(k))
    assert (max(lengths_q), max(lengths_k)) == (int(max_seqlen_q), int(max_seqlen_k))
    parts = zip(q[None].split(lengths_q, 1), k[None].split(lengths_k, 1), v[None].split(lengths_k, 1), strict=True)
    options = (dropout_p, softmax_scale, causal, window_size, softcap)
    return torch.cat([flash_attn_func(*part, *options) for part in parts], 1)[0]


def install(monkeypatch) -> None:
    """Make transformers use these functions for the package flash_attn, on the CPU."""
    package, padding = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.bert_padding")
    package.flash_attn_func, package.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    package.flash_attn_with_kvcache = None
    padding.pad_input, padding.unpad_input = flash_utils._pad_input, flash_utils._unpad_input
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.bert_padding", padding)
    monkeypatch.setattr(flash_utils, "is_flash_attn_2_available", lambda *_, **__: True)
    monkeypatch.setattr(flash_utils, "_loaded_implementation", None)
    versions = flash_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX
    checks = {"general_availability_check": lambda: True, "supported_devices": ((lambda: True, "cpu"),)}
    monkeypatch.setitem(versions, 2, {**versions[2], **checks})
