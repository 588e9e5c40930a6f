"""The hooks fit the installed transformers; where they do not, they name the reason and change nothing."""

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
def test_a_version_outside_the_range_is_an_error(version, monkeypatch):
    monkeypatch.setattr(integration.transformers, "__version__", version)
    with pytest.raises(ImportError, match=rf"≥ 5.17, < 6; installed is {version}.*pip install"):
        install.__wrapped__()


# --- another version of transformers or peft -------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
RANGES = {False: "rsa_hf works with transformers ≥ 5.17, < 6; installed is", True: "rsa_hf works with peft ≥ 0.19.1;"}
PEFT_HOOKS = peft_hooks.HOOKS
# Whether a hook is into peft, and the hook.
HOOKS = [(False, hook) for hook in hook_table.TRANSFORMERS_HOOKS] + [(True, hook) for hook in PEFT_HOOKS]


def outcome(renamed=None, other=None, peft=False):
    """Run moved.py and return what it prints."""
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
    """Compare an outcome with that of unchanged libraries, and record the number of cases."""
    unmoved: dict[bool, str] = {}
    seen: Counter[str] = Counter()

    def require_named(found, name, peft, how, moved):
        for said in found["said"]:  # by the import, and by the use of a public name
            assert RANGES[peft] in said
            assert re.search(rf"\b{name}\b", said.partition(RANGES[peft])[2])
            assert "Install a version that rsa_hf was tested with" in said
        # If an essential hook of PEFT does not fit, only those of transformers are installed; otherwise all that fit.
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


def renamed():
    """Each function and class that hooks rely on, and whether it is peft's."""
    # Special methods cannot be renamed. A name that transformers' hooks rely on is not tried for peft's again.
    known = {hook.name for hook in hook_table.TRANSFORMERS_HOOKS}
    functions = [(peft, hook.name) for peft, hook in HOOKS if not (peft and hook.name in known)]
    functions = [(peft, name) for peft, name in functions if not name.startswith("__")]
    classes = [(peft, class_of(hook)) for peft, hook in HOOKS if class_of(hook)]
    return dict.fromkeys(functions + classes)


def place(hook):
    owner = resolve_name(hook.owner)  # e.g. peft.tuners.ia3:IA3Model is defined in peft.tuners.ia3.model
    return f"{owner.__module__}.{owner.__qualname__}.{hook.name}" if class_of(hook) else f"{hook.owner}.{hook.name}"


def class_of(hook):
    return hook.owner.partition(":")[2]


def essential(peft, name):
    return any(hook.essential for of, hook in HOOKS if of is peft and name in (hook.name, class_of(hook)))


@pytest.mark.slow  # each starts an interpreter and imports torch and transformers
@pytest.mark.parametrize(("peft", "name"), renamed())
def test_a_renamed_function_or_class_is_named_and_nothing_is_half_installed(peft, name, require_named):
    how = f"a {'class' if name.lstrip('_')[0].isupper() else 'function'} is renamed"
    how += "" if essential(peft, name) else ", not essential"
    require_named(outcome(renamed=name, peft=peft), name, peft, how, lambda hook: name in (hook.name, class_of(hook)))


@pytest.mark.slow  # each starts an interpreter and imports torch and transformers
@pytest.mark.parametrize(("peft", "hook"), HOOKS, ids=str)
def test_changed_parameters_are_named_and_nothing_is_half_installed(peft, hook, require_named):
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

    return Hook(f"{__name__}:{owner}", name, parameters, wrap, "test", **kwargs)


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
    assert said.endswith("Until then it does not test.")
    with pytest.raises(ImportError, match=r"does not fit"):
        install_hooks([hook_of(*moved)], "Fits 1.")


def test_a_module_that_does_not_say_its_direction_needs_a_trial_run_or_a_setting():
    model = build("gpt2")
    patch_model(model)
    for block in model.h:
        del block.attn.is_causal
    with pytest.raises(ValueError, match="GPT2Attention does not say whether it is causal.*RSAConfig"):
        model(**inputs("gpt2"))
    other = build("gpt2")
    for block in other.h:
        del block.attn.is_causal
    assert patch_model(other).config.rsa["plan"]["causal"] is True  # found by the trial run
    patch_model(other, RSAConfig(causal=True))
    with torch.no_grad():
        other(**inputs("gpt2"))


def test_another_module_named_rsa_is_left_alone():
    model, batch = build("gpt2"), inputs("gpt2")
    with torch.no_grad():
        expected = model(**batch)[0]
        model.h[0].attn.rsa = torch.nn.Linear(2, 2)
        assert torch.equal(model(**batch)[0], expected)
