"""Thousands of patches and of steps of generation: memory, objects, hooks and registries stay as they were.

The first quarter is compared with the last: no more than `MOST_BYTES` of memory and `MOST_OBJECTS` objects more, and
nothing more of what is registered.
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
from reliability.record import Part, is_full, note
from rsa_hf import patch_model, unpatch_model

CYCLES, STEPS = (1_000, 20_000) if is_full() else (40, 400)
SAMPLES = 20 if is_full() else 8
MOST_BYTES = 2 * 2**20
MOST_OBJECTS = 20 if not is_full() else 100


def measured(model):
    """Resident memory in bytes, objects that Python collects, and what is registered."""
    gc.collect()
    with open("/proc/self/statm") as file:
        memory = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    hooks = sum(
        len(held)
        for module in model.modules()
        for key, held in vars(module).items()
        if key.endswith("hooks") and held is not None
    )
    registered = (hooks, len(ALL_ATTENTION_FUNCTIONS), threading.active_count(), len(os.listdir("/proc/self/fd")))
    return memory, len(gc.get_objects()), registered


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


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc, which Linux has")
@pytest.mark.parametrize("family", ["gpt2", pytest.param("bloom", marks=pytest.mark.slow)])
def test_patching_and_unpatching(family):
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


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc, which Linux has")
@pytest.mark.parametrize("family", ["gpt2", pytest.param("mistral", marks=pytest.mark.slow)])
@torch.no_grad()
def test_generating(family):
    """With a cache that is cropped (GPT-2, which has 128 positions), or slides by itself (Mistral)."""
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
