"""Each part of the package imports only from parts below it; what it requires; the wheel holds the package alone."""

import ast
import graphlib
import re
import shutil
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest

import rsa_hf
from rsa_hf.integration import TRANSFORMERS_RANGE

PACKAGE = Path(rsa_hf.__file__).parent

# From the maths up to the command line. A part imports only from parts before it.
LAYERS = (
    "utils",
    *("rem", "ops", "config", "layer", "children", "saved_plan"),  # the computation and the plan
    *("report", "plots", "hub", "models", "integration"),  # the contact with transformers
    *("patching", "checks", "peft", "calibration"),  # adding heads to a model
    *("training", "tasks", "run", "cli"),  # the uses
    *("__init__", "startup"),
)


def imported(file: Path, for_types: bool) -> set[str]:
    """The dotted names that a file imports, also in functions, with or without those for type checks alone."""
    nodes = set(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    for block in list(nodes):
        if not for_types and isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            nodes -= set(ast.walk(block))
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    members = [(node.module, alias.name) for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]
    return found | {f"{module}.{member}" for module, member in members}


def imports(file: Path) -> set[str]:
    """The modules of the package that a file imports, e.g. "ops.pytorch", but not for type checks."""
    dotted = {each for each in imported(file, for_types=False) if each.split(".")[0] == "rsa_hf"}
    return {name(each) or name(each.rpartition(".")[0]) for each in dotted} - {None}


def name(dotted: str) -> str | None:
    """The dotted name of a module without the package, "__init__" for the package itself, or None."""
    path = PACKAGE.joinpath(*dotted.split(".")[1:])
    if path == PACKAGE:
        return "__init__"
    return ".".join(path.relative_to(PACKAGE).parts) if path.is_dir() or path.with_suffix(".py").is_file() else None


def module_of(file: Path) -> str:
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


FILES = {module_of(file): file for file in sorted(PACKAGE.rglob("*.py"))}


def test_every_part_has_a_layer_and_every_file_a_name_of_its_own():
    assert {module.split(".")[0] for module in FILES} == set(LAYERS)
    files = Counter(file.name for file in PACKAGE.rglob("*.py") if file.name != "__init__.py")
    assert files.most_common(1)[0][1] == 1, files.most_common(3)


def test_parts_import_only_from_parts_below_them():
    upwards = set()
    for module, file in FILES.items():
        part = module.split(".")[0]
        allowed = {*LAYERS[: LAYERS.index(part)], part}
        upwards |= {(module, used) for used in imports(file) if used.split(".")[0] not in allowed}
    assert not upwards


def test_imports_have_no_cycle():
    graph = {module: imports(file) - {module} for module, file in FILES.items()}
    # A package exports names of its own modules, which may import each other through it.
    graph = {module: {m for m in used if not m.startswith(f"{module}.")} for module, used in graph.items()}
    assert set(FILES) <= set(graphlib.TopologicalSorter(graph).static_order())


def test_every_imported_package_is_a_requirement():
    """Also one that another requirement installs: it may stop doing so. The experiments and tests are none."""
    text = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
    lists = text[text.index("\ndependencies = [") : text.index("\ndev = [")]
    required = {found.lower().replace("_", "-") for found in re.findall(r'"([A-Za-z][\w-]*)', lists)}
    packages = {each.split(".")[0] for file in FILES.values() for each in imported(file, for_types=True)}
    packages -= {*sys.stdlib_module_names, "rsa_hf"}
    assert {"torch", "transformers", "yaml"} <= packages
    distributions = {"yaml": "pyyaml", "sklearn": "scikit-learn"}
    assert {distributions.get(each, each.lower().replace("_", "-")) for each in packages} <= required
    lowest, above = TRANSFORMERS_RANGE
    assert f'"transformers>={lowest},<{above}"' in lists


def test_the_wheel_holds_the_package_alone(tmp_path):
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="building a wheel needs hatchling")
    for part in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(PACKAGE.parent / part, tmp_path)
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in ("rsa_hf", "experiments", "tests"):
        shutil.copytree(PACKAGE.parent / folder, tmp_path / folder, ignore=ignored)
    [built] = wheel.WheelBuilder(str(tmp_path)).build(directory=str(tmp_path / "dist"))
    names = zipfile.ZipFile(built).namelist()
    assert {file.split("/")[0].split("-")[0] for file in names} == {"rsa_hf"}
    assert {"rsa_hf/hub/model_card.md", "rsa_hf/startup/sitecustomize.py", "rsa_hf/py.typed"} <= set(names)
    assert {f"rsa_hf/ops/cpp/{name}" for name in ("scan.cpp", "operator.cpp", "problem.h")} <= set(names)
