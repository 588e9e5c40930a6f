"""Nothing in the package can run code that a file brings: no pickle, no eval, plain YAML, tensors alone."""

import ast
import sys
from pathlib import Path

import pytest

import rsa_hf
from rsa_hf.tasks.defect_data import DefectDataConfig
from rsa_hf.training.arguments import read_run_config, read_yaml

PACKAGE = Path(rsa_hf.__file__).parent
ALLOWED = {
    "arguments.py": ["yaml.load"],  # a SafeLoader; it refuses Python's tags (see `test_odd_yaml`)
    "convert_transformer_xl_checkpoint.py": ["import pickle"],  # the error that torch.load(weights_only=True) raises
    "python_defects.py": ["compile"],  # compiled to be compared, and never run
}


def dangers(source: str) -> list[str]:
    """Calls and imports by which reading a file could run what it holds."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found += [
                f"import {n}"
                for n in names
                if n.split(".")[0] in ("pickle", "dill", "cloudpickle", "marshal", "shelve")
            ]
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if called in ("eval", "exec", "compile", "__import__", "os.system", "yaml.load", "yaml.unsafe_load"):
            found.append(called)
        if called == "torch.load" and keywords.get("weights_only") != "True":
            found.append(called)
        if keywords.get("trust_remote_code") == "True" or keywords.get("shell") == "True":
            found.append(f"{called}(trust_remote_code or shell)")
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_file_of_the_package(path):
    assert dangers(path.read_text(encoding="utf-8")) == ALLOWED.get(path.name, [])


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "eval('1')",
        "exec(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "yaml.load(text, Loader=yaml.Loader)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_the_search_finds_them(source):
    assert len(dangers(source)) == 1


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
