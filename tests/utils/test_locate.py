"""A model that an installed package brings along; what is wrong with a name is tried in tests/training/test_run.py."""

from pathlib import Path

import rsa_hf
from rsa_hf.utils.locate import locate


def test_a_folder_of_an_installed_package():
    assert locate("package:rsa_hf/training") == str(Path(rsa_hf.__file__).parent / "training")


def test_any_other_name_stays():
    for name in ("gpt2", "./package", "someone/package:x"):
        assert locate(name) == name
