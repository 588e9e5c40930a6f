"""No file that is read can run code: plain YAML, tensors alone. Ruff's rules S find eval, exec, pickle and shells."""

import re
import sys
from pathlib import Path

import pytest

import rsa_hf
from rsa_hf.tasks.defect_data import DefectDataConfig
from rsa_hf.training.arguments import read_run_config, read_yaml


def test_nothing_asks_libraries_to_run_code():
    for path in Path(rsa_hf.__file__).parent.rglob("*.py"):
        assert not re.search("weights_only=False|trust_remote_code=True", path.read_text(encoding="utf-8")), path


def test_yaml_runs_nothing(tmp_path):
    made = tmp_path / "made"
    with pytest.raises(ValueError, match="could not determine a constructor"):
        read_yaml(f"a: !!python/object/apply:os.mkdir [{str(made)!r}]")
    assert not made.exists()


def test_settings_import_nothing(tmp_path):
    """jsonargparse takes a mapping with `class_path` below a key of any type for a class to import."""
    (tmp_path / "marker_of_an_import.py").write_text(
        f"open({str(tmp_path / 'made')!r}, 'w').close()\nclass Foo: pass\n"
    )
    path = tmp_path / "run.yaml"
    path.write_text("model: {name_or_path: x, config_overrides: {a: {class_path: marker_of_an_import.Foo}}}\n")
    sys.path.insert(0, str(tmp_path))
    try:
        config = read_run_config(
            [str(path), "--config_overrides.b={class_path: marker_of_an_import.Foo}"], DefectDataConfig
        )
    finally:
        sys.path.remove(str(tmp_path))
    assert config.model.config_overrides == {key: {"class_path": "marker_of_an_import.Foo"} for key in "ab"}
    assert not (tmp_path / "made").exists()
