"""The hooks fit the installed transformers; where they do not, they name the reason and change nothing."""

import pytest
import torch

import rsa_hf.integration as integration
from families import build, inputs
from rsa_hf import RSAConfig, patch_model, unpatch_model
from rsa_hf.integration import install
from rsa_hf.integration.hooks import Hook, install_hooks, is_installed


@pytest.mark.parametrize("version", ["5.16.1", "4.57.0", "5.25.0", "6.0.0"])
def test_a_version_outside_the_range_is_an_error(version, monkeypatch):
    monkeypatch.setattr(integration.transformers, "__version__", version)
    with pytest.raises(ImportError, match=rf"≥ 5.17, < 5.25; installed is {version}.*pip install"):
        install.__wrapped__()


# --- another version of transformers or peft -------------------------------------------------------------------------


class Owner:
    def first(self):
        pass

    def second(self):
        pass


def hook_of(owner, name, wrap=lambda original: lambda self: original(self), **kwargs):
    return Hook(f"{__name__}:{owner}", name, wrap, "test", **kwargs)


MOVED = {
    "a function": ("Owner", "gone"),
    "a class": ("Gone", "second"),
    "a parameter": ("Owner", "second", lambda original: lambda self, more: original(self)),
}


@pytest.mark.parametrize("moved", MOVED.values(), ids=MOVED)
def test_without_an_essential_hook_none_is_installed_and_another_is_left_out_with_a_warning(moved, caplog):
    first, second = hook_of("Owner", "first"), hook_of("Owner", "second")
    with pytest.raises(ImportError, match=rf"Fits 1. {moved[0]}.{moved[1]} does not fit.*Install a version"):
        install_hooks([first, hook_of(*moved)], "Fits 1.")
    assert not is_installed(first)
    install_hooks([hook_of(*moved, essential=False), second], "Fits 1.")
    assert is_installed(second)
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"Fits 1. {moved[0]}.{moved[1]} does not fit")
    assert said.endswith("Until then it does not test.")


def test_a_module_that_no_longer_says_its_direction_needs_a_setting():
    model = build("gpt2")
    patch_model(model)
    for block in model.h:
        del block.attn.is_causal
    with pytest.raises(ValueError, match="GPT2Attention does not say whether it is causal.*RSAConfig"):
        model(**inputs("gpt2"))
    patch_model(unpatch_model(model), RSAConfig(causal=True))
    with torch.no_grad():
        model(**inputs("gpt2"))


def test_another_module_named_rsa_is_left_alone():
    model, batch = build("gpt2"), inputs("gpt2")
    with torch.no_grad():
        expected = model(**batch)[0]
        model.h[0].attn.rsa = torch.nn.Linear(2, 2)
        assert torch.equal(model(**batch)[0], expected)
