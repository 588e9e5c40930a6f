"""Data, audit, tokenisation and scores of defect detection, on made-up and on real functions."""

import gzip
import json
import lzma
from collections import Counter

import datasets
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from sklearn.utils.class_weight import compute_class_weight
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
)

from rsa_hf.tasks import defect_data
from rsa_hf.tasks.defect_data import (
    DefectDataConfig,
    Example,
    audit,
    format_audit,
    load_defect_data,
    read_json_lines,
)
from rsa_hf.tasks.defect_detection import class_weights, compute_metrics, tokenize, trainer_metrics

CLEAN, DEFECTIVE = {"func": "int f() {}", "target": 0}, {"func": "int g() {}", "target": 1}
PAD, CLS, SEP = 0, 1, 2


@pytest.fixture(scope="module")
def tokenizer():
    """Word n is token n + 4; [CLS] before and [SEP] after."""
    vocabulary = {"[PAD]": PAD, "[CLS]": CLS, "[SEP]": SEP, "[UNK]": 3} | {str(n): n + 4 for n in range(50)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", CLS), ("[SEP]", SEP)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]"
    )


def words(count: int) -> str:
    return " ".join(map(str, range(count)))


def write(path, rows) -> str:
    text = "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    with opener(path, "wt", encoding="utf-8") as file:
        file.write(text)
    return str(path)


# --- settings -----------------------------------------------------------------------------------------------


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
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        DefectDataConfig(**settings)


# --- reading ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".jsonl.xz"])
def test_files_in_every_packing(tmp_path, ending):
    rows = [CLEAN, "\n", {"func": "\u2028 ü", "target": True, "idx": 7}, {"func": "h", "target": False}]
    path = write(tmp_path / f"data{ending}", rows)
    assert read_json_lines(path) == [Example("int f() {}", 0), Example("\u2028 ü", 1), Example("h", 0)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"func": "f", "tar\n', "Invalid control character"),
        ('{"func": "\udcff", "target": 0}\n', "can't decode byte 0xff"),
        ('{"func": "\\ud800", "target": 0}\n', "surrogates not allowed"),
        ("[1, 2]\n", r"\[1, 2\] is no labelled function; needed are `func`"),
        ({"func": "f"}, r"\{'func': 'f'\} is no labelled function"),
        ({"func": " \n\t", "target": 1}, "is no labelled function"),
        ({"func": None, "target": 1}, "is no labelled function"),
        ({"func": "f", "target": 2}, "is no labelled function"),
        ({"func": "f", "target": "1"}, "is no labelled function"),
        ({"func": "f", "target": None}, "is no labelled function"),
    ],
)
def test_a_bad_line_is_named(tmp_path, row, message):
    path = tmp_path / "data.jsonl"
    line = row if isinstance(row, str) else json.dumps(row) + "\n"
    good = json.dumps(CLEAN) + "\n"
    path.write_bytes((good * 2 + line + good).encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=message) as error:
        read_json_lines(path)
    assert str(error.value).startswith(f"{path}, line 3: ")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([CLEAN, {"func": "h", "target": 0}], "all 2 training functions have target 0. Give functions of both"),
        ([], "the train split is empty"),
        ([CLEAN, {**CLEAN, "target": 1}], "the train split is empty, or nothing of it is left"),
    ],
)
def test_training_functions_that_cannot_train(tmp_path, rows, message):
    file = write(tmp_path / "train.jsonl", rows)
    with pytest.raises(ValueError, match=message):
        load_defect_data(DefectDataConfig(source="files", train_file=file))


def test_an_empty_evaluation_split(tmp_path):
    train, test = write(tmp_path / "a.jsonl", [CLEAN, DEFECTIVE]), write(tmp_path / "b.jsonl", [])
    with pytest.raises(ValueError, match="the test split is empty"):
        load_defect_data(DefectDataConfig(source="files", train_file=train, test_file=test))


def test_hub(monkeypatch):
    rows = {"func": ["f", "g"], "target": [True, False], "project": ["a", "b"]}
    hub = {split: datasets.Dataset.from_dict(rows) for split in ("train", "test")}
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda name: asked.append(name) or hub)
    splits = load_defect_data(DefectDataConfig(source="hub", deduplicate=False))
    assert asked == ["google/code_x_glue_cc_defect_detection"]
    functions = [Example("f", 1), Example("g", 0)]
    assert splits == {"train": functions, "test": functions}
    hub["test"] = datasets.Dataset.from_dict({"func": ["f"], "target": [3]})
    with pytest.raises(ValueError, match="defect_detection, test row 1: .* is no labelled function"):
        load_defect_data(DefectDataConfig(source="hub"))
    del hub["train"]
    with pytest.raises(ValueError, match=r"has the splits \['test'\]; 'train' is needed"):
        load_defect_data(DefectDataConfig(source="hub"))


# --- choosing -----------------------------------------------------------------------------------------------


