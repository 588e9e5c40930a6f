"""The data of defect detection: settings, files, the Hub, the choice of functions, the audit."""

import gzip
import json
import lzma
from collections import Counter

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsa_hf.tasks import defect_data
from rsa_hf.tasks.defect_data import (
    DefectDataConfig,
    Example,
    audit,
    format_audit,
    load_defect_data,
    read_json_lines,
)

CLEAN = {"func": "int f() {}", "target": 0}


def config_of(folder, **options) -> DefectDataConfig:
    """Write the (function, label) pairs given for each split to files; returns settings that read them."""
    for split in set(options) & set(defect_data.SPLITS):
        path = folder / f"{split}.jsonl"
        rows = (json.dumps({"func": func, "target": target}) for func, target in options.pop(split))
        path.write_text("\n".join(rows))
        options[f"{split}_file"] = str(path)
    return DefectDataConfig(source="files", **options)


def pairs(examples):
    return [(example.func, example.target) for example in examples]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "disk"}, "source='disk': choose one of embedded, hub, files"),
        ({"long_functions": "drop"}, "long_functions='drop': choose one of truncate, chunk"),
        ({"source": "files"}, "train_file=None: source 'files' needs"),
        ({"test_file": "a.jsonl"}, "source='embedded': reads none of .*'a.jsonl'"),
        ({"max_train_examples": 1}, "max_train_examples=1: choose 2 or more"),
        ({"max_eval_examples": 0}, "max_eval_examples=0: choose 2 or more"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DefectDataConfig(**settings)


# --- reading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".jsonl.xz"])
def test_files_are_read_plain_and_compressed(tmp_path, ending):
    path = tmp_path / f"data{ending}"
    rows = [CLEAN, {"func": "\u2028 ü", "target": True, "idx": 7}, {"func": "h", "target": False}]
    with {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)(path, "wt", encoding="utf-8") as file:
        file.write("\n\n".join(map(json.dumps, rows)))
    assert pairs(read_json_lines(path)) == [("int f() {}", 0), ("\u2028 ü", 1), ("h", 0)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"func": "f", "tar', "Invalid control character"),
        ('{"func": "\udcff", "target": 0}', "can't decode byte 0xff"),
        ('{"func": "\\ud800", "target": 0}', "surrogates not allowed"),
        ("[1, 2]", r"\[1, 2\] is no labelled function; needed are `func`"),
        ('{"func": "f"}', r"\{'func': 'f'\} is no labelled function"),
        ('{"func": " \\n\\t", "target": 1}', "is no labelled function"),
        ('{"func": null, "target": 1}', "is no labelled function"),
        ('{"func": "f", "target": 2}', "is no labelled function"),
        ('{"func": "f", "target": "1"}', "is no labelled function"),
        ('{"func": "f", "target": null}', "is no labelled function"),
    ],
)
def test_the_error_names_a_bad_line(tmp_path, row, message):
    path = tmp_path / "data.jsonl"
    good = json.dumps(CLEAN)
    path.write_bytes("\n".join([good, good, row, good]).encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=message) as error:
        read_json_lines(path)
    assert str(error.value).startswith(f"{path}, line 3: ")


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"train": [("f", 0), ("g", 0)]}, "all 2 training functions have target 0. Give functions of both"),
        ({"train": []}, "the train split is empty"),
        ({"train": [("f", 0), ("f", 1)]}, "the train split is empty, or nothing of it is left"),
        ({"train": [("f", 0), ("g", 1)], "test": []}, "the test split is empty"),
    ],
)
def test_functions_that_cannot_train_are_refused(tmp_path, splits, message):
    with pytest.raises(ValueError, match=message):
        load_defect_data(config_of(tmp_path, **splits))


def test_the_hub_gives_functions_and_errors_name_their_row(monkeypatch):
    rows = {"func": ["f", "g"], "target": [True, False], "project": ["a", "b"], "idx": [7, 3]}
    hub = {split: datasets.Dataset.from_dict(rows) for split in ("train", "test")}
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda name: asked.append(name) or hub)
    splits = load_defect_data(DefectDataConfig(source="hub", deduplicate=False))
    assert asked == ["google/code_x_glue_cc_defect_detection"]
    functions = [Example("f", 1, idx=7), Example("g", 0, idx=3)]
    assert splits == {"train": functions, "test": functions}
    hub["test"] = datasets.Dataset.from_dict({"func": ["f"], "target": [3]})
    with pytest.raises(ValueError, match="defect_detection, test row 1: .* is no labelled function"):
        load_defect_data(DefectDataConfig(source="hub"))
    del hub["train"]
    with pytest.raises(ValueError, match=r"has the splits \['test'\]; 'train' is needed"):
        load_defect_data(DefectDataConfig(source="hub"))


# --- choosing -------------------------------------------------------------------------------------------------------


def test_deduplication_changes_the_training_split_only(tmp_path):
    splits = {
        "train": [("a", 0), ("b", 1), ("a ", 0), ("c", 1), ("\nc", 0), ("d", 1), ("e", 1), ("f", 0)],
        "validation": [("d", 1), ("d", 1)],
        "test": [("e", 0), ("x", 1), ("x", 0)],
    }
    kept = load_defect_data(config_of(tmp_path, **splits))
    assert {split: pairs(examples) for split, examples in kept.items()} == {
        **splits,
        "train": [("a", 0), ("b", 1), ("f", 0)],
    }
    everything = load_defect_data(config_of(tmp_path, deduplicate=False, **splits))
    assert {split: pairs(examples) for split, examples in everything.items()} == splits


