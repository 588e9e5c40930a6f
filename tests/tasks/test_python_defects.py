"""The embedded data set: real defects, no leaks between splits, no clue to the label except the defect."""

import ast
import sysconfig
import types
from collections import Counter, defaultdict

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
def examples(splits):
    return [example for split in SPLITS for example in splits[split]]


@pytest.fixture(scope="module")
def pairs(splits):
    return [pair for split in SPLITS for pair in zip(splits[split][::2], splits[split][1::2], strict=True)]


def test_every_clean_function_is_followed_by_its_defective_twin(pairs):
    assert len(pairs) > 1500
    for clean, defective in pairs:
        assert (clean.target, clean.kind) == (0, "")
        assert defective.target == 1
        assert defective.kind in DEFECT_KINDS
        assert (clean.path, clean.name) == (defective.path, defective.name)
        assert all(BOUNDS["min_characters"] <= len(one.func) <= BOUNDS["max_characters"] for one in (clean, defective))


def test_splits_share_no_file_and_no_function(splits):
    for field in ("path", "func"):
        values = [{getattr(example, field) for example in splits[split]} for split in SPLITS]
        assert all(values)
        assert len(set.union(*values)) == sum(map(len, values)), f"a {field} is in two splits"


def test_functions_are_distinct_and_no_renamed_copy_is_in_another_split(examples):
    def body(func: str) -> str:
        tree = ast.parse(func).body[0]
        tree.name, tree.decorator_list = "_", []
        return ast.unparse(tree)

    texts = [example.func for example in examples]
    assert len(set(texts)) == len(texts)
    paths_of = defaultdict(set)
    for example in examples:
        paths_of[body(example.func)].add(python_defects._split_of(example.path))
    assert max(map(len, paths_of.values())) == 1


def test_the_seed_decides_the_data_and_the_path_alone_the_split(splits):
    other = load_python_defects(seed=4, **BOUNDS)
    assert other != splits == load_python_defects(seed=3, **BOUNDS)
    for split in SPLITS:
        assert {python_defects._split_of(example.path) for example in splits[split]} == {split}
        assert {python_defects._split_of(example.path) for example in other[split]} == {split}


def test_kinds_are_balanced_as_far_as_the_functions_allow(splits):
    counts = Counter(example.kind for example in splits["train"] if example.target == 1)
    assert set(counts) == set(DEFECT_KINDS)
    assert min(counts.values()) > 20  # other versions of Python have other functions
    # Kinds that fit nearly every function are equally frequent.
    common = [counts[kind] for kind in ("swapped_arguments", "wrong_variable", "missing_return")]
    assert max(common) - min(common) <= 0.1 * max(common)


def code_content(code: types.CodeType) -> list:
    nested = [code_content(c) if isinstance(c, types.CodeType) else (type(c), repr(c)) for c in code.co_consts]
    return [code.co_code, code.co_names, code.co_varnames, code.co_freevars, nested]


@pytest.mark.parametrize("kind", DEFECT_KINDS)
def test_a_defect_compiles_to_other_code_and_is_printed_alike(pairs, kind):
    chosen = [(clean.func, defective.func) for clean, defective in pairs if defective.kind == kind]
    assert len(chosen) > 20
    for clean, defective in chosen:
        assert ast.dump(ast.parse(clean)) != ast.dump(ast.parse(defective))
        clean_code = compile(clean, "clean", "exec", dont_inherit=True)
        defective_code = compile(defective, "defective", "exec", dont_inherit=True)
        assert code_content(clean_code) != code_content(defective_code)
        for text in (clean, defective):
            assert ast.unparse(ast.parse(text)) == text
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    assert ast.get_docstring(node) is None