def test_deduplication_touches_the_training_split_only(tmp_path):
    files = {
        "train": [("a", 0), ("b", 1), ("a ", 0), ("c", 1), ("\nc", 0), ("d", 1), ("e", 1), ("f", 0)],
        "validation": [("d", 1), ("d", 1)],
        "test": [("e", 0), ("x", 1), ("x", 0)],
    }
    paths = {
        f"{split}_file": write(
            tmp_path / f"{split}.jsonl", [{"func": func, "target": target} for func, target in rows]
        )
        for split, rows in files.items()
    }
    kept = load_defect_data(DefectDataConfig(source="files", **paths))
    assert [(e.func, e.target) for e in kept["train"]] == [("a", 0), ("b", 1), ("f", 0)]
    everything = load_defect_data(DefectDataConfig(source="files", deduplicate=False, **paths))
    for split, rows in files.items():
        assert [(e.func, e.target) for e in everything[split]] == rows
        if split != "train":
            assert kept[split] == everything[split]


@given(
    targets=st.lists(st.integers(0, 1), min_size=2, max_size=60),
    limit=st.integers(2, 70),
    seed=st.integers(0, 5),
)
def test_subsample_is_stratified_ordered_and_seeded(targets, limit, seed):
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


def test_subsample_keeps_pairs_together():
    examples = [Example(f"{i} {target}", target, name=str(i)) for i in range(50) for target in (0, 1)]
    kept = defect_data._subsample(examples, 20, seed=1)
    assert Counter(Counter(example.name for example in kept).values()) == {2: 10}
    assert kept != defect_data._subsample(examples, 20, seed=2)


def test_embedded_source():
    config = DefectDataConfig(
        min_characters=60, max_characters=200, max_train_examples=100, max_eval_examples=40, seed=3
    )
    splits = load_defect_data(config)
    assert {split: len(examples) for split, examples in splits.items()} == {
        "train": 100,
        "validation": 40,
        "test": 40,
    }
    for examples in splits.values():
        assert sum(example.target for example in examples) == len(examples) // 2
        for clean, defective in zip(examples[::2], examples[1::2], strict=True):
            assert (clean.path, clean.name, clean.target) == (defective.path, defective.name, 0)


@given(
    labels=st.lists(st.integers(0, 1), min_size=2, max_size=50).filter(lambda labels: 0 < sum(labels) < len(labels))
)
def test_class_weights_agree_with_scikit_learn(labels):
    balanced = compute_class_weight("balanced", classes=np.array([0, 1]), y=labels)
    weights = class_weights(labels)
    assert weights.shape == (2,)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, torch.tensor(balanced / balanced.mean(), dtype=torch.float32))


# --- audit --------------------------------------------------------------------------------------------------


def test_audit(tokenizer):
    splits = {
        "train": [Example(words(n), target) for n, target in ((1, 0), (1, 0), (2, 1), (2, 0), (3, 0))],
        "validation": [Example(words(8), 1), Example(words(3), 1)],
        "test": [Example(words(3), 1), Example(words(8), 1), Example(words(8), 1)],
    }
    report = audit(splits, tokenizer, max_length=9)
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

    assert "only one split" in format_audit(audit({"test": splits["test"]}, tokenizer, 9))


# --- model inputs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "max_length", "overlap"), [(20, 8, 2), (6, 8, 2), (7, 8, 5), (13, 9, 0), (1, 3, 0)])
def test_chunks_cover_the_function(tokenizer, size, max_length, overlap):
    config = DefectDataConfig(max_length=max_length, long_functions="chunk", chunk_overlap=overlap)
    rows = tokenize([Example(words(2), 1), Example(words(size), 0)], tokenizer, config)
    chunks = [row["input_ids"] for row in rows if row["example_id"] == 1]
    assert all(chunk[0] == CLS and chunk[-1] == SEP and len(chunk) <= max_length for chunk in chunks)
    covered = chunks[0][1:-1]
    for chunk in chunks[1:]:
        shared = min(overlap, len(covered))
        assert chunk[1 : 1 + shared] == covered[len(covered) - shared :]
        covered = covered + chunk[1 + shared : -1]
    assert covered == [n + 4 for n in range(size)]
    step = max_length - 2 - overlap
    assert len(chunks) == 1 + max(0, -(-(size - (max_length - 2)) // step))
    assert [row["labels"] for row in rows] == [1] * sum(e == 0 for e in rows["example_id"]) + [0] * len(chunks)


def test_truncation_keeps_the_beginning(tokenizer):
    examples = [Example(words(n), n % 2) for n in (9, 2)] * 800  # more than one batch of the tokenizer
    rows = tokenize(examples, tokenizer, DefectDataConfig(max_length=6))
    assert rows.num_rows == 1600
    assert rows[1598] == {
        "input_ids": [CLS, 4, 5, 6, 7, SEP],
        "attention_mask": [1] * 6,
        "labels": 1,
        "example_id": 1598,
    }
    assert rows["example_id"][:] == list(range(1600))
    chunked = tokenize(examples, tokenizer, DefectDataConfig(max_length=6, long_functions="chunk", chunk_overlap=1))
    assert chunked["example_id"][-4:] == [1598, 1598, 1598, 1599]


def test_rows_can_be_collated(tokenizer):
    rows = tokenize([Example(words(1), 1), Example(words(3), 0)], tokenizer, DefectDataConfig())
    batch = DataCollatorWithPadding(tokenizer)(list(rows))
    assert batch["input_ids"].tolist() == [[CLS, 4, SEP, PAD, PAD], [CLS, 4, 5, 6, SEP]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert batch["labels"].tolist() == [1, 0]
    assert batch["example_id"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DefectDataConfig(max_length=2), "max_length=2: leaves room for 0 tokens of text; choose more"),
        (DefectDataConfig(max_length=6, long_functions="chunk", chunk_overlap=4), "room for 4 .* chunk_overlap is 4"),
        (DefectDataConfig(max_length=6, long_functions="chunk", chunk_overlap=-1), "chunk_overlap is -1"),
    ],
)
def test_lengths_without_room_for_text(tokenizer, config, message):
    with pytest.raises(ValueError, match=message):
        tokenize([Example("1", 0)], tokenizer, config)


# --- scores -------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 1000), size=st.integers(1, 40))
def test_logits_of_a_function_are_the_mean_over_its_chunks(seed, size):
    rng = np.random.default_rng(seed)
    ids, labels_of = rng.integers(0, 12, size), rng.integers(0, 2, 12)
    logits = torch.tensor(rng.normal(size=(size, 2)), dtype=torch.bfloat16)
    functions = sorted(set(ids.tolist()))
    means = [[logits[i].double().numpy() for i in range(size) if ids[i] == f] for f in functions]
    expected = compute_metrics(np.array([np.mean(m, axis=0) for m in means]), labels_of[functions])
    assert compute_metrics(logits, torch.tensor(labels_of[ids]), ids.tolist()) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1.0], [2.0]], [0, 1]), r"logits have shape \[2, 1\] and labels \[2\]; needed are \[N, 2\]"),
        (([[1.0, float("nan")]], [0]), "logits hold NaN or infinite values, so training has diverged"),
        (([[1.0, 2.0]] * 3, [0, 1, 0], [4, 4, 5]), "example_ids do not match the labels"),
    ],
)
def test_scores_of_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        compute_metrics(*arguments)


