"""Models in installed packages. tests/training/test_run.py has names that are wrong."""

from pathlib import Path

import rsa_hf
from rsa_hf.utils.locate import locate


def test_a_package_name_is_replaced_by_its_folder():
    assert locate("package:rsa_hf/training") == str(Path(rsa_hf.__file__).parent / "training")


def test_any_other_name_is_unchanged():
    for name in ("gpt2", "./package", "someone/package:x"):
        assert locate(name) == name
