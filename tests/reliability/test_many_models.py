"""Plain and differently patched models in one process, in any order and in threads, do not affect each other."""

import copy
import gc
import io
import os
import pickle
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from models import tiny
from reliability.neighbours import FAMILIES, PLANS, SEEDS, Kind, build, looks, outputs
from reliability.record import Part, is_full, note
from rsa_hf import is_patched, patch_model, unpatch_model
from rsa_hf.integration import installed
from rsa_hf.integration.attention import connect
from rsa_hf.integration.trial import record_attention_calls

TESTS = Path(__file__).parents[1]
RUNS, STEPS = (60, 30) if is_full() else (4, 14)
ROUNDS = 150 if is_full() else 8
MOST = 5  # models at a time


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The outputs of models that are alone, which `neighbours.py` computes in a process of its own."""
    path = tmp_path_factory.mktemp("alone") / "outputs.pt"
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(TESTS / "reliability" / "neighbours.py"), str(path)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=True)
    return torch.load(path, weights_only=False)


@pytest.fixture(autouse=True)
def _one_thread():
    """Use one thread, so that sums have the same order as in that process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- in any order --------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Held:
    """A model and its kind; `fresh` if it was built in this process, not loaded."""

    model: PreTrainedModel
    kind: Kind
    fresh: bool = True


def on_a_model(**arguments):
    """Make a rule for one of the models. The function returns the name to count it under."""

    def rule_of(function):
        def operation(self, index, **drawn):
            self.done[function(self, self.held[index % len(self.held)], **drawn)] += 1

        operation.__name__ = function.__name__
        return precondition(lambda self: self.held)(rule(index=st.integers(0, MOST - 1), **arguments)(operation))

    return rule_of


