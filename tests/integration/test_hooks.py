"""The hooks fit the installed transformers, say so where they do not, and leave it whole."""

import importlib
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers.modeling_utils import AttentionInterface, PreTrainedModel

import rsa_hf.integration.install as hooks
import rsa_hf.integration.peft.hooks as peft_hooks
import rsa_hf.utils.versions as versions
from families import build, inputs
from reliability.record import Part, note
from rsa_hf import RSAConfig, patch_model
from rsa_hf.integration.following import follow
from rsa_hf.integration.hooks import Hook, is_in_place, replace_all


def test_installing_again_does_nothing():
    before = AttentionInterface.get_interface, PreTrainedModel.post_init
    hooks.install()
    assert (AttentionInterface.get_interface, PreTrainedModel.post_init) == before


@pytest.mark.parametrize("version", ["5.16.1", "4.57.0", "6.0.0"])
def test_a_version_outside_the_range_is_named(version, monkeypatch):
    monkeypatch.setattr(versions.transformers, "__version__", version)
    with pytest.raises(ImportError, match=rf"≥ 5.17, < 6; installed is {version}.*pip install"):
        hooks.install()


@pytest.mark.parametrize("first", ["armed", "imported"])
def test_hooks_follow_an_import(first, tmp_path, monkeypatch):
    (tmp_path / "imported_later.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    installed = []
    if first == "imported":
        importlib.import_module("imported_later")
    for _ in range(2):  # two finders would ask each other, without end
        follow("imported_later", lambda: installed.append(sys.modules["imported_later"].VALUE))
    assert installed == ([1, 1] if first == "imported" else [])
    assert importlib.util.find_spec("imported_later") is not None
    importlib.import_module("imported_later")
    assert installed == ([1, 1] if first == "imported" else [1])
    assert not any(getattr(finder, "name", None) == "imported_later" for finder in sys.meta_path)
    del sys.modules["imported_later"]


# --- a transformers, or peft, of which something has moved -----------------------------------------------------------

ROOT = Path(__file__).parents[2]
RANGES = {False: "rsa_hf works with transformers ≥ 5.17, < 6; installed is", True: "rsa_hf works with peft ≥ 0.19.1;"}
PEFT_HOOKS = [
    hook
    for hook in peft_hooks._hooks()
    if hook.owner is not PreTrainedModel  # among those of transformers
    # A function that several modules know moves where it is defined.
    and (inspect.isclass(hook.owner) or getattr(hook.owner, hook.name).__module__ == hook.owner.__name__)
]


def outcome(renamed=None, other=None, peft=False):
    """What moved.py prints."""
    case = json.dumps({"renamed": renamed, "other": other, "peft": peft})
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("moved.py")), case],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def require_named():
    """Checks an outcome against that of libraries of which nothing has moved, and writes down how many it has seen."""
    unmoved: dict[bool, str] = {}
    seen: Counter[str] = Counter()

    def require_named(found, name, peft, how):
        for said in found["said"]:  # also the second time
            assert RANGES[peft] in said
            assert re.search(rf"\b{name}\b", said.partition(RANGES[peft])[2])
            assert "Install a version that rsa_hf was tested with" in said
        # Where peft has moved, those into transformers are in place.
        ours = [f"{h.owner.__module__}.{h.owner.__qualname__}.{h.name}" for h in hooks.HOOKS] if peft else []
        assert sorted(found["touched"]) == sorted(ours)
        if peft not in unmoved:
            unmoved[peft] = outcome(peft=peft)["plain"]
        assert found["plain"] == unmoved[peft]
        seen[f"{how} in {'peft' if peft else 'transformers'}"] += 1

    yield require_named
    for kind, count in seen.items():
        note(Part.MOVING_TRANSFORMERS, kind, {"named, nothing installed, plain models give the same bits": count})


def cases(names):
    """Once each, of transformers and of peft."""
    return list(dict.fromkeys([(False, name) for name in names(hooks.HOOKS)] + [(True, n) for n in names(PEFT_HOOKS)]))


def functions(of):
    # A special method's name is the language's. And what transformers' own hooks need is never left to those of peft.
    known = {hook.name for hook in hooks.HOOKS} if of is PEFT_HOOKS else set()
    return [hook.name for hook in of if not hook.name.startswith("__") and hook.name not in known]


def owners(of):
    return [hook.owner.__qualname__ for hook in of if inspect.isclass(hook.owner)]


@pytest.mark.slow  # each starts an interpreter and imports torch and transformers
@pytest.mark.parametrize(("peft", "name"), cases(functions) + cases(owners))
def test_what_is_renamed_is_named_and_nothing_is_half_installed(peft, name, require_named):
    how = f"a {'class' if name.lstrip('_')[0].isupper() else 'function'} is renamed"
    require_named(outcome(renamed=name, peft=peft), name, peft, how)


@pytest.mark.slow  # the same
@pytest.mark.parametrize(
    ("peft", "hook"),
    [(False, hook) for hook in hooks.HOOKS] + [(True, hook) for hook in PEFT_HOOKS],
    ids=lambda value: value if isinstance(value, bool) else f"{value.owner.__name__}.{value.name}",
)
def test_other_parameters_are_named_and_nothing_is_half_installed(peft, hook, require_named):
    owner = hook.owner
    place = [owner.__name__, ""] if inspect.ismodule(owner) else [owner.__module__, owner.__qualname__]
    found = outcome(other=[*place, hook.name], peft=peft)
    assert "was expected to take" in found["said"][0]
    require_named(found, hook.name, peft, "a function takes other parameters")


def test_a_function_that_cannot_be_replaced_undoes_the_others():
    class Closed(type):
        def __setattr__(cls, name, value):
            raise TypeError(f"no {name} is set on {cls.__name__}")

    class Inherits:
        def second(self):
            pass

    class First(Inherits):
        def first(self):
            pass

    class Last(metaclass=Closed):
        def last(self):
            pass

    def wrap(original):
        return lambda self: original(self)

    before = dict(vars(First))
    wanted = [Hook(First, name, ("self",), wrap) for name in ("first", "second")]
    with pytest.raises(ImportError, match=r"Fits 1\. Last\.last cannot be replaced: no last is set on Last"):
        replace_all([*wanted, Hook(Last, "last", ("self",), wrap)], "Fits 1.")
    assert dict(vars(First)) == before
    replace_all(wanted, "Fits 1.")
    assert all(is_in_place(hook) for hook in wanted)


def test_the_direction_must_be_known():
    model = build("gpt2")
    patch_model(model)
    for block in model.h:
        del block.attn.is_causal
    with pytest.raises(ValueError, match="GPT2Attention does not say whether it is causal.*RSAConfig"):
        model(**inputs("gpt2"))
    other = build("gpt2")
    for block in other.h:
        del block.attn.is_causal
    assert patch_model(other).config.rsa["plan"]["causal"] is True  # as a trial run shows
    patch_model(other, RSAConfig(causal=True))
    with torch.no_grad():
        other(**inputs("gpt2"))


def test_another_child_of_that_name_is_left_alone():
    model, batch = build("gpt2"), inputs("gpt2")
    with torch.no_grad():
        expected = model(**batch)[0]
        model.h[0].attn.rsa = torch.nn.Linear(2, 2)
        assert torch.equal(model(**batch)[0], expected)
