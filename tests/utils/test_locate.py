"""Models in installed packages."""

from pathlib import Path

import pytest

import rsa_hf
from rsa_hf.utils.locate import locate


def test_a_package_name_is_replaced_by_its_folder_and_any_other_is_unchanged():
    assert locate("package:rsa_hf/training") == str(Path(rsa_hf.__file__).parent / "training")
    for name in ("gpt2", "./", "someone/package:x"):
        assert locate(name) == name
    with pytest.raises(ValueError, match=r"\./no/folder: there is no such folder"):
        locate("./no/folder")
