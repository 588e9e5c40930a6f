"""Load what earlier versions saved and compare its outputs. test_fixtures.py runs this in a process of its own.

    python earlier_versions.py fixtures/0.1

It prints one line of JSON.

A model's folder holds `checkpoint`, or `base` and `adapter`; `inputs.safetensors`, the arguments of one or more calls,
each of which continues from the memory of the call before; `expected.safetensors`, the outputs of the calls; and
`fixture.json`, the Auto class and what bitwise results depend on.

Outputs must agree to a tolerance, since P V may be summed up in another order. This module sets environment variables
before it imports torch, so that the choice of kernels does not depend on the processor and its number of cores.
"""

import os

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "HF_HUB_OFFLINE": "1",
}
os.environ.setdefault("RSA_HF_BACKEND", "pytorch")

import hashlib
import json
import platform
import sys
import traceback
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

import rsa_hf.peft

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # relative to the largest output
MEMORIES = ("mems", "state")  # outputs that are arguments of the next call


def arithmetic():
    """What bitwise results depend on: versions, and a digest of the operations of models and RSA heads."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 32, generator=generator)
    results = [
        x @ x,
        x.softmax(-1),
        x.sigmoid(),
        x.tanh(),
        x.cos(),
        x.sin(),
        x.exp(),
        x.abs() ** x,
        x.sum(),
        x.cumsum(0),
    ]
    digest = hashlib.sha256(b"".join(result.numpy().tobytes() for result in results))
    return {
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "digest": digest.hexdigest(),
    }


def load_model(folder, auto_class):
    """Load a folder's model through an Auto class; with an adapter, rsa_hf.peft.load patches the plain base."""
    auto = getattr(transformers, auto_class)
    if not (folder / "adapter").is_dir():
        return auto.from_pretrained(folder / "checkpoint").eval()
    base = auto.from_pretrained(folder / "base")
    # The adapter was trained on this base in a folder that no longer exists.
    return rsa_hf.peft.load(base, folder / "adapter").eval()


@torch.no_grad()
def outputs(model, inputs):
    """Return the outputs of the calls, named by call and output: "1.logits", "1.mems.0".

    Args:
        model: any model.
        inputs: the arguments, named by call and argument: "0.input_ids", "1.input_ids".
    """
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
    return {key: tensor.contiguous() for key, tensor in found.items()}


def differences(found, expected, *, bitwise):
    """Return the outputs that are not as expected, each with what is wrong."""
    wrong = dict.fromkeys(found.keys() ^ expected.keys(), "in only one of the two")
    for key in found.keys() & expected.keys():
        one, other = found[key], expected[key]
        if ".state." in key and one.dim() == other.dim():  # a state may have room beyond what it holds
            one = one[tuple(slice(size) for size in other.shape)]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            wrong[key] = f"{one.dtype} {tuple(one.shape)}, not {other.dtype} {tuple(other.shape)}"
            continue
        error = (one.double() - other.double()).abs().max().item()
        allowed = 0.0 if bitwise else TOLERANCE.get(other.dtype, 0.0) * other.double().abs().max().item()
        if not error <= allowed:
            wrong[key] = f"differs by {error:g}; at most {allowed:g} is allowed"
    return wrong


@torch.no_grad()
def unnoticed(model, inputs, expected, *, bitwise, elements=slice(None)):
    """The control: move RSA parameters; return those whose change goes unnoticed, and how many were moved.

    Args:
        model: a model with the expected outputs.
        inputs: as for `outputs`.
        expected: what it returns.
        bitwise: as for `differences`.
        elements: which elements of each parameter to move, one after the other.
    """
    missed, checked = [], 0
    for name, parameter in model.named_parameters():
        # An adapter brings its own values. The base's values are not used.
        if ".rsa." not in name or ".original_module." in name:
            continue
        for i in range(parameter.numel())[elements]:
            before = parameter[i].clone()
            parameter[i] += 0.02
            checked += 1
            if not differences(outputs(model, inputs), expected, bitwise=bitwise):
                missed.append(f"{name}[{i}]")
            parameter[i] = before
    return missed, checked


def check_model(folder):
    """Load one model, compare its outputs, and run the control."""
    written = json.loads((folder / "fixture.json").read_text())
    inputs, expected = load_file(folder / "inputs.safetensors"), load_file(folder / "expected.safetensors")
    model = load_model(folder, written["auto_class"])
    wrong = differences(outputs(model, inputs), expected, bitwise=False)  # P V may be summed up in another order
    missed, checked = unnoticed(model, inputs, expected, bitwise=False, elements=slice(1))
    return {"wrong": wrong, "unnoticed": missed, "checked": checked}


def main(version):
    results = {}
    for folder in sorted(path.parent for path in version.glob("*/fixture.json")):
        try:
            results[folder.name] = check_model(folder)
        except Exception:  # so that the other checks still run
            results[folder.name] = {"error": traceback.format_exc()}
    print(json.dumps(results))


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    main(Path(sys.argv[1]))