class ManyModels(RuleBasedStateMachine):
    """Models and their kinds. After each operation, every model gives what its kind gives alone."""

    alone: dict
    done: Counter

    def __init__(self):
        super().__init__()
        self.held = []
        self.functions = dict(ALL_ATTENTION_FUNCTIONS)
        self.get_interface = AttentionInterface.get_interface

    def hold(self, held):
        self.held = [*self.held, held][-MOST:]

    @rule(family=st.sampled_from(FAMILIES), seed=st.sampled_from(SEEDS))
    def build(self, family, seed):
        self.hold(Held(build(family, seed), Kind(family, seed)))
        self.done["built"] += 1

    @on_a_model(plan=st.sampled_from(range(len(PLANS))))
    def patch(self, held, plan):
        if held.kind.plan not in (None, plan):
            with pytest.raises(ValueError, match="patched already"):
                patch_model(held.model, PLANS[plan])
            return "refused a second plan"
        assert patch_model(held.model, PLANS[plan]) is held.model
        held.kind = replace(held.kind, plan=plan)
        return "patched"

    @on_a_model()
    def unpatch(self, held):
        assert unpatch_model(held.model) is held.model
        held.kind = replace(held.kind, plan=None)
        return "unpatched"

    @on_a_model()
    def refuse(self, held):
        with pytest.raises(ValueError, match="99"):
            patch_model(held.model, {"num_regular": 99})
        return "refused a plan that does not fit"

    @on_a_model(way=st.sampled_from(("deepcopy", "pickle", "torch.save", "save_pretrained")))
    def duplicate(self, held, way):
        model = held.model
        if way == "deepcopy":
            other = copy.deepcopy(model)
        elif way == "pickle":
            other = pickle.loads(pickle.dumps(model))
        elif way == "torch.save":
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            other = torch.load(file, weights_only=False)
        elif held.kind.dtype == torch.bfloat16:
            return "not saved in bfloat16"  # transformers recomputes Llama's angles, which the cast has rounded
        else:
            with TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                other = type(model).from_pretrained(folder, dtype=held.kind.dtype)
        self.hold(Held(other, held.kind, held.fresh and way != "save_pretrained"))
        return way

    @on_a_model(dtype=st.sampled_from((torch.float32, torch.float64, torch.bfloat16)))
    def cast(self, held, dtype):
        if held.kind.dtype == torch.bfloat16:
            return "not cast back"  # the rounded digits are lost
        held.model.to(dtype)
        held.kind = replace(held.kind, dtype=dtype)
        return "cast"

    @on_a_model()
    def move(self, held):
        model = held.model
        kept = {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
        model.to("meta").to_empty(device="cpu")
        model.tie_weights()  # moving through the meta device unties parameters
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                tensor.copy_(kept[name])
        return "moved"

    @on_a_model()
    def forget(self, held):
        self.held.remove(held)
        gc.collect()
        return "forgotten"

    @on_a_model()
    def train(self, held):
        """Take a step with learning rate 0, so that only gradients come and go."""
        held.model(input_ids=torch.tensor([[5, 6, 7, 8]])).logits.sum().backward()
        torch.optim.SGD(held.model.parameters(), lr=0.0).step()
        held.model.zero_grad()
        return "trained"

    @on_a_model()
    def all_at_once(self, _):
        with ThreadPoolExecutor(4) as pool:
            found = [(held.kind, pool.submit(outputs, held.model, held.kind)) for held in self.held for _ in range(2)]
        for kind, future in found:
            self.require(kind, future.result())
        return "all at once, in threads"

    def require(self, kind, found):
        for mine, expected in zip(found, self.alone["outputs"][kind], strict=True):
            # Padding of a plain Bloom is NaN in float64.
            torch.testing.assert_close(mine, expected, rtol=0, atol=0, equal_nan=True, msg=str(kind))

    @invariant()
    def models_do_not_affect_each_other(self):
        for held in self.held:
            model, kind = held.model, held.kind
            self.require(kind, outputs(model, kind))
            assert is_patched(model) is (kind.plan is not None)
            assert hasattr(model.config, "rsa") is (kind.plan is not None)
            if kind.plan is None and held.fresh:
                assert looks(model) == self.alone["looks"][kind]
                # Saving a plain model writes its class into its config, and casting its dtype.
                configs = [model.config.to_dict(), dict(self.alone["configs"][kind])]
                for config in configs:
                    del config["dtype"], config["architectures"]
                assert configs[0] == configs[1]
            self.done["compared, bit by bit"] += 1
        assert dict(ALL_ATTENTION_FUNCTIONS) == self.functions
        assert sorted(self.functions) == self.alone["attention functions"]
        assert AttentionInterface.get_interface is self.get_interface
        assert all(installed().values())


def test_operations_in_any_order_do_not_affect_other_models(alone):
    ManyModels.alone, ManyModels.done = alone, Counter()
    phases = (Phase.explicit, Phase.generate)
    numbers = {"max_examples": RUNS, "stateful_step_count": STEPS, "report_multiple_bugs": False}
    run_state_machine_as_test(ManyModels, settings=settings(**numbers, phases=phases))
    note(Part.MANY_MODELS, "models built, patched, copied, moved and run in random order", ManyModels.done)


# --- in threads ----------------------------------------------------------------------------------------------------


def model_of(kind):
    model = build(kind.family, kind.seed)
    return (model if kind.plan is None else patch_model(model, PLANS[kind.plan])).to(kind.dtype)


def in_another_thread(function, *arguments):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *arguments).result()


def test_models_run_in_threads_while_others_are_patched_and_loaded(alone, tmp_path):
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


def test_a_model_generates_in_many_threads():
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
def test_a_probe_records_only_its_own_thread(family):
    """With dropout, a model would draw other random numbers if its attention were called once more."""
    model = build(family, 0).train()
    connect(model)
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
    """While another thread loads a model, the default dtype is that model's."""
    if family == "transformer_xl":
        model, batch = tiny.build("transfo-xl", rsa={}), {"input_ids": tiny.text()}
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
