"""The hooks fit the installed transformers, say so where they do not, and leave it whole."""

import subprocess
import sys
import textwrap

import pytest
import torch
from transformers.modeling_utils import AttentionInterface, PreTrainedModel

import rsa_hf.hooks as hooks
import rsa_hf.versions as versions
from families import build, inputs
from rsa_hf import RSAConfig, patch_model


def test_installing_again_does_nothing():
    before = AttentionInterface.get_interface, PreTrainedModel.post_init
    hooks.install()
    assert (AttentionInterface.get_interface, PreTrainedModel.post_init) == before


@pytest.mark.parametrize("version", ["5.16.1", "4.57.0", "6.0.0"])
def test_a_version_outside_the_range_is_named(version, monkeypatch):
    monkeypatch.setattr(versions.transformers, "__version__", version)
    with pytest.raises(ImportError, match=rf"≥ 5.17, < 6; installed is {version}.*pip install"):
        hooks.install()


MOVED = """
    import transformers
    from transformers import modeling_utils, configuration_utils
    from transformers.generation.continuous_batching import continuous_api
    from transformers.utils import hub
    {move}
    originals = {{
        (owner, name): owner.__dict__.get(name)
        for owner in (modeling_utils.PreTrainedModel, modeling_utils.AttentionInterface,
                      configuration_utils.PreTrainedConfig, continuous_api.ContinuousMixin, hub.PushToHubMixin)
        for name in list(owner.__dict__)
    }}
    try:
        import rsa_hf
    except ImportError as error:
        print(error)
    else:
        raise SystemExit("imported all the same")
    for (owner, name), value in originals.items():
        assert owner.__dict__.get(name) is value, name
    from transformers import GPT2Config, GPT2Model
    GPT2Model(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9)) if {builds} else None
"""


@pytest.mark.slow  # each starts an interpreter and imports torch and transformers
@pytest.mark.parametrize("hook", hooks.HOOKS, ids=lambda hook: hook.name)
@pytest.mark.parametrize("how", ["renamed", "other parameters"])
def test_a_moved_internal_is_named_and_nothing_is_half_installed(hook, how):
    owner = f"{hook.owner.__module__.rpartition('.')[2]}.{hook.owner.__name__}"
    move = f"del {owner}.{hook.name}" if how == "renamed" else f"{owner}.{hook.name} = lambda changed: None"
    code = textwrap.dedent(MOVED).format(move=move, builds=False)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{hook.owner.__name__}.{hook.name} was expected to take" in done.stdout
    assert "rsa_hf works with transformers ≥ 5.17, < 6" in done.stdout


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
