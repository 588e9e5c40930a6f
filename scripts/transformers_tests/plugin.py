"""A pytest plugin: transformers' own tests find rsa_hf in every GPT-2, RoBERTa and Llama that they build.

RSA_HF_ARM says how: `plain` does not even import rsa_hf, `shut` patches with shut gates, `open` with gates of 1/2.
"""

import os
import random
import sys
import types

import numpy
import pytest
import torch

ARM = os.environ["RSA_HF_ARM"]
GATES = {"shut": float("-inf"), "open": 0.0}
ATTENTION = {"gpt2": "h.{}.attn", "roberta": "encoder.layer.{}.attention.self", "llama": "layers.{}.self_attn"}

# test_modeling_common.py mixes these two into its own; the source distribution has neither.
ABSENT = {"tests.exporters.test_export": "ExportTesterMixin", "tests.generation.test_utils": "GenerationTesterMixin"}


def pytest_configure() -> None:
    for name, mixin in ABSENT.items():
        try:
            __import__(name)
        except ModuleNotFoundError:
            package, module = types.ModuleType(name.rpartition(".")[0]), types.ModuleType(name)
            package.__path__ = []
            setattr(module, mixin, type(mixin, (), {}))
            sys.modules.setdefault(package.__name__, package)
            sys.modules[name] = module
    if ARM != "plain":
        _patch_all(GATES[ARM])


def _patch_all(gate: float) -> None:
    from transformers.modeling_utils import PreTrainedModel

    from rsa_hf import RSAConfig
    from rsa_hf.saved_plan import SavedPlan, write_plan

    post_init = PreTrainedModel.post_init

    def with_plan(self: PreTrainedModel) -> None:
        # What patch_model puts into the config, before the model is built from it.
        pattern, config = ATTENTION.get(self.config.model_type), self.config
        if pattern is not None and vars(config).get("rsa") is None:
            names = tuple(pattern.format(i) for i in range(config.num_hidden_layers))
            heads = [config.num_attention_heads] * len(names)
            config.rsa = write_plan(SavedPlan.of(names, RSAConfig(gate_init=gate), heads))
        post_init(self)

    PreTrainedModel.post_init = with_plan


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Every arm draws the same numbers."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _is_patched(request: pytest.FixtureRequest) -> None:
    """No test of a patched arm is run on plain models unnoticed."""
    if ARM != "plain" and request.node.name == "test_model_is_small":
        from rsa_hf import is_patched

        case = request.instance
        config, _ = case.model_tester.prepare_config_and_inputs_for_common()
        assert all(is_patched(model_class(config)) for model_class in case.all_model_classes)
