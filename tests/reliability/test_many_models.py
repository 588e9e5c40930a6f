"""Plain, patched and differently patched models of one process, in any order and in threads: none notices another."""

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
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from models import xl
from reliability.neighbours import FAMILIES, PLANS, SEEDS, Kind, build, looks, outputs
from reliability.record import Part, is_full, note
from rsa_hf import is_patched, patch_model, unpatch_model
from rsa_hf.integration import installed
from rsa_hf.integration.attention import record_attention_calls

TESTS = Path(__file__).parents[1]
RUNS, STEPS = (60, 30) if is_full() else (4, 14)
ROUNDS = 150 if is_full() else 8
MOST = 5  # models at a time

which = st.integers(0, MOST - 1)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What models give alone: `neighbours.py` computes it in a process of its own."""
    path = tmp_path_factory.mktemp("alone") / "outputs.pt"
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(TESTS / "reliability" / "neighbours.py"), str(path)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=True)
    return torch.load(path, weights_only=False)


@pytest.fixture(autouse=True)
def _one_thread():
    """Sums in the same order as in that process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- in any order --------------------------------------------------------------------------------------------------


def on_models(**arguments):
    """A rule for when there is a model."""
    return lambda function: precondition(lambda self: self.models)(rule(**arguments)(function))


class ManyModels(RuleBasedStateMachine):
    """Models and their kinds; after each doing, every model gives what its kind gives alone."""

    alone: dict
    done: Counter

    def __init__(self):
        super().__init__()
        self.models = []
        self.functions = dict(ALL_ATTENTION_FUNCTIONS)
        self.get_interface = AttentionInterface.get_interface

    def pick(self, index):
        return index % len(self.models)

    def add(self, model, kind, fresh):
        self.models.append((model, kind, fresh))
        if len(self.models) > MOST:
            self.models.pop(0)

    @rule(family=st.sampled_from(FAMILIES), seed=st.sampled_from(SEEDS))
    def build(self, family, seed):
        self.add(build(family, seed), Kind(family, seed), True)
        self.done["built"] += 1

    @on_models(index=which, plan=st.sampled_from(range(len(PLANS))))
    def patch(self, index, plan):
        index = self.pick(index)
        model, kind, fresh = self.models[index]
        if kind.plan in (None, plan):
            assert patch_model(model, PLANS[plan]) is model
            self.models[index] = (model, kind.with_(plan=plan), fresh)
            self.done["patched"] += 1
            return
        with pytest.raises(ValueError, match="patched already"):
            patch_model(model, PLANS[plan])
        self.done["refused a second plan"] += 1

    @on_models(index=which)
    def unpatch(self, index):
        index = self.pick(index)
        model, kind, fresh = self.models[index]
        assert unpatch_model(model) is model
        self.models[index] = (model, kind.with_(plan=None), fresh)
        self.done["unpatched"] += 1

    @on_models(index=which)
    def refuse(self, index):
        model, *_ = self.models[self.pick(index)]
        with pytest.raises(ValueError, match="99"):
            patch_model(model, {"num_regular": 99})
        self.done["refused a plan that does not fit"] += 1

    @on_models(index=which, way=st.sampled_from(("deepcopy", "pickle", "torch.save", "save_pretrained")))
    def duplicate(self, index, way):
        model, kind, fresh = self.models[self.pick(index)]
        if way == "save_pretrained" and kind.dtype == torch.bfloat16:
            return  # transformers makes Llama's angles anew, which the cast had rounded
        if way == "deepcopy":
            other = copy.deepcopy(model)
        elif way == "pickle":
            other = pickle.loads(pickle.dumps(model))
        elif way == "torch.save":
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            other = torch.load(file, weights_only=False)
        else:
            with TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                other = type(model).from_pretrained(folder, dtype=kind.dtype)
        self.add(other, kind, fresh and way != "save_pretrained")
        self.done[way] += 1

    @on_models(index=which, dtype=st.sampled_from((torch.float32, torch.float64, torch.bfloat16)))
    def cast(self, index, dtype):
        index = self.pick(index)
        model, kind, fresh = self.models[index]
        if kind.dtype == torch.bfloat16:
            return  # what was rounded away does not come back
        self.models[index] = (model.to(dtype), kind.with_(dtype=dtype), fresh)
        self.done["cast"] += 1

    @on_models(index=which)
    def move(self, index):
        model, *_ = self.models[self.pick(index)]
        kept = {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
        model.to("meta").to_empty(device="cpu")
        model.tie_weights()  # moving through the meta device takes tied parameters apart
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                tensor.copy_(kept[name])
        self.done["moved"] += 1

    @on_models(index=which)
    def forget(self, index):
        self.models.pop(self.pick(index))
        gc.collect()
        self.done["forgotten"] += 1

    @on_models(index=which)
    def train(self, index):
        """With a step of length nought: gradients come and go."""
        model, kind, _ = self.models[self.pick(index)]
        if kind.dtype != torch.float32:
            return
        model(input_ids=torch.tensor([[5, 6, 7, 8]])).logits.sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.0).step()
        model.zero_grad()
        self.done["trained"] += 1

    @on_models()
    def all_at_once(self):
        with ThreadPoolExecutor(4) as pool:
            found = [pool.submit(outputs, model, kind) for model, kind, _ in self.models for _ in range(2)]
            kinds = [kind for _, kind, _ in self.models for _ in range(2)]
        for future, kind in zip(found, kinds, strict=True):
            self.require(kind, future.result())
        self.done["all at once, in threads"] += 1

    def require(self, kind, found):
        for mine, expected in zip(found, self.alone["outputs"][kind], strict=True):
            # (Plain Bloom's padding is NaN in float64.)
            torch.testing.assert_close(mine, expected, rtol=0, atol=0, equal_nan=True, msg=str(kind))

    @invariant()
    def none_notices_another(self):
        for model, kind, fresh in self.models:
            self.require(kind, outputs(model, kind))
            assert is_patched(model) is (kind.plan is not None)
            if kind.plan is None:
                assert not hasattr(model.config, "rsa")
                if fresh:
                    plain = Kind(kind.family, kind.seed, None, kind.dtype)
                    assert looks(model) == self.alone["looks"][plain]
                    # (Saving a model writes its class into its config, and casting its dtype: plain ones too.)
                    configs = [model.config.to_dict(), dict(self.alone["configs"][plain])]
                    for config in configs:
                        del config["dtype"], config["architectures"]
                    assert configs[0] == configs[1]
            self.done["compared, bit by bit"] += 1
        assert dict(ALL_ATTENTION_FUNCTIONS) == self.functions
        assert sorted(self.functions) == self.alone["attention functions"]
        assert AttentionInterface.get_interface is self.get_interface
        assert all(installed().values())


def test_any_order_of_doings(alone):
    ManyModels.alone, ManyModels.done = alone, Counter()
    run_state_machine_as_test(
        ManyModels,
        settings=settings(
            max_examples=RUNS,
            stateful_step_count=STEPS,
            report_multiple_bugs=False,
            phases=(Phase.explicit, Phase.generate),
        ),
    )
    note(Part.MANY_MODELS, "models built, patched, copied, moved and run in random order", ManyModels.done)


# --- in threads ----------------------------------------------------------------------------------------------------


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
    before = AttentionInterface.get_interface
    with record_attention_calls() as calls:
        found = in_another_thread(run)
        assert not calls
        run()
        assert calls  # the control
    assert AttentionInterface.get_interface is before
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
