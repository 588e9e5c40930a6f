"""`rsa_hf.tasks` exports its names lazily."""

import pytest

from rsa_hf import tasks


def test_every_public_name_exists():
    assert all(getattr(tasks, name).__name__ == name for name in tasks.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'absent'"):
        _ = tasks.absent
