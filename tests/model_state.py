"""Check that a model, its config and its modules are as before."""

import copy

import pytest
import torch

from rsa_hf import patch_model


def state_of(model):
    """A copy of the weights and the config, and the names of the modules."""
    modules = [name for name, _ in model.named_modules()]
    return copy.deepcopy(model.state_dict()), copy.deepcopy(model.config.to_dict()), modules


def assert_same_state(model, before):
    weights, config, modules = before
    assert list(model.state_dict()) == list(weights)
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name
    assert model.config.to_dict() == config
    assert [name for name, _ in model.named_modules()] == modules


def assert_refused(model, error, message, *arguments):
    """Check that patching raises an error and leaves the model as it was."""
    before = state_of(model)
    with pytest.raises(error, match=message):
        patch_model(model, *arguments)
    assert_same_state(model, before)
