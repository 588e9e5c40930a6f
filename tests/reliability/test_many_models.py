"""Plain and differently patched models in one process, in any order and in threads, do not affect each other."""

import copy
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from models import tiny
from reliability.neighbours import FAMILIES, PLANS, build, outputs
from reliability.record import is_full
from rsa_hf import is_patched, patch_model, unpatch_model

TESTS = Path(__file__).parents[1]
RUNS, STEPS, ROUNDS = (60, 30, 150) if is_full() else (4, 14, 8)
KINDS = [(family, plan) for family in FAMILIES for plan in (None, *range(len(PLANS)))]


def model_of(kind):
    family, plan = kind
    return build(family) if plan is None else patch_model(build(family), PLANS[plan])


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The outputs of each kind: of plain models in a process without rsa_hf, of fresh patched models in this one."""
    path = tmp_path_factory.mktemp("alone") / "outputs.pt"
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(TESTS / "reliability" / "neighbours.py"), str(path)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=True)
    plain = torch.load(path)
    return {kind: plain[kind[0]] if kind[1] is None else outputs(model_of(kind)) for kind in KINDS}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Use one thread, so that sums have the same order as in the other process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def same_bits(found, expected):
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def duplicate(model, way, folder):
    if way == "deepcopy":
        return copy.deepcopy(model)
    if way == "pickle":
        return pickle.loads(pickle.dumps(model))
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder)


OPERATIONS = ["build", "build", "patch", "patch", "unpatch", "refuse", "deepcopy", "pickle", "save", "forget"]


@pytest.mark.parametrize("seed", range(RUNS))
def test_operations_in_any_order_do_not_affect_other_models(seed, expected, tmp_path):
    random, held = Random(seed), []
    functions = dict(ALL_ATTENTION_FUNCTIONS), AttentionInterface.get_interface
    for _ in range(STEPS):
        operation = random.choice(OPERATIONS) if held else "build"
        if operation == "build":
            family = random.choice(FAMILIES)
            held.append(SimpleNamespace(family=family, plan=None, model=build(family)))
            continue
        chosen = random.choice(held)
        model = chosen.model
        if operation == "patch":
            plan = random.randrange(len(PLANS))
            if chosen.plan in (None, plan):
                chosen.plan = plan
                assert patch_model(model, PLANS[plan]) is model
            else:
                with pytest.raises(ValueError, match="patched already"):
                    patch_model(model, PLANS[plan])
        elif operation == "unpatch":
            chosen.plan = None
            assert unpatch_model(model) is model
        elif operation == "refuse":
            with pytest.raises(ValueError, match="99"):
                patch_model(model, {"num_regular": 99})
        elif operation == "forget":
            held.remove(chosen)
        else:
            copied = duplicate(model, operation, tmp_path)
            held.append(SimpleNamespace(family=chosen.family, plan=chosen.plan, model=copied))
        held = held[-5:]
        for one in held:
            assert same_bits(outputs(one.model), expected[one.family, one.plan])
            assert is_patched(one.model) is hasattr(one.model.config, "rsa") is (one.plan is not None)
        assert (dict(ALL_ATTENTION_FUNCTIONS), AttentionInterface.get_interface) == functions


def test_models_run_in_threads_while_others_are_patched_and_loaded(expected, tmp_path):
    models = [(kind, model_of(kind)) for kind in KINDS]
    model_of(("llama", 1)).save_pretrained(tmp_path)
    stop = threading.Event()

    def come_and_go():
        count, model = 0, build("gpt2")
        while not stop.is_set():
            unpatch_model(patch_model(model, PLANS[count % 2]))
            type(models[3][1]).from_pretrained(tmp_path, dtype=torch.bfloat16)
            copy.deepcopy(models[count % len(models)][1])
            count += 1
        return count

    def run(kind, model):
        return all(same_bits(outputs(model), expected[kind]) for _ in range(ROUNDS))

    with ThreadPoolExecutor(8) as pool:
        going = pool.submit(come_and_go)
        try:
            futures = [pool.submit(run, *entry) for entry in models for _ in range(2)]  # each in two threads at once
            assert all(future.result() for future in futures)
        finally:
            stop.set()
        assert going.result() >= 1


@pytest.mark.parametrize("family", [*FAMILIES, "transformer_xl"])
def test_the_default_dtype_of_the_process_changes_nothing(family):
    """While another thread loads a model, the default dtype is that model's."""
    model = tiny.build("transfo-xl", rsa={}) if family == "transformer_xl" else model_of((family, 0))
    ids = tiny.text()
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        torch.set_default_dtype(torch.bfloat16)
        try:
            found = model(input_ids=ids).logits
        finally:
            torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)
