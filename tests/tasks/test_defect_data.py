"""The data of defect detection: files, de-duplication, subsampling, the audit. test_data_files.py has what goes wrong."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsa_hf.tasks import defect_data
from rsa_hf.tasks.defect_data import DefectDataConfig, Example, audit, format_audit, load_defect_data


def config_of(folder, splits, **options) -> DefectDataConfig:
    """Write the (function, label) pairs of each split to a file; returns settings that read them."""
    for split, functions in splits.items():
        path = folder / f"{split}.jsonl"
        path.write_text("\n".join(json.dumps({"func": func, "target": target}) for func, target in functions))
        options[f"{split}_file"] = str(path)
    return DefectDataConfig(**options)


def pairs(examples):
    return [(example.func, example.target) for example in examples]


@pytest.mark.parametrize(
    "settings", [{"dataset_name": "x", "test_file": "a.jsonl"}, {"max_train_samples": 1}, {"max_eval_samples": 0}]
)
def test_bad_settings_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        DefectDataConfig(**settings)


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"train": [("f", 0), ("g", 0)]}, "all 2 training functions have the label 0"),
        ({"train": []}, "the train split is empty"),
        ({"train": [("f", 0), ("f", 1)]}, "the train split is empty, or nothing of it is left"),
        ({"train": [("f", 0), ("g", 1)], "test": []}, "the test split is empty"),
        ({"test": [("f", 0), ("g", 1)]}, "train_file=None"),
    ],
)
def test_functions_that_cannot_train_are_refused(tmp_path, splits, message):
    with pytest.raises(ValueError, match=message):
        load_defect_data(config_of(tmp_path, splits))


def test_the_hub_gives_functions(hub_data):
    rows = {"code": ["f", "g"], "bug": [True, False], "project": ["a", "b"], "idx": [7, 3]}
    hub_data.returns = {"train": rows, "valid": rows}
    columns = {"text_column_name": "code", "label_column_name": "bug"}
    config = DefectDataConfig("owner/name", "small", validation_split_name="valid", deduplicate=False, **columns)
    functions = [Example("f", 1, idx=7), Example("g", 0, idx=3)]
    assert load_defect_data(config) == {"train": functions, "validation": functions}
    assert hub_data.calls == [("owner/name", "small")]


def test_deduplication_changes_the_training_split_only(tmp_path):
    splits = {
        "train": [("a", 0), ("b", 1), ("a ", 0), ("c", 1), ("\nc", 0), ("d", 1), ("e", 1), ("f", 0)],
        "validation": [("d", 1), ("d", 1)],
        "test": [("e", 0), ("x", 1), ("x", 0)],
    }
    everything = load_defect_data(config_of(tmp_path, splits, deduplicate=False))
    assert {split: pairs(examples) for split, examples in everything.items()} == splits
    kept = load_defect_data(config_of(tmp_path, splits))
    assert pairs(kept["train"]) == [("a", 0), ("b", 1), ("f", 0)]
    assert (kept["validation"], kept["test"]) == (everything["validation"], everything["test"])


@given(targets=st.lists(st.integers(0, 1), min_size=2, max_size=60), limit=st.integers(2, 70), seed=st.integers(0, 5))
def test_a_subsample_is_stratified_ordered_and_seeded(targets, limit, seed):
    examples = [Example(str(i), target) for i, target in enumerate(targets)]
    kept = defect_data._subsample(examples, limit, seed)
    assert len(kept) == min(limit, len(examples))
    assert kept == defect_data._subsample(examples, limit, seed)
    positions = [int(example.func) for example in kept]
    assert positions == sorted(set(positions))
    before, after = Counter(targets), Counter(example.target for example in kept)
    assert set(after) == set(before)
    assert all(abs(after[target] - before[target] * len(kept) / len(examples)) <= 1 for target in before)


def test_the_embedded_data_has_pairs_of_the_kinds_and_lengths_asked_for():
    limits = {"max_characters": 200, "max_train_samples": 100, "max_eval_samples": 40}
    splits = load_defect_data(DefectDataConfig(defect_kinds=["missing_not", "off_by_one"], **limits))
    assert {split: len(examples) for split, examples in splits.items()} == {"train": 100, "validation": 40, "test": 40}
    for examples in splits.values():
        for clean, defective in zip(examples[::2], examples[1::2], strict=True):  # subsampling keeps pairs together
            assert (clean.path, clean.name, clean.target) == (defective.path, defective.name, 0)
            assert defective.kind in ("missing_not", "off_by_one")
            assert 60 <= len(clean.func) <= 200


def test_the_audit_counts_duplicates_and_conflicting_labels():
    splits = {
        "train": [Example(text, target) for text, target in (("a", 0), ("a ", 0), ("b", 1), ("b", 0), ("c", 0))],
        "validation": [Example("h", 1), Example("c", 1)],
        "test": [Example("c", 1), Example("h", 1), Example("h", 1)],
    }
    report = audit(splits, {"train": 0.25, "validation": 0.0, "test": 1.0}, max_length=9)
    train = {"examples": 5, "positives": 1, "majority_share": 0.8, "duplicates": 2, "conflicting_labels": 1}
    assert report["splits"]["train"] == {**train, "fill_max_length": 0.25}
    assert report["cross_split_copies"] == {"train/validation": 1, "train/test": 1, "validation/test": 2}
    assert report["conflicting_labels"] == 2
    assert format_audit(report).splitlines()[2].split() == ["train", "5", "1", "80.00%", "2", "1", "25.00%"]


def test_devign_has_the_published_counts(devign_folder):
    """As published, and de-duplicated."""
    names = {"train": "train", "validation": "valid", "test": "test"}
    files = {f"{split}_file": str(devign_folder / f"{name}.jsonl.xz") for split, name in names.items()}
    raw = load_defect_data(DefectDataConfig(deduplicate=False, **files))
    sizes = {split: (len(examples), sum(e.target for e in examples)) for split, examples in raw.items()}
    assert sizes == {"train": (21854, 10018), "validation": (2732, 1187), "test": (2732, 1255)}
    report = audit(raw, dict.fromkeys(raw, 0.0), max_length=400)
    assert report["conflicting_labels"] == 76
    assert sum(report["cross_split_copies"].values()) == 19
    assert sum(numbers["duplicates"] for numbers in report["splits"].values()) == 27318 - 27239 - 19

    kept = load_defect_data(DefectDataConfig(max_train_samples=2000, **files))
    evaluated = {" ".join(example.func.split()) for split in ("validation", "test") for example in raw[split]}
    functions = {" ".join(example.func.split()) for example in kept["train"]}
    assert len(functions) == len(kept["train"]) == 2000
    assert not functions & evaluated
    assert sum(e.target for e in kept["train"]) / 2000 == pytest.approx(10018 / 21854, abs=0.002)
    assert kept["test"] == raw["test"]
