"""The data of defect detection: splits, de-duplication, subsampling. test_defect_formats.py reads published formats."""

import json
from collections import Counter
from dataclasses import replace

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsa_hf.tasks import DefectDataConfig, audit, load_defect_data
from rsa_hf.tasks.defect_data import Example, subsample


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
    "settings",
    [
        {"dataset_name": "x", "test_file": "a.jsonl"},
        {"max_train_samples": 1},
        {"label_values": ["bad"]},
        {"split_by": "random"},
        {"split_by": "projects", "train_file": "a.jsonl"},
        {"long_functions": "chunks"},
        {"split_by": "time", "train_file": "a.jsonl"},
        {"validation_split_percentage": 60, "test_split_percentage": 40},
    ],
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
    rows = {"code": ["f", "g"], "bug": [True, False], "project": ["a", "b"], "idx": ["007", "3"]}
    hub_data.returns = {"train": rows, "valid": rows}
    columns = {"text_column_name": "code", "label_column_name": "bug"}
    config = DefectDataConfig("owner/name", "small", validation_split_name="valid", deduplicate=False, **columns)
    functions = [Example("f", 1, idx="007", project="a"), Example("g", 0, idx=3, project="b")]
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
    kept = subsample(examples, limit, seed)
    assert len(kept) == min(limit, len(examples))
    assert kept == subsample(examples, limit, seed)
    positions = [int(example.func) for example in kept]
    assert positions == sorted(set(positions))
    before, after = Counter(targets), Counter(example.target for example in kept)
    assert set(after) == set(before)
    assert all(abs(after[target] - before[target] * len(kept) / len(examples)) <= 1 for target in before)


def test_a_subsample_keeps_pairs_whole():
    pairs = [Example(f"{i}{target}", target, pair=i) for i in range(20) for target in (0, 1)]
    examples = [*pairs, *(Example(str(i), 0) for i in range(160))]
    kept = Counter(example.pair for example in subsample(examples, 40, seed=0))
    assert kept.pop(None) == 32 and set(kept.values()) == {2}


@pytest.mark.usefixtures("small_library")
def test_the_embedded_data_has_pairs_of_the_kinds_and_lengths_asked_for():
    limits = {"max_characters": 200, "max_train_samples": 40, "max_eval_samples": 6}
    splits = load_defect_data(DefectDataConfig(defect_kinds=["missing_not", "off_by_one"], **limits))
    assert {split: len(examples) for split, examples in splits.items()} == {"train": 40, "validation": 6, "test": 6}
    for examples in splits.values():
        for clean, defective in zip(examples[::2], examples[1::2], strict=True):  # subsampling keeps pairs together
            assert (clean.path, clean.name, clean.target) == (defective.path, defective.name, 0)
            assert defective.kind in ("missing_not", "off_by_one")
            assert 60 <= len(clean.func) <= 200


@pytest.mark.slow  # reads all of it
def test_devign_has_the_published_counts(data_folder):
    names = {"train": "train", "validation": "valid", "test": "test"}
    files = {f"{split}_file": str(data_folder / "devign" / f"{name}.jsonl.xz") for split, name in names.items()}
    raw = load_defect_data(DefectDataConfig(deduplicate=False, **files))
    sizes = {split: (len(examples), sum(e.target for e in examples)) for split, examples in raw.items()}
    assert sizes == {"train": (21854, 10018), "validation": (2732, 1187), "test": (2732, 1255)}
    report = audit(raw)
    assert report["conflicting_labels"] == 76
    assert sum(report["cross_split_duplicates"].values()) == 19
    assert sum(numbers["duplicates"] for numbers in report["splits"].values()) == 27318 - 27239 - 19


# --- splits that are made ---------------------------------------------------------------------------------------------


def rows_of(number, projects):
    """Functions of projects of different sizes, in the order of time."""
    return [
        {"func": f"f{i}", "target": i % 2, "project": f"p{i * i % projects}", "when": f"2020-01-{1 + i // 4:02}"}
        for i in range(number)
    ]


@pytest.mark.parametrize("by", ["random", "project", "time"])
@pytest.mark.parametrize("paired", [False, True])
def test_splits_are_made_of_whole_pairs_and_projects_in_time(tmp_path, by, paired):
    path = tmp_path / "all.csv"  # whose numbers are words
    rows = rows_of(120, 13)
    if paired:
        for first, second in zip(rows[::2], rows[1::2], strict=True):
            second["project"] = first["project"]
    pd.DataFrame(rows).to_csv(path, index=False)
    config = DefectDataConfig(
        train_file=str(path), split_by=by, time_column_name="when", paired=paired, test_split_percentage=20
    )
    splits = load_defect_data(config)
    assert sorted(e.func for part in splits.values() for e in part) == sorted(row["func"] for row in rows)
    sizes = {split: len(part) for split, part in splits.items()}
    assert sizes == pytest.approx({"train": 84, "validation": 12, "test": 24}, abs=8)
    if by == "project":
        projects = [{e.project for e in part} for part in splits.values()]
        assert not projects[0] & projects[1] and not (projects[0] | projects[1]) & projects[2]
    if by == "time":
        times = [[e.time for e in part] for part in splits.values()]
        assert max(times[0]) <= min(times[1]) and max(times[1]) <= min(times[2])
    if paired:
        pairs_of = [{e.pair for e in part} for part in splits.values()]
        assert sum(map(len, pairs_of)) == 60 == len(set.union(*pairs_of))
    # The same split is made to be scored, another with another seed.
    assert load_defect_data(config, only="test") == {"test": splits["test"]}
    other = load_defect_data(replace(config, sample_seed=1), only="test")["test"]
    assert (other == splits["test"]) is (by == "time")


def test_pairs_among_single_functions_are_in_all_splits(tmp_path):
    path = tmp_path / "all.jsonl"
    rows = [{"func": f"f{i}", "target": int(i % 5 == 0), "func_after": f"g{i}"} for i in range(500)]
    path.write_text("\n".join(map(json.dumps, rows)))
    splits = load_defect_data(
        DefectDataConfig(train_file=str(path), split_by="random", fixed_column_name="func_after")
    )
    for examples in splits.values():
        assert sum(e.target for e in examples) / len(examples) == pytest.approx(1 / 6, abs=0.1)


def test_splits_that_are_given_stay(tmp_path):
    rows = [(f"f{i}", i % 2) for i in range(40)]
    splits = load_defect_data(config_of(tmp_path, {"train": rows, "test": [("x", 0), ("y", 1)]}, split_by="random"))
    assert {split: len(part) for split, part in splits.items()} == {"train": 36, "validation": 4, "test": 2}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split_by": "project"}, "function 1 has no project; project_column_name"),
        ({"split_by": "time", "time_column_name": "when"}, "no column 'when'"),
        ({"split_by": "time", "time_column_name": "func"}, "time_column_name='func'.*no order"),
        ({"paired": True}, "functions 1 and 2 have labels 0 and 0"),
    ],
)
def test_splits_and_pairs_that_cannot_be_made_are_explained(tmp_path, settings, message):
    path = tmp_path / "train.jsonl"
    rows = [{"func": f"f{i}", "target": i // 2} for i in range(3)]
    path.write_text("\n".join(map(json.dumps, rows)))
    if "func" in settings.values():
        settings = {**settings, "text_column_name": "code"}
        path.write_text('{"code": "a", "func": 1, "target": 0}\n{"code": "b", "func": "x", "target": 1}')
    with pytest.raises(ValueError, match=message):
        load_defect_data(DefectDataConfig(train_file=str(path), **settings))
