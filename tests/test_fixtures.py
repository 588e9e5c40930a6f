"""Models and adapters of earlier versions give the same outputs.

A model's folder holds `checkpoint`, or `base` and `adapter`; `inputs.safetensors`, the arguments of one or more calls,
each of which continues from the memory of the call before; `expected.safetensors`, the outputs of the calls; and
`fixture.json`, with the Auto class.
"""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

import rsa_hf.peft
from launching import ROOT

FIXTURES = ROOT / "tests" / "fixtures"
MODELS = sorted(path.parent for path in FIXTURES.glob("*/*/fixture.json"))
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # relative to the largest output: P V may be summed otherwise
MEMORIES = ("mems", "state")  # outputs that are arguments of the next call

pytestmark = pytest.mark.skipif(
    (ROOT / "PKG-INFO").exists(), reason="the source distribution has no fixtures: they are in the repository"
)


def test_version_0_1_has_fixtures():
    assert {path.name for path in (FIXTURES / "0.1").iterdir()} >= {
        *("gpt2", "roberta", "bert", "llama", "t5", "transformer_xl", "gpt2_lora", "roberta_rsa_only", "configs")
    }


@pytest.mark.slow_unless(cpu_backend=["cpp"])
@pytest.mark.usefixtures("cpu_backend")
@pytest.mark.parametrize("folder", MODELS, ids=lambda path: f"{path.parent.name}-{path.name}")
@torch.no_grad()
def test_a_model_gives_the_same_outputs_and_other_ones_when_a_gate_or_rate_changes(folder):
    inputs, expected = load_file(folder / "inputs.safetensors"), load_file(folder / "expected.safetensors")
    model = load_model(folder)
    assert differing(outputs(model, inputs), expected) == []
    # An adapter brings its own values. The base's are not used.
    trained = {n: p for n, p in model.named_parameters() if ".rsa." in n and ".original_module." not in n}
    assert trained or folder.name.startswith("recurrent")  # recurrent networks have no attention
    for name, parameter in trained.items():
        before = parameter[0].clone()
        parameter[0] += 0.02
        assert differing(outputs(model, inputs), expected), name
        parameter[0] = before


def load_model(folder):
    auto = getattr(transformers, json.loads((folder / "fixture.json").read_text())["auto_class"])
    if (folder / "adapter").is_dir():
        return rsa_hf.peft.load(auto.from_pretrained(folder / "base"), folder / "adapter").eval()
    return auto.from_pretrained(folder / "checkpoint").eval()


def outputs(model, inputs):
    """The outputs of the calls, named by call and output: "1.logits", "1.mems.0"; inputs are named likewise."""
    calls = {}
    for key, tensor in inputs.items():
        number, name = key.split(".")
        calls.setdefault(int(number), {})[name] = tensor
    found, memory = {}, {}
    for number in sorted(calls):
        out = model(**calls[number], **memory)
        memory = {name: out[name] for name in MEMORIES if out.get(name) is not None}
        found[f"{number}.logits"] = out.logits
        for name, tensors in memory.items():
            found |= {f"{number}.{name}.{i}": tensor for i, tensor in enumerate(tensors)}
    return found


def differing(found, expected):
    """The names of the outputs that are not as expected."""
    assert found.keys() == expected.keys()
    wrong = []
    for key, other in expected.items():
        one = found[key]
        if ".state." in key and one.dim() == other.dim():  # a state may have room beyond what it holds
            one = one[tuple(slice(size) for size in other.shape)]
        allowed = TOLERANCE.get(other.dtype, 0.0) * other.double().abs().max().item()
        is_same = (one.dtype, one.shape) == (other.dtype, other.shape)
        if not is_same or not (one.double() - other.double()).abs().max().item() <= allowed:
            wrong.append(key)
    return wrong
