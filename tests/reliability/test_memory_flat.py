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
from reliability.neighbours import PLANS, build
from reliability.record import Part, is_full, note, resident_bytes
from rsa_hf import patch_model, unpatch_model

CYCLES, STEPS, SAMPLES = (1_000, 20_000, 20) if is_full() else (40, 400, 8)
MOST_BYTES, MOST_OBJECTS = 2 * 2**20, 100 if is_full() else 20
pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc, which Linux has")


def require_flat(model, kind, count, repeat):
    """Call `repeat` with 0 … count − 1, and compare what the process holds now and then."""
    samples = []
    for i in range(count):
        repeat(i)
        if (i + 1) % (count // SAMPLES) == 0:
            gc.collect()
            hooks = [key for module in model.modules() for key, held in vars(module).items() if "hook" in key and held]
            entries = (
                len(hooks),
                len(ALL_ATTENTION_FUNCTIONS),
                threading.active_count(),
                len(os.listdir("/proc/self/fd")),
            )
            samples.append((resident_bytes(), len(gc.get_objects()), entries))
    first, last = samples[: SAMPLES // 4], samples[-(SAMPLES // 4) :]
    more_bytes, more_objects = (max(s[i] for s in last) - max(s[i] for s in first) for i in (0, 1))
    assert more_bytes <= MOST_BYTES
    assert more_objects <= MOST_OBJECTS
    assert {s[2] for s in last} == {s[2] for s in first}
    note(
        Part.MANY_MODELS,
        f"{count:,} {kind}",
        {"bytes more in the last quarter": more_bytes, "objects more": more_objects},
    )


@pytest.mark.parametrize("family", ["gpt2", pytest.param("bloom", marks=pytest.mark.slow)])
def test_patching_and_unpatching_leak_nothing(family):
    model = build(family)

    @torch.no_grad()
    def cycle(i):
        patch_model(model, PLANS[i % 2])(input_ids=torch.tensor([[5, 6, 7, 8]]))
        unpatch_model(model)

    require_flat(model, f"times patched and unpatched: {family}", CYCLES, cycle)


@pytest.mark.parametrize("family", ["gpt2", pytest.param("mistral", marks=pytest.mark.slow)])
def test_generating_leaks_nothing(family):
    """The cache is cropped for GPT-2, which has 128 positions, and slides for Mistral."""
    model = patch_model(build_language_model(family, "eager" if family == "gpt2" else "sdpa"), PLANS[0])
    cache = DynamicCache(config=model.config)

    @torch.no_grad()
    def step(i):
        model(input_ids=torch.tensor([[i % VOCAB]]), past_key_values=cache)
        if family == "gpt2" and cache.get_seq_length() == 120:
            cache.crop(-60)

    require_flat(model, f"steps of generation with a cache: {family}", STEPS, step)
