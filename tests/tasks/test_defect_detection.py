"""Model inputs and scores of defect detection."""

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

from rsa_hf.tasks.defect_data import DefectDataConfig, Example
from rsa_hf.tasks.defect_detection import class_weights, compute_metrics, tokenize, trainer_metrics

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


# --- inputs ---------------------------------------------------------------------------------------------------------


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
    examples = [Example(words(n), n % 2) for n in (9, 2)] * 800  # more than the tokenizer's batch
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
def test_lengths_without_room_for_text_are_refused(tokenizer, config, message):
    with pytest.raises(ValueError, match=message):
        tokenize([Example("1", 0)], tokenizer, config)


# --- scores ---------------------------------------------------------------------------------------------------------


@given(
    labels=st.lists(st.integers(0, 1), min_size=2, max_size=50).filter(lambda labels: 0 < sum(labels) < len(labels))
)
def test_class_weights_agree_with_scikit_learn(labels):
    balanced = compute_class_weight("balanced", classes=np.array([0, 1]), y=labels)
    weights = class_weights(labels)
    assert weights.shape == (2,)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, torch.tensor(balanced / balanced.mean(), dtype=torch.float32))


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
def test_bad_input_to_the_scores_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        compute_metrics(*arguments)


@pytest.mark.parametrize("long_functions", ["truncate", "chunk"])
def test_the_trainer_reports_the_scores_of_functions(tokenizer, tmp_path, long_functions):
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
