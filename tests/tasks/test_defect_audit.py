"""What the audit of functions counts, and its counts of words."""

import json
import random
import resource
import subprocess
import sys
import time
from itertools import pairwise

import pytest

from rsa_hf.tasks import audit, format_audit, word_count_baseline
from rsa_hf.tasks.defect_audit import clone_group
from rsa_hf.tasks.python_defects import Example

C = 'int f(int a) { /* " */ if (a > 1) return g("x", a); // one\n return 0; }'
PYTHON = "def f(a):\n    # two\n    if a > 1:\n        return g('#', a) // 2\n"


@pytest.mark.parametrize(
    ("func", "other", "equal"),
    [
        (C, 'int other(int b) {\n\tif (b > 1) return h("x", b);\n\treturn 0;\n}', True),
        (C, C.replace("return 0", "return 1"), False),
        (C, C.replace("a > 1", "a >= 1"), False),
        (C, C.replace("int a", "long a"), False),
        (PYTHON, "def g(b):\n    if b > 1:\n        return f('#', b) // 2", True),
        (PYTHON, PYTHON.replace("// 2", "// 3"), False),
        (PYTHON, PYTHON.replace("'#'", "'!'"), False),
        (C, C.replace('"x"', '"y"'), False),
        ('char *u = "http://a";', 'char *v = "http://a"; // a page', True),
        ("return a & 0xF0 | 1e5;", "return b & 0x0F | 1e9;", False),
        ("class A : public B {\n  int f(); // one\n};", "class C : public D {\n  int g(); // two\n};", True),
        ("@Override\npublic void f() {} // one", "@Override\npublic void g() {}", True),
        ("@once\nclass A(B):\n    a = 2 // 3", "@once\nclass A(B):\n    a = 2 // 4", False),
        ("#define A 1", "#define A 2", False),
    ],
)
def test_clones_differ_in_whitespace_comments_and_identifiers_alone(func, other, equal):
    assert (clone_group(func) == clone_group(other)) is equal


def test_the_audit_counts_copies_labels_projects_and_what_is_cut():
    texts = (("a()", 0), ("a()  ", 0), ("b(1)", 1), ("b(1)", 0), ("c(2)", 0))
    splits = {
        "train": [Example(text, target, project="x") for text, target in texts],
        "validation": [Example("h(3)", 1, project="y"), Example("c(2)", 1)],
        "test": [Example("c(2)", 1, project="x"), Example("h(3)", 1), Example("i(3)", 1)],
    }
    report = audit(splits, {"train": [1, 2, 10, 4, 5], "validation": [9, 9], "test": [20, 1, 1]}, max_length=9)
    train = {"examples": 5, "positives": 1, "positive_share": 0.2, "duplicates": 2, "clones": 2}
    train |= {"conflicting_labels": 1, "functions_cut": 0.2, "tokens_cut": 1 / 22}
    assert report["splits"]["train"] == train
    assert report["splits"]["test"]["duplicates"] == 0
    assert report["splits"]["test"]["clones"] == 1
    assert report["cross_split_duplicates"] == {"train/validation": 1, "train/test": 1, "validation/test": 2}
    assert report["cross_split_projects"] == {"train/validation": 0, "train/test": 1, "validation/test": 0}
    assert report["conflicting_labels"] == 2
    lines = format_audit(report).splitlines()
    assert lines[2].split() == ["train", "5", "1", "20.00%", "2", "2", "1", "20.00%", "4.55%"]
    without = audit(splits, {split: [] for split in splits}, max_length=9)
    assert "functions_cut" not in without["splits"]["train"]
    assert "tokens" not in format_audit(without)


def test_counts_of_words_find_a_word_and_nothing_else():
    def functions(words, start):
        return [Example(f"int f{i}() {{ {words[i % 2]}(); }}", i % 2) for i in range(start, start + 60)]

    told = word_count_baseline({"train": functions(("ok", "gets"), 0), "test": functions(("ok", "gets"), 100)})
    assert told["test"]["accuracy"] == told["test"]["average_precision"] == 1
    blind = word_count_baseline({"train": functions(("ok", "ok"), 0), "test": functions(("ok", "ok"), 100)})
    assert blind["test"]["roc_auc"] < 0.9


@pytest.mark.slow  # two minutes
@pytest.mark.timeout(600)
def test_200000_functions_take_two_minutes_and_two_gigabytes(tmp_path):
    """In a process of its own, functions of 1,500 characters from a vocabulary of 20,000 words."""
    generator, files = random.Random(0), []
    vocabulary = [f"w{generator.getrandbits(40):x}" for _ in range(20_000)]
    for split, number in (("train", 160_000), ("validation", 20_000), ("test", 20_000)):
        files += [f"--{split}_file", str(tmp_path / f"{split}.jsonl")]
        with open(files[-1], "w") as file:
            for _ in range(number):
                words = generator.choices(vocabulary, k=130)
                func = f"int {words[0]}() {{ " + "; ".join(f"{a}({b})" for a, b in pairwise(words)) + "; }"
                file.write(json.dumps({"func": func[:1500], "target": int(generator.random() < 0.03)}) + "\n")
    code = "import sys; sys.argv[0] = 'rsa-hf'; from rsa_hf.cli import main; main()"
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", code, "audit", *files], check=True, capture_output=True)
    assert time.monotonic() - start < 120
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 2 * 1024**2  # KiB
