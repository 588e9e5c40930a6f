"""Each part of the package imports only from parts below it."""

import ast
import graphlib
import re
import sys
from pathlib import Path

import pytest

import rsa_hf

PACKAGE = Path(rsa_hf.__file__).parent

# From the maths up to the command line. A part imports only from parts before it.
LAYERS = (
    "utils",
    *("rem", "ops", "config", "heads", "saved_plan"),  # the computation and the plan
    *("report", "plots", "hub", "models", "integration"),  # the contact with transformers
    *("patching", "checks", "peft", "calibration"),  # adding heads to a model
    *("training", "tasks", "run", "cli"),  # the uses
    *("__init__", "startup"),
)


def imports(file: Path, *, at_import: bool) -> set[str]:
    """The modules of the package that a file imports, e.g. "ops.chunked"; with `at_import`, not those in functions."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    inside = {
        node
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    found = set()
    for node in ast.walk(tree):
        if at_import and node in inside:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rsa_hf":
            for alias in node.names:
                found |= {name(f"{node.module}.{alias.name}") or name(node.module)}
        elif isinstance(node, ast.Import):
            found |= {name(alias.name) for alias in node.names if alias.name.split(".")[0] == "rsa_hf"}
    return {module for module in found if module is not None}


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


def test_every_part_has_a_layer():
    assert {module.split(".")[0] for module in FILES} == set(LAYERS)


@pytest.mark.parametrize("part", LAYERS)
def test_a_part_imports_only_from_parts_below_it(part):
    below = set(LAYERS[: LAYERS.index(part)])
    for module, file in FILES.items():
        if module.split(".")[0] == part:
            used = {found.split(".")[0] for found in imports(file, at_import=False)} - {part}
            assert used <= below, f"{module} imports {sorted(used - below)}"


def test_imports_have_no_cycle():
    graph = {module: imports(file, at_import=True) - {module} for module, file in FILES.items()}
    # A package imports its own modules, which may import each other through it.
    graph = {module: {m for m in used if not m.startswith(f"{module}.")} for module, used in graph.items()}
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert set(FILES) <= set(order)


def test_a_part_imports_only_public_names_of_another():
    trees = {module: ast.parse(file.read_text(encoding="utf-8")) for module, file in FILES.items()}
    public = {
        module: set(ast.literal_eval(node.value))
        for module, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    }
    for module, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                public.setdefault(module, set()).update(public[name(node.module)])
    hidden = set()
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("rsa_hf."):
                continue
            source = name(node.module)
            if source.split(".")[0] != module.split(".")[0]:
                used = {alias.name for alias in node.names if name(f"{node.module}.{alias.name}") is None}
                hidden |= {f"{source}.{each}" for each in used - public[source] if not each.isupper()}
    assert not hidden


def test_every_imported_package_is_a_requirement():
    """Also a package that another requirement installs: it may stop doing so."""
    text = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
    lists = text[text.index("\ndependencies = [") : text.index("\ndev = [")]
    required = {found.lower().replace("_", "-") for found in re.findall(r'"([A-Za-z][\w-]*)', lists)}
    imported = set()
    for file in FILES.values():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                imported.add(node.module)
            elif isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
    packages = {module.split(".")[0] for module in imported} - {*sys.stdlib_module_names, "rsa_hf"}
    assert {"torch", "transformers", "yaml"} <= packages
    distributions = {"yaml": "pyyaml", "sklearn": "scikit-learn"}
    assert {distributions.get(each, each.lower().replace("_", "-")) for each in packages} <= required


def test_imports_inside_functions_are_told_apart(tmp_path):
    file = tmp_path / "rem.py"
    file.write_text("def f():\n    from rsa_hf.heads import RSAHeads\nimport rsa_hf.config\n", encoding="utf-8")
    assert imports(file, at_import=False) == {"heads", "config"}
    assert imports(file, at_import=True) == {"config"}
