"""Attention modules that do not use transformers' attention interface: where their values, outputs and masks are.

`connect` wraps one method of each such class, once in a process, when a model is patched or built from a config with
a plan. The wrapper does nothing for a module without an `rsa` child. Otherwise it runs the original method and mixes
P V into the output of attention, before the output projection. Nothing is kept on an instance except its `rsa` child,
so copies, pickles and wrapped or quantised projections work without special code.

There are three kinds of modules, by where V and the output of attention can be seen:

* own_method.py: a method that computes attention from Q, K and V: GPT-Neo, GPT-J, CodeGen, XLNet (both of its
  streams), OpenAI-GPT, GPT-NeoX-Japanese; GPT-2 and the Decision Transformer with `reorder_and_upcast_attn`;
* through_cache.py: a forward that passes K and V through the cache, and the output to a projection: Bloom, Falcon,
  MPT, MVP, TrOCR, XGLM, the Informer's ProbSparse attention, flash attention's versions of GPT-Neo, GPT-J and Falcon;
  or that returns the output: Megatron-BERT, RemBERT, RoFormer;
* through_projection.py: a forward that projects V, and returns the output: DeBERTa, DeBERTa-v2; or passes it to a
  projection: MPNet.

A new architecture of one of these kinds is a row of table.py.
"""

from rsa_hf.integration.architectures.mixing import watch
from rsa_hf.integration.architectures.table import (
    ARCHITECTURES,
    NO_SOFTMAX_ATTENTION,
    Architecture,
    architecture_of,
    connect,
)

__all__ = ["ARCHITECTURES", "NO_SOFTMAX_ATTENTION", "Architecture", "architecture_of", "connect", "watch"]
