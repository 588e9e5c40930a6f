"""No file can run code: YAML and tensors are read safely. Ruff's rules S find eval, exec, pickle and shells."""

import re
from pathlib import Path

import pytest

import rsa_hf
from rsa_hf.tasks.defect_data import DefectDataConfig
from rsa_hf.training.arguments import read_run_config, read_yaml


def test_no_call_allows_a_library_to_run_code():
    for path in Path(rsa_hf.__file__).parent.rglob("*.py"):
        assert not re.search("weights_only=False|trust_remote_code=True", path.read_text(encoding="utf-8")), path


def test_yaml_runs_nothing(tmp_path):
    made = tmp_path / "made"
    with pytest.raises(ValueError, match="could not determine a constructor"):
        read_yaml(f"a: !!python/object/apply:os.mkdir [{str(made)!r}]")
    assert not made.exists()


def test_settings_import_nothing(tmp_path, monkeypatch):
    """Where a key has any type, jsonargparse reads a mapping with `class_path` as a class to import."""
    (tmp_path / "marker_of_an_import.py").write_text(
        f"open({str(tmp_path / 'made')!r}, 'w').close()\nclass Foo: pass\n"
    )
    path = tmp_path / "run.yaml"
    path.write_text("model: {name_or_path: x, config_overrides: {a: {class_path: marker_of_an_import.Foo}}}\n")
    monkeypatch.syspath_prepend(tmp_path)
    override = "--config_overrides.b={class_path: marker_of_an_import.Foo}"
    config = read_run_config([str(path), override], DefectDataConfig)
    assert config.model.config_overrides == {key: {"class_path": "marker_of_an_import.Foo"} for key in "ab"}
    assert not (tmp_path / "made").exists()
