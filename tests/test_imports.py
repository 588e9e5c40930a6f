"""The map of imports: every part of the package imports from parts further down alone."""

import ast
import graphlib
import re
import sys
from pathlib import Path

import pytest

import rsa_hf

PACKAGE = Path(rsa_hf.__file__).parent

# From the mathematics up to what a user types. A part imports only from parts before it.
LAYERS = (
    "utils",
    *("rem", "ops", "config", "heads", "saved_plan"),  # the computation, and the plan
    *("report", "plots", "hub", "models", "integration"),  # what meets transformers
    *("patching", "peft"),  # putting heads on a model
    *("training", "tasks", "experiments", "run", "cli"),  # what uses all of it
    *("__init__", "startup"),
)


def imports(file: Path, *, at_import: bool) -> set[str]:
    """The modules of the package that a file imports, as "product.scan"; with those inside of functions or without."""
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
    """A dotted name without the package, where it is a module; "__init__" for the package itself."""
    path = PACKAGE.joinpath(*dotted.split(".")[1:])
    if path == PACKAGE:
        return "__init__"
    return ".".join(path.relative_to(PACKAGE).parts) if path.is_dir() or path.with_suffix(".py").is_file() else None


def module_of(file: Path) -> str:
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


FILES = {module_of(file): file for file in sorted(PACKAGE.rglob("*.py"))}


def test_the_map_knows_every_part():
    assert {module.split(".")[0] for module in FILES} == set(LAYERS)


@pytest.mark.parametrize("part", LAYERS)
def test_a_part_imports_from_parts_below_it(part):
    below = set(LAYERS[: LAYERS.index(part)])
    for module, file in FILES.items():
        if module.split(".")[0] == part:
            used = {found.split(".")[0] for found in imports(file, at_import=False)} - {part}
            assert used <= below, f"{module} imports {sorted(used - below)}"


def test_modules_do_not_import_each_other_in_a_circle():
    graph = {module: imports(file, at_import=True) - {module} for module, file in FILES.items()}
    # A package imports its own modules, and they may name each other through it.
    graph = {module: {m for m in used if not m.startswith(f"{module}.")} for module, used in graph.items()}
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert set(FILES) <= set(order)


def test_functions_and_classes_that_another_part_uses_are_public():
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


def test_what_is_imported_is_required():
    """Also what another requirement brings along: it may do without it one day."""
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


def test_a_circle_would_be_seen(tmp_path):
    file = tmp_path / "rem.py"
    file.write_text("def f():\n    from rsa_hf.heads import RSAHeads\nimport rsa_hf.config\n", encoding="utf-8")
    assert imports(file, at_import=False) == {"heads", "config"}
    assert imports(file, at_import=True) == {"config"}
