"""The cost of rsa_hf: the time of its import beside transformers', and of patching a model."""

import json
import os
import subprocess
import sys
from statistics import median

import pytest
import torch
from torch import nn

from families import build
from rsa_hf import is_patched, patch_model

IMPORTS = """
import json, time
begin = time.process_time()
from transformers import GPT2Model  # as any program with a model does
middle = time.process_time()
import rsa_hf
print(json.dumps([middle - begin, time.process_time() - middle]))
"""


@pytest.mark.slow  # starts an interpreter six times, each of which imports torch and transformers
def test_importing_rsa_hf_takes_a_fraction_of_importing_transformers(tmp_path):
    # Processor time excludes other programs, and a ratio excludes the machine's speed. The first run writes the
    # bytecode, which an installed package has on the disk.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment = {**kept, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    times = []
    for _ in range(6):
        done = subprocess.run(
            [sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True, env=environment
        )
        times.append(json.loads(done.stdout.splitlines()[-1]))
    transformers, ours = (median(column) for column in zip(*times[1:], strict=True))
    print(f"transformers with GPT-2: {transformers:.3f} s, rsa_hf with the Trainer and PEFT on top: {ours:.3f} s")
    # Most of it is the Trainer and PEFT, which have hooks.
    assert ours < 0.35 * transformers


def test_patching_reads_no_weight_of_a_linear_layer():
    """Patching a large model, or one whose weights are still on the disk, therefore takes no longer."""
    model = build("llama")
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.fill_(torch.nan)
    hidden = []
    handle = model.norm.register_forward_hook(lambda module, inputs, output: hidden.append(output))
    patch_model(model)
    handle.remove()
    assert is_patched(model)
    assert len(hidden) == 2  # trial runs
    assert all(bool(output.isfinite().all()) for output in hidden)
