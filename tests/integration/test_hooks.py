"""The hooks fit the installed transformers, say so where they do not, and leave it whole."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
from transformers.modeling_utils import AttentionInterface, PreTrainedModel

import rsa_hf.integration as integration
import rsa_hf.integration.peft.hooks as peft_hooks
from families import build, inputs
from reliability.record import Part, note
from rsa_hf import RSAConfig, patch_model
from rsa_hf.integration import hook_table, install
from rsa_hf.integration.hooks import Hook, install_hooks, is_installed


def test_installing_again_does_nothing():
    before = AttentionInterface.get_interface, PreTrainedModel.post_init
    install.__wrapped__()
    assert (AttentionInterface.get_interface, PreTrainedModel.post_init) == before


@pytest.mark.parametrize("version", ["5.16.1", "4.57.0", "6.0.0"])
def test_a_version_outside_the_range_is_named(version, monkeypatch):
    monkeypatch.setattr(integration.transformers, "__version__", version)
    with pytest.raises(ImportError, match=rf"≥ 5.17, < 6; installed is {version}.*pip install"):
        install.__wrapped__()


# --- a transformers, or peft, of which something has moved -----------------------------------------------------------

ROOT = Path(__file__).parents[2]
RANGES = {False: "rsa_hf works with transformers ≥ 5.17, < 6; installed is", True: "rsa_hf works with peft ≥ 0.19.1;"}
PEFT_HOOKS = peft_hooks.HOOKS


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

    def require_named(found, name, peft, how, moved):
        for said in found["said"]:  # also the second time
            assert RANGES[peft] in said
            assert re.search(rf"\b{name}\b", said.partition(RANGES[peft])[2])
            assert "Install a version that rsa_hf was tested with" in said
        # Without an essential hook of PEFT those into transformers are in place, without another one all that fit.
        optional = how.endswith("not essential")
        installed = [*(hook_table.TRANSFORMERS_HOOKS if peft or optional else ()), *(PEFT_HOOKS if optional else ())]
        ours = [hook for hook in installed if not moved(hook)]
        assert sorted(found["touched"]) == sorted(map(place, ours))
        if peft not in unmoved:
            unmoved[peft] = outcome(peft=peft)["plain"]
        assert found["plain"] == unmoved[peft]
        seen[f"{how} in {'peft' if peft else 'transformers'}"] += 1

    yield require_named
    for kind, count in seen.items():
        note(Part.MOVING_TRANSFORMERS, kind, {"named, nothing installed, plain models give the same bits": count})


def cases(names):
    """Once each, of transformers and of peft."""
    return list(
        dict.fromkeys(
            [(False, name) for name in names(hook_table.TRANSFORMERS_HOOKS)] + [(True, n) for n in names(PEFT_HOOKS)]
        )
    )


def functions(of):
    # A special method's name is the language's. And what transformers' own hooks need is never left to those of peft.
    known = {hook.name for hook in hook_table.TRANSFORMERS_HOOKS} if of is PEFT_HOOKS else set()
    return [hook.name for hook in of if not hook.name.startswith("__") and hook.name not in known]


def place(hook):
    owner = resolve_name(hook.owner)  # peft.tuners.ia3:IA3Model is peft.tuners.ia3.model.IA3Model
    return f"{owner.__module__}.{owner.__qualname__}.{hook.name}" if class_of(hook) else f"{hook.owner}.{hook.name}"


def class_of(hook):
    return hook.owner.partition(":")[2]


def owners(of):
    return [class_of(hook) for hook in of if class_of(hook)]


def essential(peft, name):
    hooks = PEFT_HOOKS if peft else hook_table.TRANSFORMERS_HOOKS
    return any(hook.essential for hook in hooks if name in (hook.name, class_of(hook)))


@pytest.mark.slow  # each starts an interpreter and imports torch and transformers
@pytest.mark.parametrize(("peft", "name"), cases(functions) + cases(owners))
def test_what_is_renamed_is_named_and_nothing_is_half_installed(peft, name, require_named):
    how = f"a {'class' if name.lstrip('_')[0].isupper() else 'function'} is renamed"
    how += "" if essential(peft, name) else ", not essential"
    require_named(outcome(renamed=name, peft=peft), name, peft, how, lambda hook: name in (hook.name, class_of(hook)))


@pytest.mark.slow  # the same
@pytest.mark.parametrize(
    ("peft", "hook"),
    [(False, hook) for hook in hook_table.TRANSFORMERS_HOOKS] + [(True, hook) for hook in PEFT_HOOKS],
    ids=lambda value: value if isinstance(value, bool) else str(value),
)
def test_other_parameters_are_named_and_nothing_is_half_installed(peft, hook, require_named):
    module, _, cls = hook.owner.partition(":")
    found = outcome(other=[module, cls, hook.name], peft=peft)
    assert "was expected to take" in found["said"][0]
    how = "a function takes other parameters" + ("" if hook.essential else ", not essential")
    require_named(found, hook.name, peft, how, lambda other: other == hook)


class Inherits:
    def second(self):
        pass


def hook_of(owner, name, parameters=("self",), **kwargs):
    def wrap(original):
        return lambda self: original(self)

    return Hook(f"{__name__}:{owner}", name, parameters, wrap, "a test", "the test", **kwargs)


@pytest.mark.parametrize(
    "moved",
    [("Inherits", "gone", ()), ("Gone", "second", ()), ("Inherits", "second", ("self", "more"))],
    ids=["a function", "a class", "a parameter"],
)
def test_a_hook_that_is_not_essential_is_left_out_with_a_warning(moved, caplog):
    other = hook_of("Inherits", "second")
    install_hooks([hook_of(*moved, essential=False), other], "Fits 1.")
    assert is_installed(other)
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"Fits 1. {moved[0]}.{moved[1]} does not fit")
    assert said.endswith("Until then: the test.")
    with pytest.raises(ImportError, match=r"does not fit"):
        install_hooks([hook_of(*moved)], "Fits 1.")


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
