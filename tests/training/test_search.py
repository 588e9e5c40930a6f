"""The search of head plans draws all allowed plans and no others, and resumes after an interruption."""

import copy
import itertools
import textwrap
from types import SimpleNamespace

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GPT2Config, Trainer, TrainingArguments

from rsa_hf import RSAConfig, patch_model
from rsa_hf.training.search import head_plan_space, search_head_plans


class Drawn:
    """A trial whose draws are made by a function of low and high."""

    def __init__(self, draw):
        self.draw = draw

    def suggest_int(self, name, low, high):
        assert low <= high, name
        return self.draw(low, high)

    def suggest_categorical(self, name, choices):
        return choices[self.draw(0, len(choices) - 1)]


def kinds(plan, num_heads):
    """The counts (k1, …, k6) of a plan, which must fit the number of heads."""
    [layer] = plan.layer_plans([num_heads])
    dilated = [kind for kind, d in zip(layer.kinds, layer.dilations, strict=True) if d > 1]
    undilated = [kind for kind, d in zip(layer.kinds, layer.dilations, strict=True) if d == 1]
    order = ("regular", "cos", "sin")
    return tuple(part.count(kind) for part in (undilated, dilated) for kind in order)


@given(st.integers(1, 24), st.lists(st.integers(2, 50), max_size=3), st.data())
def test_every_plan_that_is_drawn_is_allowed(num_heads, dilations, data):
    trial = Drawn(lambda low, high: data.draw(st.integers(low, high)))
    base = RSAConfig(gate_init=-1.0, gate_per_head=True)
    plan = head_plan_space(trial, num_heads, dilations, base)
    k1, k2, k3, k4, k5, k6 = kinds(plan, num_heads)
    assert k2 == k3 and k5 == k6
    assert 1 <= k1 + k2 + k3 + k4 + k5 + k6 <= num_heads
    assert plan.dilation in ((None,) if k4 + k5 == 0 else dilations)
    assert (plan.gate_init, plan.gate_per_head) == (-1.0, True)


def drawable(num_heads, dilations):
    """All plans that can be drawn, from every branch of the tree of draws."""
    found, open_branches = set(), [[]]
    while open_branches:
        branch = open_branches.pop()
        choices = iter(branch)

        def draw(low, high, choices=choices, branch=branch):
            choice = next(choices, None)
            if choice is not None:
                return choice
            open_branches.extend([*branch, each] for each in range(low + 1, high + 1))
            branch.append(low)
            return low

        plan = head_plan_space(Drawn(draw), num_heads, dilations)
        found.add((kinds(plan, num_heads), plan.dilation))
    return found


def allowed(num_heads, dilations):
    counts = itertools.product(range(num_heads + 1), repeat=6)
    for k in counts:
        if 1 <= sum(k) <= num_heads and k[1] == k[2] and k[4] == k[5]:
            if not any(k[3:]):
                yield k, None
            else:
                yield from ((k, d) for d in dilations)


@pytest.mark.parametrize("num_heads", [1, 2, 5])
@pytest.mark.parametrize("dilations", [(), (2, 7)])
def test_every_plan_that_is_allowed_can_be_drawn(num_heads, dilations):
    assert drawable(num_heads, dilations) == set(allowed(num_heads, dilations))


def test_independent_draws_are_caught():
    def free(trial, num_heads):
        return RSAConfig(num_regular=trial.draw(0, num_heads), num_cyclical_pairs=trial.draw(0, num_heads // 2))

    with pytest.raises(ValueError, match="asks for 8 RSA heads"):
        kinds(free(Drawn(lambda _, high: high), 4), 4)


def test_the_example_of_the_docstring_runs(tmp_path):
    """With smaller sizes."""
    example = head_plan_space.__doc__.split("is a plan:\n")[1].split("Args:")[0]
    names = {
        "copy": copy,
        "AutoModelForCausalLM": AutoModelForCausalLM,
        "Trainer": Trainer,
        "patch_model": patch_model,
        "RSAConfig": RSAConfig,
        "head_plan_space": head_plan_space,
        "config": GPT2Config(n_layer=1, n_embd=8, n_head=4, n_positions=8, vocab_size=16),
        "args": TrainingArguments(str(tmp_path), max_steps=1, save_strategy="no", report_to="none", use_cpu=True),
        "train": (rows := [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 2),
        "validation": rows,
    }
    exec(textwrap.dedent(example).replace("n_trials=30", "n_trials=3"), names)
    assert isinstance(names["plan"], RSAConfig)


class Searching:
    """A stand-in for a Trainer that tries the number of plans asked for, and may be killed in the first."""

    def __init__(self, killed=False):
        self.killed, self.tried = killed, []
        self.args = SimpleNamespace(disable_tqdm=True, seed=0)

    def hyperparameter_search(self, space, objective, *, n_trials, backend, **keywords):
        optuna.create_study(**keywords).optimize(self.one, n_trials=n_trials)

    def one(self, trial):
        self.tried.append(head_plan_space(trial, 8).num_regular)
        if self.killed:
            raise KeyboardInterrupt
        return 1.0


def test_the_first_plan_is_tried_again_after_a_search_was_killed_in_it(tmp_path):
    first = RSAConfig(num_regular=7, num_cyclical_pairs=0, num_dilated_regular=0, num_dilated_cyclical_pairs=0)
    killed = Searching(killed=True)
    with pytest.raises(KeyboardInterrupt):
        search_head_plans(killed, "score", 2, tmp_path / "log", first=first)
    resumed = Searching()
    found = search_head_plans(resumed, "score", 2, tmp_path / "log", first=first)
    assert killed.tried == [7] and resumed.tried[0] == 7
    assert len(found) == 2
    assert len(search_head_plans(Searching(), "score", 3, tmp_path / "log", first=first)) == 3
    assert [plan.plan.num_regular for plan in found].count(7) == 1
