"""Memory that nobody wrote to is NaN in these tests: what is read before it was written cannot pass."""

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory():
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
