"""The kernels compile for an H200. This needs no GPU, but a process in which kernels are not interpreted."""

import json

import pytest

from launching import ROOT, run_python

pytest.importorskip("triton", reason="needs Triton, which exists for Linux: pip install 'rsa_hf[gpu]'")

SHARED_MEMORY = 227 * 1024  # bytes of a multiprocessor


@pytest.mark.slow  # compiles more than forty kernels
def test_every_variant_fits_the_chip():
    run = run_python(ROOT / "tests/ops/compile_for_hopper.py", code=0, timeout=None, TRITON_INTERPRET=None)
    found = {kernel["name"]: kernel for kernel in map(json.loads, run.stdout.splitlines())}
    assert len(found) > 40
    for name, kernel in found.items():
        assert kernel["shared"] <= SHARED_MEMORY, kernel
        if name.startswith(("forward", "backward")):
            assert kernel["tensor_cores"], kernel
        if name.startswith(("forward_bf16", "backward_bf16")):
            assert kernel["wide_loads"], kernel
    # The forward kernel of a plain causal model spills no register.
    assert found["forward_bf16_0"]["stack"] == 0
