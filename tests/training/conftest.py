"""Fixtures for the tests of training."""

import pytest
from accelerate.state import AcceleratorState


@pytest.fixture
def fresh_accelerator():
    """Let a run choose its own mixed precision, which Accelerate otherwise keeps from the first run of a process."""
    AcceleratorState._reset_state()
    yield
    AcceleratorState._reset_state()
