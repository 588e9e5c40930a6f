"""A short name for the fixture that most tests of the commands use."""

import pytest


@pytest.fixture
def run(run_rsa_hf):
    return run_rsa_hf
