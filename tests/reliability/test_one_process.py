"""Many models in one process: in threads, under another default dtype, and patched and run thousands of times."""

import copy
import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from architectures import build_adapted
from families import VOCAB, build_language_model
from models import tiny
from reliability.trials import is_full
from rsa_hf import patch_model, unpatch_model

FAMILIES = ("gpt2", "llama", "bloom")
PLANS = (
    {"num_regular": 2, "num_cyclical_pairs": 1, "gate_init": 0.5},
    {"num_dilated_cyclical_pairs": 2, "dilation": [2, 3, 2, 5], "gate_init": 1.0, "layers": [1]},
)
KINDS = [(family, plan) for family in FAMILIES for plan in (None, *PLANS)]
ROUNDS, CYCLES, STEPS, SAMPLES = (150, 1_000, 20_000, 20) if is_full() else (8, 40, 400, 8)
MOST_BYTES, MOST_OBJECTS = 2 * 2**20, 100 if is_full() else 20  # more in the last quarter than in the first


def build(family, plan=None):
    """Build a model with the same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build_adapted(family, language_model=True) if family == "bloom" else build_language_model(family)
        return model if plan is None else patch_model(model, plan)


@torch.no_grad()
def outputs(model):
    """Logits of a padded batch, and of the next two steps with a cache."""
    ids, found = torch.randint(3, VOCAB, (2, 11), generator=torch.Generator().manual_seed(1)), []
    mask, cache = torch.ones_like(ids).index_fill(1, torch.arange(2), 0), None
    for _ in range(3):
        output = model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
        found.append(output.logits)
        ids, cache = torch.full((2, 1), 5), output.past_key_values
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
    return torch.stack([logits[:, -1] for logits in found])


@pytest.fixture
def one_thread():
    """Sums have the same order in each call."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_models_run_in_threads_while_others_are_patched_and_loaded(tmp_path):
    models = [build(*kind) for kind in KINDS]
    expected = [outputs(model) for model in models]
    build("llama", PLANS[1]).save_pretrained(tmp_path)
    stop = threading.Event()

    def come_and_go():
        count, model = 0, build("gpt2")
        while not stop.is_set():
            unpatch_model(patch_model(model, PLANS[count % 2]))
            type(models[3]).from_pretrained(tmp_path, dtype=torch.bfloat16)
            copy.deepcopy(models[count % len(models)])
            count += 1
        return count

    def run(model, wanted):
        return all(torch.equal(outputs(model), wanted) for _ in range(ROUNDS))

    with ThreadPoolExecutor(8) as pool:
        going = pool.submit(come_and_go)
        try:
            # Each in two threads at once.
            futures = [pool.submit(run, *pair) for pair in zip(models, expected, strict=True) for _ in range(2)]
            assert all(future.result() for future in futures)
        finally:
            stop.set()
        assert going.result() >= 1


@pytest.mark.parametrize("family", [*FAMILIES, "transformer_xl"])
def test_the_default_dtype_of_the_process_changes_nothing(family):
    """While another thread loads a model, the default dtype is that model's."""
    model = tiny.build("transfo-xl", rsa={}) if family == "transformer_xl" else build(family, PLANS[0])
    ids = tiny.text()
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        torch.set_default_dtype(torch.bfloat16)
        try:
            found = model(input_ids=ids).logits
        finally:
            torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)


# --- leaks ------------------------------------------------------------------------------------------------------------

needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc, which Linux has")


def require_flat(model, count, repeat):
    """Call `repeat` with 0 … count − 1, and compare what the process holds in the first and the last quarter."""
    samples = []
    for i in range(count):
        repeat(i)
        if (i + 1) % (count // SAMPLES) == 0:
            gc.collect()
            hooks = [key for module in model.modules() for key, held in vars(module).items() if "hook" in key and held]
            files = len(os.listdir("/proc/self/fd"))
            entries = (len(hooks), len(ALL_ATTENTION_FUNCTIONS), threading.active_count(), files)
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            samples.append((resident, len(gc.get_objects()), entries))
    first, last = samples[: SAMPLES // 4], samples[-(SAMPLES // 4) :]
    more_bytes, more_objects = (max(s[i] for s in last) - max(s[i] for s in first) for i in (0, 1))
    assert more_bytes <= MOST_BYTES
    assert more_objects <= MOST_OBJECTS
    assert {s[2] for s in last} == {s[2] for s in first}


@needs_proc
@pytest.mark.parametrize("family", ["gpt2", pytest.param("bloom", marks=pytest.mark.slow)])
def test_patching_and_unpatching_leak_nothing(family):
    model = build(family)

    @torch.no_grad()
    def cycle(i):
        patch_model(model, PLANS[i % 2])(input_ids=torch.tensor([[5, 6, 7, 8]]))
        unpatch_model(model)

    require_flat(model, CYCLES, cycle)


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "mistral"])
def test_generating_leaks_nothing(family):
    """The cache is cropped for GPT-2, which has 128 positions, and slides for Mistral."""
    model = patch_model(build_language_model(family, "eager" if family == "gpt2" else "sdpa"), PLANS[0])
    cache = DynamicCache(config=model.config)

    @torch.no_grad()
    def step(i):
        model(input_ids=torch.tensor([[i % VOCAB]]), past_key_values=cache)
        if family == "gpt2" and cache.get_seq_length() == 120:
            cache.crop(-60)

    require_flat(model, STEPS, step)
