"""Models that run in threads while others are patched, loaded and generate: each gives what it gives alone."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from models import xl
from reliability.neighbours import FAMILIES, PLANS, Kind, build, outputs
from reliability.record import Part, note
from reliability.trial import is_full
from rsa_hf import patch_model, unpatch_model
from rsa_hf.integration.attention import connect, record_attention_calls

ROUNDS = 150 if is_full() else 8
pytestmark = pytest.mark.usefixtures("one_thread")


def model_of(kind):
    model = build(kind.family, kind.seed)
    return (model if kind.plan is None else patch_model(model, PLANS[kind.plan])).to(kind.dtype)


def in_another_thread(function, *arguments):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *arguments).result()


def test_models_run_while_others_come_and_go(alone, tmp_path):
    kinds = [Kind(family, 0, plan) for family in FAMILIES for plan in (None, 0, 1)]
    models = [(kind, model_of(kind)) for kind in kinds]
    model_of(Kind("llama", 1, 1)).save_pretrained(tmp_path)
    stop = threading.Event()

    def come_and_go():
        count, model = 0, build("gpt2", 1)
        while not stop.is_set():
            unpatch_model(patch_model(model, PLANS[count % 2]))
            type(models[3][1]).from_pretrained(tmp_path, dtype=torch.bfloat16)
            copy.deepcopy(models[count % len(models)][1])
            count += 1
        return count

    def run(kind, model):
        for _ in range(ROUNDS):
            for found, expected in zip(outputs(model, kind), alone["outputs"][kind], strict=True):
                assert torch.equal(found, expected), kind

    with ThreadPoolExecutor(8) as pool:
        going = pool.submit(come_and_go)
        try:
            # Each model in two threads at once.
            for future in [pool.submit(run, *entry) for entry in models for _ in range(2)]:
                future.result()
        finally:
            stop.set()
        count = going.result()
    assert count >= 1
    compared = {"bitwise as alone": 2 * ROUNDS * len(models), "patched, unpatched, loaded and copied meanwhile": count}
    note(Part.MANY_MODELS, "models run in 7 threads, each in two at once", compared)


def test_one_model_generates_in_many_threads():
    model = model_of(Kind("gpt2", 0, 0))
    prompts = [torch.arange(3, 3 + n)[None] for n in range(2, 14)]

    def generate(ids):
        return model.generate(
            ids, max_new_tokens=20, do_sample=False, pad_token_id=0, attention_mask=torch.ones_like(ids)
        )

    expected = [generate(ids) for ids in prompts]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10 if is_full() else 1):
            assert all(torch.equal(a, b) for a, b in zip(pool.map(generate, prompts), expected, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_probe_looks_at_its_own_thread_alone(family):
    """A model under dropout would draw other numbers if its attention were called once more."""
    model = build(family, 0).train()
    model.config.attention_dropout = model.config.attn_pdrop = 0.5
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
        if hasattr(module, "attention_dropout") and isinstance(module.attention_dropout, float):
            module.attention_dropout = 0.5

    def run():
        torch.manual_seed(3)
        with torch.no_grad():
            return model(input_ids=torch.tensor([[5, 6, 7, 8]])).logits

    expected = run()
    assert not torch.equal(expected, model.eval()(input_ids=torch.tensor([[5, 6, 7, 8]])).logits)
    model.train()
    connect(model)
    with record_attention_calls() as calls:
        found = in_another_thread(run)
        assert not calls
        run()
        assert calls  # the control
    count = len(calls)
    run()
    assert len(calls) == count
    assert torch.equal(found, expected)


@pytest.mark.parametrize("family", [*FAMILIES, "transformer_xl"])
def test_the_default_dtype_of_the_process_changes_nothing(family):
    """While a model is loaded in another thread, it is that model's."""
    if family == "transformer_xl":
        model, batch = xl.build(rsa={}), {"input_ids": xl.text()}
    else:
        model, batch = model_of(Kind(family, 0, 0)), {"input_ids": torch.tensor([[5, 6, 7, 8, 9]])}
    with torch.no_grad():
        expected = model(**batch).logits
        torch.set_default_dtype(torch.bfloat16)
        try:
            found = model(**batch).logits
        finally:
            torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)
