"""Uninitialised memory is NaN in these tests, so that a result that reads it is wrong."""

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory():
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
