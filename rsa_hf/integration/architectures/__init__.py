"""Attention modules that do not use transformers' attention interface: where their values, output and masks are.

One method of each such class is wrapped, once, when a model with it is built or patched. The wrapper does nothing for
a module that has no `rsa` child; else it runs the method as it is and mixes the recurrence into what attention gives,
before the output projection. So nothing is kept on an instance but its `rsa` child, as for modules that use the
interface, and copies, pickles and wrapped or quantised projections work by themselves.

Three kinds of modules, by where V and the output can be seen:

* own_method.py: a method that computes attention from Q, K and V: GPT-Neo, GPT-J, CodeGen, XLNet (both of its
  streams), OpenAI-GPT, GPT-NeoX-Japanese; GPT-2 and the Decision Transformer with `reorder_and_upcast_attn`;
* through_cache.py: a forward that hands K and V to the cache, and the output to a projection: Bloom, Falcon, MPT, MVP,
  TrOCR, XGLM, the Informer's ProbSparse attention, flash attention's versions of GPT-Neo, GPT-J and Falcon; or that
  returns the output: Megatron-BERT, RemBERT, RoFormer;
* through_projection.py: a forward that projects V, and returns the output: DeBERTa, DeBERTa-v2; or hands it to a
  projection: MPNet.

A new architecture of one of these kinds is a row of table.py.
"""

from rsa_hf.integration.architectures.mixing import watch
from rsa_hf.integration.architectures.table import (
    ARCHITECTURES,
    NO_SOFTMAX_ATTENTION,
    architecture_of,
    connect,
    has_architectures,
)
from rsa_hf.integration.architectures.wrapping import Architecture

__all__ = [
    "ARCHITECTURES",
    "NO_SOFTMAX_ATTENTION",
    "Architecture",
    "architecture_of",
    "connect",
    "has_architectures",
    "watch",
]
