"""Published formats of defect data sets: small ones, made by hand, that hold the same functions."""

import gzip
import json
import lzma

import datasets
import pandas as pd
import pytest

from rsa_hf.tasks import DefectDataConfig
from rsa_hf.tasks.data_files import read_table
from rsa_hf.tasks.defect_data import load_defect_data, read_examples

LONG = "int g() { return " + "1 + " * 40_000 + "1; }"  # 160,000 characters
FUNCTIONS = [('int f(char *s)\n{\n  return s[0];  // "first", ü\n}', 1), (LONG, 0), ("void h() {}", 0)]
COLUMNS = {
    "devign": ("func", "target", {"idx": 5, "project": "qemu", "commit_id": "a1"}),
    "diversevul": ("func", "target", {"cwe": ["CWE-79"], "project": "qemu", "message": "fix"}),
    "primevul": ("func", "target", {"idx": 5, "project": "qemu", "cve": None, "cwe": ["CWE-79"]}),
    "bigvul": ("func_before", "vul", {"project": "qemu", "func_after": "-", "CVE ID": "CVE-1"}),
    "reveal": ("code", "label", {"project": "qemu", "size": 3}),
}


def rows_of(name):
    text, label, others = COLUMNS[name]
    return [{**others, text: func, label: target} for func, target in FUNCTIONS]


def as_json_lines(rows):
    return "\n".join(map(json.dumps, rows)).encode()


def as_csv(rows):
    return pd.DataFrame(rows).to_csv(index=False, lineterminator="\r\n").encode()


def as_parquet(rows):
    return pd.DataFrame(rows).to_parquet()


def read(path, **settings):
    return read_examples(read_table(path), DefectDataConfig(**settings))


def test_classes_are_what_their_names_say(tmp_path):
    """Their numbers have the order of the data set, whose first one may be of defective functions."""
    features = datasets.Features(
        {"func": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])}
    )
    rows = datasets.Dataset.from_dict({"func": ["f()", "g()"], "label": [0, 1]}, features)
    rows.to_parquet(tmp_path / "train.parquet")
    for source in ({"train_file": str(tmp_path / "train.parquet")}, {"dataset_name": str(tmp_path)}):
        with pytest.raises(ValueError, match="label must be 0 or 1, got 'bad'; label_values sets other labels"):
            load_defect_data(DefectDataConfig(**source))
        found = load_defect_data(DefectDataConfig(**source, label_values=["good", "bad"]))["train"]
        assert [(example.func, example.target) for example in found] == [("f()", 1), ("g()", 0)]


@pytest.mark.parametrize("kind", [as_json_lines, lambda rows: json.dumps(rows, indent=1).encode(), as_csv, as_parquet])
@pytest.mark.parametrize("name", COLUMNS)
def test_every_format_gives_the_same_functions(name, kind, tmp_path):
    data = kind(rows_of(name))
    packed = {".gz": gzip.compress(data), ".xz": lzma.compress(data), " renamed": gzip.compress(data)}
    for ending, content in {"": data, **({} if kind is as_parquet else packed)}.items():
        path = tmp_path / f"data.jsonl{ending}"  # the name does not say what it is
        path.write_bytes(content)
        examples = read(path)
        assert [(e.func, e.target) for e in examples] == FUNCTIONS
        assert {e.project for e in examples} == {"qemu"}
        assert {e.idx for e in examples} == {5 if name in ("devign", "primevul") else None}


@pytest.mark.parametrize("labels", [(0, 1), (0.0, 1.0), (False, True), ("0", "1"), ("false", "TRUE")])
def test_labels_are_numbers_truths_or_these_in_words(labels, tmp_path):
    path, rows = tmp_path / "data", [{"func": func, "target": labels[target]} for func, target in FUNCTIONS]
    for kind in (as_json_lines, as_csv):
        path.write_bytes(kind(rows))
        assert [e.target for e in read(path)] == [1, 0, 0]


