"""Uninitialised memory is NaN in these tests, so that a result that reads it is wrong; and the choice of a backend."""

import pytest
import torch

from rsa_hf.ops.cpp.build import library


@pytest.fixture(autouse=True)
def poisoned_memory():
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["pytorch", "cpp", "triton"])
def backend(request, monkeypatch):
    """Each backend in turn."""
    if request.param == "triton":
        from ops import kernels_under_test

        kernels_under_test.use_small_chunks(monkeypatch)
    if request.param == "cpp" and isinstance(library(), str):
        pytest.skip(library())
    monkeypatch.setattr("rsa_hf.ops.autograd.REQUESTED", request.param)
    return request.param
