"""The embedded data set: real defects, no leaks between splits, no clue to the label except the defect."""

import ast
import sysconfig
import types
from collections import defaultdict

import numpy as np
import pytest

from rsa_hf.tasks import python_defects
from rsa_hf.tasks.python_defects import DEFECT_KINDS, load_python_defects

BOUNDS = {"min_characters": 60, "max_characters": 200}
SPLITS = ("train", "validation", "test")


@pytest.fixture(scope="module")
def splits():
    return load_python_defects(seed=3, **BOUNDS)


@pytest.fixture(scope="module")
def pairs(splits):
    return [pair for split in SPLITS for pair in zip(splits[split][::2], splits[split][1::2], strict=True)]


def test_every_clean_function_is_followed_by_its_defective_twin(pairs):
    assert len(pairs) > 1500
    for clean, defective in pairs:
        assert (clean.target, clean.kind, defective.target) == (0, "", 1)
        assert (clean.path, clean.name) == (defective.path, defective.name)
        assert all(BOUNDS["min_characters"] <= len(one.func) <= BOUNDS["max_characters"] for one in (clean, defective))
    assert {defective.kind for _, defective in pairs} == set(DEFECT_KINDS)


def test_no_function_is_repeated_and_no_file_or_renamed_copy_is_in_two_splits(splits):
    def body(func: str) -> str:
        tree = ast.parse(func).body[0]
        tree.name, tree.decorator_list = "_", []
        return ast.unparse(tree)

    texts = [example.func for split in SPLITS for example in splits[split]]
    assert len(set(texts)) == len(texts)
    splits_of = defaultdict(set)
    for split in SPLITS:
        for example in splits[split]:
            splits_of[example.path].add(split)
            splits_of[body(example.func)].add(split)
    assert max(map(len, splits_of.values())) == 1


@pytest.mark.usefixtures("small_library")
def test_the_seed_decides_the_data_but_not_the_split_of_a_file():
    first, other, again = (load_python_defects(seed=seed, **BOUNDS) for seed in (3, 4, 3))
    assert other != first == again
    paths = [{split: {example.path for example in data[split]} for split in SPLITS} for data in (first, other)]
    assert all(all(of_split.values()) for of_split in paths)
    assert not any(paths[0][a] & paths[1][b] for a in SPLITS for b in SPLITS if a != b)


def code_content(code: types.CodeType) -> list:
    nested = [code_content(c) if isinstance(c, types.CodeType) else (type(c), repr(c)) for c in code.co_consts]
    return [code.co_code, code.co_names, code.co_varnames, code.co_freevars, nested]


@pytest.mark.parametrize("kind", DEFECT_KINDS)
def test_a_defect_compiles_to_other_code_and_is_printed_alike(pairs, kind):
    chosen = [(clean.func, defective.func) for clean, defective in pairs if defective.kind == kind]
    assert len(chosen) > 20  # other versions of Python have other functions
    for texts in chosen:
        clean, defective = (code_content(compile(text, "", "exec", dont_inherit=True)) for text in texts)
        assert clean != defective
        for text in texts:
            assert ast.unparse(ast.parse(text)) == text
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    assert ast.get_docstring(node) is None


@pytest.mark.parametrize(
    ("kind", "clean", "defects"),
    [
        ("off_by_one", "return x[:y - 2]", {"return x[:y - 1]", "return x[:y - 3]"}),
        ("off_by_one", "return range(y)", {"return range(y + 1)", "return range(y - 1)"}),
        ("off_by_one", "raise x(y[0])", set()),  # only the message would change
        ("boundary_comparison", "return x < y", {"return x <= y"}),
        ("reversed_comparison", "return x >= y", {"return x <= y"}),
        ("negated_comparison", "return x not in y", {"return x in y"}),
        ("swapped_arguments", "x(y, 1, y)", {"x(1, y, y)", "x(y, y, 1)"}),
        ("swapped_arguments", "return (x(y, y), x(y, *y), max(x, y))", set()),
        ("wrong_variable", "z = x", {"z = y"}),  # not self, and not z, which has no value yet
        ("wrong_variable", "z = [x for x in y]", set()),  # a scope of its own
        ("missing_not", "return not x", {"return x"}),
        ("extra_not", "assert x, y", {"assert not x, y"}),
        ("swapped_and_or", "return x and y", {"return x or y"}),
        ("missing_return", "return x(y)", {"x(y)"}),
        ("missing_return", "if y:\n    return x", set()),  # the block would be empty
        ("wrong_operator", "x += y", {"x -= y"}),
        ("flipped_boolean", "return x(y=True)", {"return x(y=False)"}),
    ],
)
def test_the_defects_of_each_kind(kind, clean, defects):
    """Of the body; signature and decorators are never changed."""
    function = "@g(not 1, 2)\ndef f(self, x: a[0]=b[1], y=c < d) -> e[0]:\n"
    function += "\n".join("    " + line for line in clean.splitlines())
    found = set()
    for index, (found_kind, _) in enumerate(python_defects._edits(ast.parse(function).body[0])):
        if found_kind == kind:
            changed = ast.parse(function).body[0]
            python_defects._edits(changed)[index][1]()
            lines = ast.unparse(changed).splitlines()
            assert lines[:2] == function.splitlines()[:2]
            found.add("\n".join(line[4:] for line in lines[2:]))
    assert found == defects


def test_lengths_do_not_tell_the_label(pairs):
    """Even the best threshold on a length, fitted to the same data, has an accuracy near one half."""
    for length in (len, lambda func: func.count("\n")):
        sizes = np.array([[length(clean.func), length(defective.func)] for clean, defective in pairs])
        assert abs(np.diff(sizes.mean(axis=0))) < 0.02 * sizes.mean()
        shares = [(sizes[:, 1] >= v).mean() - (sizes[:, 0] >= v).mean() for v in np.unique(sizes)]
        assert 0.5 + np.abs(shares).max() / 2 < 0.53


def test_sources_that_cannot_be_parsed_are_skipped_and_unknown_kinds_refused(monkeypatch, tmp_path):
    (tmp_path / "broken.py").write_text("def f(:")
    (tmp_path / "latin.py").write_bytes(b"# \xff no coding line")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert load_python_defects() == {"train": [], "validation": [], "test": []}
    with pytest.raises(ValueError, match=r"defect_kinds=\['off_by_two'\]"):
        load_python_defects(kinds=["off_by_two"])
