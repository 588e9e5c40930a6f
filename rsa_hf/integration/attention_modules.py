"""Identify self-attention modules from their names and classes, without running the model.

`patch_model` finds them by running the model. A checkpoint names them, and may name a feed-forward layer, whose RSA
heads would be loaded and never run, cross-attention, which has no common time axis, or attention of another kind.
"""

from __future__ import annotations

import re
import sys

from torch import nn
from transformers.modeling_utils import PreTrainedModel

from rsa_hf.integration.architectures import architecture_of

__all__ = ["is_self_attention"]

_KNOWN = ("torch", "transformers", "rsa_hf")
_ATTENTION = re.compile(r"(?i:attention|attn)|MLA")  # LongCat's attention is called multi-head latent attention, MLA
_CROSS = re.compile(r"cross|encoder_?attn|encdec", re.IGNORECASE)


def is_self_attention(name: str, module: nn.Module) -> bool:
    """Whether RSA heads on a module would run in its self-attention.

    In torch, transformers and this package the module that computes attention is the innermost one that has weight
    matrices and "Attention" in the name of its class; `BertAttention`, for example, only holds a `BertSelfAttention`.
    It is in `architectures/table.py`, or its class is from a file that imports the attention interface.
    Classes of other packages (`trust_remote_code`) may be named in any way: the answer for them is True.

    Args:
        name: the module's name in the model. Cross-attention often has the class of self-attention, and is then
            recognised by its name alone.
        module: the module.
    """
    kind = type(module)
    if kind.__module__.partition(".")[0] not in _KNOWN:
        return True
    inner = [child for child in module.modules() if child is not module]
    if not _is_attention(module) or any(_is_attention(child) for child in inner):
        return False
    if architecture_of(module) is None and not _may_use_interface(kind):
        return False
    is_cross = _CROSS.search(name.rpartition(".")[2]) or _CROSS.search(kind.__name__)
    return not (is_cross or getattr(module, "is_cross_attention", False))


def _is_attention(module: nn.Module) -> bool:
    projects = any(parameter.dim() > 1 for parameter in module.parameters())
    return projects and not isinstance(module, PreTrainedModel) and bool(_ATTENTION.search(type(module).__name__))


def _may_use_interface(kind: type) -> bool:
    files = (sys.modules.get(cls.__module__) for cls in kind.__mro__)
    return any(hasattr(file, "ALL_ATTENTION_FUNCTIONS") for file in files)
