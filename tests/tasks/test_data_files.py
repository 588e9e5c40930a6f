"""Files and data sets of the Hub, as both tasks read them, and what is said of those that cannot be used."""

import gzip
import io
import json
import lzma
import random
import re
import tarfile
import zipfile

import datasets
import pytest

from rsa_hf.tasks.data_files import json_lines, open_compressed
from rsa_hf.tasks.defect_data import DefectDataConfig, load_defect_data, read_examples
from rsa_hf.tasks.text_data import LanguageModelingDataConfig, read_texts

OPENERS = {"": open, ".gz": gzip.open, ".xz": lzma.open}
BOTH = ((read_texts, LanguageModelingDataConfig), (load_defect_data, DefectDataConfig))
GOOD = '{"func": "int f() {}", "target": 0, "text": "one"}'


@pytest.mark.parametrize("kind", ["jsonl", "ndjson", "JSONL", "jl"])
@pytest.mark.parametrize("ending", OPENERS)
def test_json_lines_are_functions_and_documents_plain_or_compressed(tmp_path, ending, kind):
    """Not their JSON syntax, and not their compressed bytes."""
    path = tmp_path / f"data.{kind}{ending}"
    rows = [{"func": "int f() {}", "target": 0}, {"func": "\u2028 ü\n", "target": True, "idx": 7, "text": "x"}]
    with OPENERS[ending](path, "wt", encoding="utf-8") as file:
        file.write("\n\n".join(map(json.dumps, rows)))
    examples = read_examples(json_lines(path), DefectDataConfig())
    assert [(e.func, e.target, e.idx) for e in examples] == [("int f() {}", 0, None), ("\u2028 ü\n", 1, 7)]
    files = {"train_file": str(path), "validation_file": str(path)}
    config = LanguageModelingDataConfig(**files, text_column_name="func", max_train_bytes=15)
    assert read_texts(config) == {"train": b"int f() {}\n", "validation": "int f() {}\n\u2028 ü\n".encode()}
    with pytest.raises(ValueError, match=rf"data.{kind}.*, line 1: .*text_column_name"):
        read_texts(LanguageModelingDataConfig(train_file=str(path)))
    with OPENERS[ending](path, "wt", encoding="utf-8") as file:
        json.dump(rows, file)
    assert read_texts(config)["train"] == b"int f() {}\n"  # of an array too


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"func": "f", "tar', "Invalid control character"),
        ('{"func": "\udcff", "target": 0}', "can't decode byte 0xff"),
        ('{"func": "\\ud800", "target": 0}', "surrogates not allowed"),
        ("[" * 100_000, "recursion"),
        ("[1, 2]", "a row must have named fields"),
        ('{"target": 1}', "no column 'func'"),
        *((f'{{"func": {func}, "target": 1}}', "func must be the text of a function") for func in (r'" \n\t"', "null")),
        *((f'{{"func": "f", "target": {label}}}', "target must be 0 or 1") for label in ("2", '"x"', "NaN", "1.5")),
    ],
)  # fmt: skip
def test_the_error_names_a_bad_line(tmp_path, row, message):
    path = tmp_path / "data.jsonl"
    path.write_bytes("\n".join([GOOD, GOOD, row, GOOD]).encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=message) as error:
        read_examples(json_lines(path), DefectDataConfig())
    assert str(error.value).startswith(f"{path}, line 3: ")


@pytest.mark.parametrize("number", [3, 10, 25])
def test_bad_rows_are_reported_together(tmp_path, hub_data, number):
    """The first ten of them and the number, of files by line and of data sets by split and row."""
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join([GOOD, *['{"func": "f", "target": 7, "text": 1}'] * number, GOOD]))
    bad = {"func": ["f"] * (number + 1), "target": [0] + [7] * number, "text": ["f"] + [None] * number}
    hub_data.returns = {"train": bad, "validation": {"func": ["f", "g"], "target": [0, 1], "text": ["f", "g"]}}
    for read, place in (
        (lambda: read_examples(json_lines(path), DefectDataConfig()), f"{path}, line"),
        (lambda: read_texts(LanguageModelingDataConfig(train_file=str(path))), f"{path}, line"),
        (lambda: load_defect_data(DefectDataConfig("owner/name")), "owner/name, train row"),
        (lambda: read_texts(LanguageModelingDataConfig("owner/name")), "owner/name, train row"),
    ):
        with pytest.raises(ValueError, match="data.jsonl, line 2|train row 2") as error:
            read()
        named = [i for i in range(1, number + 3) if re.search(f"{place} {i}[:,]", str(error.value))]
        assert named == list(range(2, min(number, 10) + 2))
        assert str(error.value).count("; ") <= 1  # the fault is named once
        assert ("25 bad rows" in str(error.value)) is (number == 25)


@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress])
@pytest.mark.parametrize("damage", ["truncated", "overwritten", "not compressed"])
def test_the_error_names_a_damaged_file(tmp_path, compress, damage):
    generator = random.Random(0)
    data = compress(b"".join(b"%x\n" % generator.getrandbits(64) for _ in range(30_000)))
    half = len(data) // 2
    rest = {"truncated": b"", "overwritten": b"\xff" * (len(data) - half)}
    path = tmp_path / ("text.gz" if compress is gzip.compress else "text.xz")
    path.write_bytes(data[:half] + rest[damage] if damage in rest else b"a text")
    with pytest.raises(ValueError, match=rf"{path} is truncated or corrupt"), open_compressed(path) as file:
        file.read()


@pytest.mark.parametrize("kind", ["tar", "zip", "csv"])
def test_archives_and_tables_are_refused(tmp_path, kind):
    """By their names or by what they hold."""
    packed = io.BytesIO(b"func,target\nint f() {},0\n")
    if kind == "tar":
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.addfile(tarfile.TarInfo("inner.txt"), io.BytesIO())
    elif kind == "zip":
        with zipfile.ZipFile(packed, "w") as archive:
            archive.writestr("inner.txt", "one\n" * 100)
    for name in (f"a.{kind}", f"a.{kind}.gz", *(() if kind == "csv" else ("a.txt", "a.txt.gz", "a.jsonl"))):
        path = tmp_path / name
        path.write_bytes(gzip.compress(packed.getvalue()) if path.suffix == ".gz" else packed.getvalue())
        for read, config in BOTH[:1] if kind == "csv" else BOTH:  # functions may be a table
            with pytest.raises(ValueError, match=name):
                read(config(train_file=str(path)))


@pytest.mark.parametrize(
    ("returns", "options", "message"),
    [
        (RuntimeError("Dataset scripts are no longer supported, but found name.py"), {}, "owner/name.* no longer"),
        (datasets.exceptions.DatasetGenerationError("a damaged file"), {}, "owner/name.* a damaged file"),
        ({"training": {}, "dev": {}}, {}, "has the splits training, dev, but no 'train'.*train_split_name"),
        ({"train": {}, "valid": {}}, {}, "splits train, valid, but no 'validation'.*validation_split_name"),
        ({"train": {}, "valid": {}}, {"validation_split_name": "dev"}, "splits train, valid, .*validation_split_name"),
    ],
)
def test_data_sets_of_the_hub_that_cannot_be_used_are_explained(hub_data, returns, options, message):
    hub_data.returns = returns
    for read, config in BOTH:
        with pytest.raises(ValueError, match=message):
            read(config(dataset_name="owner/name", **options))