def test_functions_keep_their_idx(tmp_path):
    """Else an answer would be joined to the function at the place of its number."""
    path = tmp_path / "data"
    for written, expected in (("CVE-1", "CVE-1"), (7.0, 7), ("12", 12), (10**17 + 1, 10**17 + 1)):
        for kind in (as_json_lines, as_csv, as_parquet):
            path.write_bytes(kind([{"code": "a", "id": written, "label": 0}]))
            assert [e.idx for e in read(path)] == [expected]


@pytest.mark.parametrize("time", [float("nan"), ""])
def test_a_missing_time_is_an_error(time, tmp_path):
    """It has no place in an order."""
    (tmp_path / "data").write_bytes(as_json_lines([{"code": "a", "label": 0, "when": time}]))
    with pytest.raises(ValueError, match="line 1: when must be a time"):
        read(tmp_path / "data", time_column_name="when")


def test_labels_in_words_are_named(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("code,label\na,vulnerable\nb,safe\n")
    assert [e.target for e in read(path, label_values=["safe", "vulnerable"])] == [1, 0]
    with pytest.raises(ValueError, match="line 2: label must be 0 or 1, got 'vulnerable'; label_values"):
        read(path)
    for labels, given in (((True, False), "false true"), ((True, False), "False True"), ((1.0, 0.0), "0 1")):
        path.write_bytes(as_json_lines([{"code": "a", "label": labels[0]}, {"code": "b", "label": labels[1]}]))
        assert [e.target for e in read(path, label_values=given.split())] == [1, 0]
    path.write_text("code,label,label,,\na,1,0,,\n")
    with pytest.raises(ValueError, match="data.csv: two columns have the same name, among .*'label'"):
        read(path)
    path.write_text("code,label\na,vulnerable\nb,safe\nc,unknown\n")
    with pytest.raises(ValueError, match="line 4: label must be safe or vulnerable, got 'unknown'"):
        read(path, label_values=["safe", "vulnerable"])


def test_corrected_functions_and_neighbouring_rows_are_pairs(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(as_json_lines([
        {"func_before": "a", "func_after": "a", "vul": 0},
        {"func_before": "b", "func_after": "fixed b", "vul": 1},
        {"func_before": "c", "func_after": "fixed c", "vul": 1},
    ]))  # fmt: skip
    examples = read(path, fixed_column_name="func_after")
    expected = [("a", 0, None), ("b", 1, 1), ("fixed b", 0, 1), ("c", 1, 2), ("fixed c", 0, 2)]
    assert [(e.func, e.target, e.pair) for e in examples] == expected
    path.write_bytes(as_json_lines([{"func": f"f{i}", "target": 1 - i % 2} for i in range(4)]))
    assert [e.pair for e in read(path, paired=True)] == [0, 0, 1, 1]
    path.write_bytes(as_json_lines([{"func": f"f{i}", "target": 1 - i % 2} for i in range(3)]))
    with pytest.raises(ValueError, match="3 functions are not a whole number of pairs"):
        read(path, paired=True)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"code,label\na,0\n", "no column 'body' among \\['code', 'label'\\]"),
        (b"body,target\na,0\nb,2\n", "line 3: target must be 0 or 1, got '2'"),
        (b"body,target\na,0\nb,\n", "line 3: target must be 0 or 1, got ''"),
        (b"body,target\na,0\n ,1\n", "line 3: body must be the text of a function, got ' '"),
        (b"body,target\na,0\nb, c,1\n", "line 3: more fields than the header has columns"),
        (b'body,target\n"a,0\nb,1\n', "unexpected end of data"),
        (b"body,target\n\xff,0\n", "can't decode byte 0xff in position"),
        (b'[{"body": "a", "target": 0}', "delimiter"),
        (b'[{"body": "a", "target": 0}, 3]', "entry 2: a row must have named fields, got 3"),
        (b'[{"body": "a", "target": NaN}]', "entry 1: target must be 0 or 1, got nan"),
        (b"PAR1 and nothing else", "Parquet|parquet"),
        (b"hello\n", "not JSON, and as CSV it has no rows"),
        (b"PK\x03\x04...", "archive"),
    ],
)
def test_bad_tables_end_in_one_line_that_names_the_file(data, message, tmp_path):
    path = tmp_path / "data.csv"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message) as error:
        read(path, text_column_name="body")
    assert str(path) in str(error.value)