@pytest.mark.parametrize(
    ("kind", "clean", "defects"),
    [
        ("off_by_one", "return x[0]", {"return x[1]", "return x[-1]"}),
        ("off_by_one", "return x[-1]", {"return x[-2]", "return x[0]"}),
        ("off_by_one", "return x[y + 1:]", {"return x[y:]", "return x[y + 2:]"}),
        ("off_by_one", "return x[:y - 2]", {"return x[:y - 1]", "return x[:y - 3]"}),
        ("off_by_one", "return x[key]", set()),
        ("off_by_one", "return range(y)", {"return range(y + 1)", "return range(y - 1)"}),
        ("off_by_one", "return len(x) < 2", {"return len(x) < 1", "return len(x) < 3"}),
        ("off_by_one", "return y < len(x)", {"return y < len(x) + 1", "return y < len(x) - 1"}),
        ("off_by_one", "return x(1)", set()),
        ("boundary_comparison", "return x < y", {"return x <= y"}),
        ("boundary_comparison", "return x >= y", {"return x > y"}),
        ("boundary_comparison", "return x == y", set()),
        ("reversed_comparison", "return x < y", {"return x > y"}),
        ("reversed_comparison", "return x >= y", {"return x <= y"}),
        ("negated_comparison", "return x is None", {"return x is not None"}),
        ("negated_comparison", "return x not in y", {"return x in y"}),
        ("negated_comparison", "return x <= y", {"return x > y"}),
        ("negated_comparison", "return x < y < 3", set()),
        ("swapped_arguments", "x(y, 1, y)", {"x(1, y, y)", "x(y, y, 1)"}),
        ("swapped_arguments", "x(y, y)", set()),
        ("swapped_arguments", "x(y, *y)", set()),
        ("swapped_arguments", "max(x, y)", set()),
        ("wrong_variable", "z = x", {"z = y"}),  # not self, and not z, which has no value yet
        ("wrong_variable", "z = [x for x in y]", set()),  # a scope of its own
        ("wrong_variable", "global y\nreturn x", set()),
        ("missing_not", "return not x", {"return x"}),
        ("extra_not", "if x:\n    return y", {"if not x:\n    return y"}),
        ("extra_not", "if not x:\n    return y", set()),
        ("extra_not", "if x == y:\n    return y", set()),
        ("swapped_and_or", "return x and y", {"return x or y"}),
        ("swapped_and_or", "return x and y or x", set()),  # no superfluous parentheses
        ("missing_not", "return y or not (x or y)", set()),
        ("missing_return", "return x(y)", {"x(y)"}),
        ("missing_return", "y = 1\nreturn x", {"y = 1"}),
        ("missing_return", "if y:\n    return x", set()),  # the block would be empty
        ("missing_return", "return None", set()),
        ("wrong_operator", "return x + y", {"return x - y"}),
        ("wrong_operator", "x += y", {"x -= y"}),
        ("wrong_operator", "return x + 'y'", set()),
        ("flipped_boolean", "return x(y=True)", {"return x(y=False)"}),
        ("flipped_boolean", "while True:\n    x()", set()),
        ("off_by_one", "raise x(y[0])", set()),  # only the message would change
        ("off_by_one", "return f'{y[0]}'", set()),
        ("extra_not", "assert x, y", {"assert not x, y"}),
        ("off_by_one", "assert x, y[0]", set()),
    ],
)  # fmt: skip
def test_the_defects_of_each_kind(kind, clean, defects):
    function = "def f(self, x, y):\n" + "\n".join("    " + line for line in clean.splitlines())
    tree = ast.parse(function).body[0]
    found = set()
    for index, (found_kind, _) in enumerate(python_defects._edits(tree)):
        if found_kind == kind:
            changed = ast.parse(function).body[0]
            python_defects._edits(changed)[index][1]()
            found.add("\n".join(line[4:] for line in ast.unparse(changed).splitlines()[1:]))
    assert found == defects


def test_signatures_and_decorators_are_left_unchanged():
    function = ast.parse("@g(not 1, 2)\ndef f(x: a[0]=b[1], *, y=c < d) -> e[0]:\n    z: t[0] = x")
    kinds = {kind for kind, _ in python_defects._edits(function.body[0])}
    assert kinds == {"wrong_variable"}


def test_a_change_that_the_compiler_does_not_see_is_refused():
    clean = "def f(x):\n    if x or True:\n        return 1 + 1"
    assert python_defects._bytecode(clean) == python_defects._bytecode(clean.replace("1 + 1", "2"))
    assert python_defects._bytecode(clean) != python_defects._bytecode(clean.replace("1 + 1", "3"))
    assert python_defects._bytecode("x = 1") != python_defects._bytecode("x = True")


def test_lengths_do_not_tell_the_label(pairs):
    characters = np.array([[len(clean.func), len(defective.func)] for clean, defective in pairs])
    lines = np.array([[pair[0].func.count("\n"), pair[1].func.count("\n")] for pair in pairs])
    assert np.quantile(abs(characters[:, 1] - characters[:, 0]), 0.9) <= 10
    assert abs(np.diff(characters.mean(axis=0))) < 0.02 * characters.mean()
    for quantile in (0.1, 0.5, 0.9):
        low, high = sorted(np.quantile(characters, quantile, axis=0))
        assert high - low <= 0.05 * high
    assert (lines[:, 0] == lines[:, 1]).mean() > 0.95
    # Even the best threshold on a length, fitted to the same data, has an accuracy near one half.
    for statistic in (characters, lines):
        values = np.unique(statistic)
        shares = [(statistic[:, 1] >= v).mean() - (statistic[:, 0] >= v).mean() for v in values]
        assert 0.5 + np.abs(shares).max() / 2 < 0.53


def test_functions_are_from_the_standard_library_without_its_tests(examples):
    root = sysconfig.get_path("stdlib")
    for path in {example.path for example in examples}:
        with open(f"{root}/{path}", "rb"):
            pass
        assert not {"test", "tests", "idlelib", "site-packages", "dist-packages"} & set(path.split("/"))


def test_unknown_kinds_are_refused():
    with pytest.raises(ValueError, match=r"defect_kinds=\['off_by_two'\]: choose of off_by_one"):
        load_python_defects(kinds=["off_by_two"])


def test_sources_that_cannot_be_parsed_are_skipped(monkeypatch, tmp_path):
    (tmp_path / "broken.py").write_text("def f(:")
    (tmp_path / "latin.py").write_bytes(b"# \xff no coding line")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert load_python_defects() == {"train": [], "validation": [], "test": []}
