"""For the tests of the Triton kernels: the interpreter where there is no GPU, and small chunks."""

import pytest

pytest.importorskip("triton", reason="needs Triton, which exists for Linux: pip install 'rsa_hf[gpu]'")

from triton_interpreter import repair_interpreter

from rsa_hf.ops.triton import launch
from rsa_hf.ops.triton.tuning import Tuning, block_of

repair_interpreter()


def use_small_chunks(monkeypatch):
    """Let the kernels use chunks of 16, so that short texts have several."""
    monkeypatch.setattr(launch, "candidates", lambda kernel, D, bits: [Tuning(16, block_of(D, 32), 4, 2)])
