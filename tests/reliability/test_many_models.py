"""Plain, patched and differently patched models of one process, in any order of doings: none notices another."""

import copy
import gc
import io
import pickle
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from reliability.neighbours import FAMILIES, PLANS, SEEDS, Kind, build, looks, outputs
from reliability.record import Part, note
from reliability.trial import is_full
from rsa_hf import is_patched, patch_model, unpatch_model
from rsa_hf.integration import installed

RUNS, STEPS = (60, 30) if is_full() else (4, 14)
MOST = 5  # models at a time

which = st.integers(0, MOST - 1)


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

    @precondition(lambda self: self.models)
    @rule(index=which, plan=st.sampled_from(range(len(PLANS))))
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

    @precondition(lambda self: self.models)
    @rule(index=which)
    def unpatch(self, index):
        index = self.pick(index)
        model, kind, fresh = self.models[index]
        assert unpatch_model(model) is model
        self.models[index] = (model, kind.with_(plan=None), fresh)
        self.done["unpatched"] += 1

    @precondition(lambda self: self.models)
    @rule(index=which)
    def refuse(self, index):
        model, *_ = self.models[self.pick(index)]
        with pytest.raises(ValueError, match="99"):
            patch_model(model, {"num_regular": 99})
        self.done["refused a plan that does not fit"] += 1

    @precondition(lambda self: self.models)
    @rule(index=which, way=st.sampled_from(("deepcopy", "pickle", "torch.save", "save_pretrained")))
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

    @precondition(lambda self: self.models)
    @rule(index=which, dtype=st.sampled_from((torch.float32, torch.float64, torch.bfloat16)))
    def cast(self, index, dtype):
        index = self.pick(index)
        model, kind, fresh = self.models[index]
        if kind.dtype == torch.bfloat16:
            return  # what was rounded away does not come back
        self.models[index] = (model.to(dtype), kind.with_(dtype=dtype), fresh)
        self.done["cast"] += 1

    @precondition(lambda self: self.models)
    @rule(index=which)
    def move(self, index):
        model, *_ = self.models[self.pick(index)]
        kept = {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
        model.to("meta").to_empty(device="cpu")
        model.tie_weights()  # moving through the meta device takes tied parameters apart
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                tensor.copy_(kept[name])
        self.done["moved"] += 1

    @precondition(lambda self: self.models)
    @rule(index=which)
    def forget(self, index):
        self.models.pop(self.pick(index))
        gc.collect()
        self.done["forgotten"] += 1

    @precondition(lambda self: self.models)
    @rule(index=which)
    def train(self, index):
        """With a step of length nought: gradients come and go."""
        model, kind, _ = self.models[self.pick(index)]
        if kind.dtype != torch.float32:
            return
        model(input_ids=torch.tensor([[5, 6, 7, 8]])).logits.sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.0).step()
        model.zero_grad()
        self.done["trained"] += 1

    @precondition(lambda self: self.models)
    @rule()
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


@pytest.mark.usefixtures("one_thread")
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