@pytest.mark.parametrize("long_functions", ["truncate", "chunk"])
def test_with_the_trainer(tokenizer, tmp_path, long_functions):
    config = DefectDataConfig(max_length=8, long_functions=long_functions, chunk_overlap=2)
    rows = tokenize([Example(words(n), n % 2) for n in (30, 3, 17, 9, 40)], tokenizer, config)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=8,
            max_position_embeddings=8,
        )
    )
    trainer = Trainer(
        model,
        transformers.TrainingArguments(
            str(tmp_path),
            label_names=["labels", "example_id"] if long_functions == "chunk" else None,
            per_device_eval_batch_size=2,
            per_device_train_batch_size=4,
            max_steps=2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=trainer_metrics,
    )
    trainer.train()
    scores = trainer.evaluate()
    assert scores["eval_num_examples"] == 5
    assert scores["eval_majority_accuracy"] == 0.6
    batch = DataCollatorWithPadding(tokenizer)(list(rows))
    ids = batch.pop("example_id")
    with torch.no_grad():
        logits = model.eval()(**batch).logits
    expected = compute_metrics(logits, batch["labels"], ids)
    assert {name: scores[f"eval_{name}"] for name in expected} == pytest.approx(expected)


# --- Devign -------------------------------------------------------------------------------------------------


class WordCount:
    """Stands for a tokenizer where real lengths are not at stake, as tokenizing all of Devign takes a minute."""

    def __call__(self, texts, **_):
        return {"input_ids": [text.split() for text in texts]}


def test_devign(devign_folder):
    files = {
        f"{split}_file": str(devign_folder / f"{name}.jsonl.xz")
        for split, name in (("train", "train"), ("validation", "valid"), ("test", "test"))
    }
    raw = load_defect_data(DefectDataConfig(source="files", deduplicate=False, **files))
    sizes = {split: (len(examples), sum(e.target for e in examples)) for split, examples in raw.items()}
    assert sizes == {"train": (21854, 10018), "validation": (2732, 1187), "test": (2732, 1255)}
    everything = [example for examples in raw.values() for example in examples]
    assert len({" ".join(example.func.split()) for example in everything}) == 27239

    report = audit(raw, WordCount(), max_length=400)
    assert report["conflicting_labels"] == 76
    assert sum(report["cross_split_copies"].values()) == 19
    assert sum(numbers["duplicates"] for numbers in report["splits"].values()) == 27318 - 27239 - 19
    assert report["splits"]["test"]["majority_share"] == pytest.approx(0.5406, abs=5e-5)
    assert "54.06%" in format_audit(report)

    kept = load_defect_data(DefectDataConfig(source="files", max_train_examples=2000, **files))
    evaluated = {" ".join(example.func.split()) for split in ("validation", "test") for example in raw[split]}
    functions = {" ".join(example.func.split()) for example in kept["train"]}
    assert len(functions) == len(kept["train"]) == 2000
    assert not functions & evaluated
    assert sum(e.target for e in kept["train"]) / 2000 == pytest.approx(10018 / 21854, abs=0.002)
    assert kept["test"] == raw["test"]
