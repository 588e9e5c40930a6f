"""The kernels compile for an H200. This needs no GPU, but a process in which kernels are not interpreted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton, which exists for Linux: pip install 'rsa_hf[gpu]'")

ROOT = Path(__file__).parents[2]
SHARED_MEMORY = 227 * 1024  # bytes of a multiprocessor


def compile_for_hopper(*names):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, str(Path(__file__).with_name("compile_for_hopper.py")), *names]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return {found["name"]: found for found in map(json.loads, run.stdout.splitlines())}


def assert_fits_the_chip(found):
    for name, kernel in found.items():
        assert kernel["shared"] <= SHARED_MEMORY, kernel
        if name.startswith(("forward", "backward")):
            assert kernel["tensor_cores"], kernel
        if name.startswith(("forward_bf16", "backward_bf16")):
            assert kernel["wide_loads"], kernel


def test_the_main_kernels_fit_the_chip():
    found = compile_for_hopper("everything", "powers", "learned", "step")
    assert len(found) == 8
    assert_fits_the_chip(found)


@pytest.mark.slow  # compiles more than forty kernels
def test_every_variant_fits_the_chip():
    found = compile_for_hopper()
    assert len(found) > 40
    assert_fits_the_chip(found)
    # The forward kernel of a plain causal model spills no register.
    assert found["forward_bf16_0"]["stack"] == 0
