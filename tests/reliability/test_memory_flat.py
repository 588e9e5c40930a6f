"""Thousands of patches, or of steps of generation, leak neither memory nor objects, hooks or registry entries.

The last quarter may have at most `MOST_BYTES` of memory and `MOST_OBJECTS` objects more than the first, and nothing
more in the registries.
"""

import gc
import os
import threading

import pytest
import torch
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from families import VOCAB, build_language_model
from reliability import neighbours
from reliability.record import Part, is_full, note, resident_bytes
from rsa_hf import patch_model, unpatch_model

CYCLES, STEPS = (1_000, 20_000) if is_full() else (40, 400)
SAMPLES = 20 if is_full() else 8
MOST_BYTES = 2 * 2**20
MOST_OBJECTS = 100 if is_full() else 20
needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc, which Linux has")


def measured(model):
    """Resident memory in bytes, the number of objects, and the numbers of hooks, functions, threads and files."""
    gc.collect()
    hooks = sum(
        len(held)
        for module in model.modules()
        for key, held in vars(module).items()
        if key.endswith("hooks") and held is not None
    )
    registered = (hooks, len(ALL_ATTENTION_FUNCTIONS), threading.active_count(), len(os.listdir("/proc/self/fd")))
    return resident_bytes(), len(gc.get_objects()), registered


def require_flat(samples, kind):
    quarter = len(samples) // 4
    first, last = samples[:quarter], samples[-quarter:]
    more = {
        "bytes more in the last quarter": max(s[0] for s in last) - max(s[0] for s in first),
        "objects more": max(s[1] for s in last) - max(s[1] for s in first),
    }
    assert more["bytes more in the last quarter"] <= MOST_BYTES, more
    assert more["objects more"] <= MOST_OBJECTS, more
    assert {s[2] for s in last} == {s[2] for s in first}
    note(Part.MANY_MODELS, kind, more)


@needs_proc
@pytest.mark.parametrize("family", ["gpt2", pytest.param("bloom", marks=pytest.mark.slow)])
def test_patching_and_unpatching_leak_nothing(family):
    model = neighbours.build(family, 0)
    batch = {"input_ids": torch.tensor([[5, 6, 7, 8]])}
    samples = []
    cycles = CYCLES if family == "gpt2" else max(CYCLES // 5, 40)
    for cycle in range(cycles):
        patch_model(model, neighbours.PLANS[cycle % 2])
        with torch.no_grad():
            model(**batch)
        unpatch_model(model)
        if (cycle + 1) % (cycles // SAMPLES) == 0:
            samples.append(measured(model))
    require_flat(samples, f"{cycles:,} times patched and unpatched: {family}")


@needs_proc
@pytest.mark.parametrize("family", ["gpt2", pytest.param("mistral", marks=pytest.mark.slow)])
@torch.no_grad()
def test_generating_leaks_nothing(family):
    """The cache is cropped for GPT-2, which has 128 positions, and slides for Mistral."""
    model = patch_model(build_language_model(family, "eager" if family == "gpt2" else "sdpa"), neighbours.PLANS[0])
    cache, token, samples = DynamicCache(config=model.config), torch.tensor([[5]]), []
    steps = STEPS if family == "gpt2" else max(STEPS // 5, 400)
    for step in range(steps):
        output = model(input_ids=token, past_key_values=cache)
        token = (output.logits[:, -1].argmax(-1, keepdim=True) + step) % VOCAB
        if family == "gpt2" and cache.get_seq_length() == 120:
            cache.crop(-60)
        if (step + 1) % (steps // SAMPLES) == 0:
            samples.append(measured(model))
    require_flat(samples, f"{steps:,} steps of generation with a cache: {family}")
