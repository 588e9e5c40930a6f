"""Models in installed packages."""

from pathlib import Path

import rsa_hf
from rsa_hf.utils.locate import locate


def test_a_package_name_is_replaced_by_its_folder_and_any_other_is_unchanged():
    assert locate("package:rsa_hf/training") == str(Path(rsa_hf.__file__).parent / "training")
    for name in ("gpt2", "./package", "someone/package:x"):
        assert locate(name) == name