@given(
    targets=st.lists(st.integers(0, 1), min_size=2, max_size=60),
    limit=st.integers(2, 70),
    seed=st.integers(0, 5),
)
def test_a_subsample_is_stratified_ordered_and_seeded(targets, limit, seed):
    examples = [Example(str(i), target) for i, target in enumerate(targets)]
    kept = defect_data._subsample(examples, limit, seed)
    assert len(kept) == min(limit, len(examples))
    assert kept == defect_data._subsample(examples, limit, seed)
    positions = [int(example.func) for example in kept]
    assert positions == sorted(set(positions))
    before, after = Counter(targets), Counter(example.target for example in kept)
    assert set(after) == set(before)
    for target in before:
        exact = before[target] * len(kept) / len(examples)
        assert abs(after[target] - exact) <= 1


def test_the_embedded_source_has_pairs_of_the_kinds_and_lengths_asked_for():
    config = DefectDataConfig(
        max_characters=200,
        max_train_examples=100,
        max_eval_examples=40,
        seed=3,
        defect_kinds=["missing_not", "off_by_one"],
    )
    splits = load_defect_data(config)
    assert [(split, len(examples)) for split, examples in splits.items()] == [
        *(("train", 100), ("validation", 40), ("test", 40))
    ]
    for examples in splits.values():
        # Subsampling keeps pairs together.
        for clean, defective in zip(examples[::2], examples[1::2], strict=True):
            assert (clean.path, clean.name, clean.target) == (defective.path, defective.name, 0)
            assert (defective.target, defective.kind) in [(1, kind) for kind in config.defect_kinds]
            assert 60 <= len(clean.func) <= 200


# --- audit ----------------------------------------------------------------------------------------------------------


class WordCount:
    """A stand-in for a tokenizer: the words of a text between two special tokens."""

    def __call__(self, texts, **_):
        return {"input_ids": [["[CLS]", *text.split(), "[SEP]"] for text in texts]}


def test_the_audit_counts_lengths_duplicates_and_conflicting_labels():
    def words(count):
        return " ".join(map(str, range(count)))

    splits = {
        "train": [Example(words(n), target) for n, target in ((1, 0), (1, 0), (2, 1), (2, 0), (3, 0))],
        "validation": [Example(words(8), 1), Example(words(3), 1)],
        "test": [Example(words(3), 1), Example(words(8), 1), Example(words(8), 1)],
    }
    report = audit(splits, WordCount(), max_length=9)
    assert report["splits"]["train"] == {
        "examples": 5,
        "positives": 1,
        "majority_share": 0.8,
        "duplicates": 2,
        "conflicting_labels": 1,
        "longer_than_max_length": 0.0,
        "token_quantiles": {"10%": 3, "25%": 3, "50%": 4, "75%": 4, "90%": 5, "99%": 5, "100%": 5},
    }
    assert report["splits"]["test"]["longer_than_max_length"] == pytest.approx(2 / 3)
    assert report["splits"]["test"]["token_quantiles"]["100%"] == 10
    assert report["cross_split_copies"] == {"train/validation": 1, "train/test": 1, "validation/test": 2}
    assert report["conflicting_labels"] == 2
    assert json.loads(json.dumps(report)) == report

    table = format_audit(report).splitlines()
    assert table[0].split()[:4] == ["split", "examples", "defective", "majority"]
    assert " ".join(table[2].split()) == "train 5 1 80.00% 2 1 0.00% 3 3 4 4 5 5 5"
    assert "train/validation 1, train/test 1, validation/test 2" in table[6]
    assert "only one split" in format_audit(audit({"test": splits["test"]}, WordCount(), 9))


def test_devign_has_the_published_counts(devign_folder):
    """As published, and de-duplicated."""
    files = {
        f"{split}_file": str(devign_folder / f"{name}.jsonl.xz")
        for split, name in (("train", "train"), ("validation", "valid"), ("test", "test"))
    }
    raw = load_defect_data(DefectDataConfig(source="files", deduplicate=False, **files))
    sizes = {split: (len(examples), sum(e.target for e in examples)) for split, examples in raw.items()}
    assert sizes == {"train": (21854, 10018), "validation": (2732, 1187), "test": (2732, 1255)}
    report = audit(raw, WordCount(), max_length=400)
    assert report["conflicting_labels"] == 76
    assert sum(report["cross_split_copies"].values()) == 19
    assert sum(numbers["duplicates"] for numbers in report["splits"].values()) == 27318 - 27239 - 19
    assert report["splits"]["test"]["majority_share"] == pytest.approx(0.5406, abs=5e-5)

    kept = load_defect_data(DefectDataConfig(source="files", max_train_examples=2000, **files))
    evaluated = {" ".join(example.func.split()) for split in ("validation", "test") for example in raw[split]}
    functions = {" ".join(example.func.split()) for example in kept["train"]}
    assert len(functions) == len(kept["train"]) == 2000
    assert not functions & evaluated
    assert sum(e.target for e in kept["train"]) / 2000 == pytest.approx(10018 / 21854, abs=0.002)
    assert kept["test"] == raw["test"]
