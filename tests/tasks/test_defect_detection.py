"""Model inputs of defect detection, its scores, and a run on Devign."""

import copy
import csv
import json
import lzma
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import f1_score, matthews_corrcoef
from sklearn.utils.class_weight import compute_class_weight
from tokenizers import processors
from transformers import BertConfig, BertForSequenceClassification, DataCollatorWithPadding, Trainer, TrainingArguments
from transformers.pipelines import pipeline

from rsa_hf.tasks.defect_data import DefectDataConfig, Example
from rsa_hf.tasks.defect_detection import _rows_and_tokens, class_weights, main, predict, tokenize
from rsa_hf.tasks.defect_scores import choose_threshold, compute_metrics, probabilities, trainer_metrics

PAD, CLS, SEP = 0, 1, 2


@pytest.fixture(scope="module")
def tokenizer(tokenizer):
    """Word wn is token n; <s> before and </s> after."""
    tokenizer = copy.deepcopy(tokenizer)
    around = processors.TemplateProcessing("<s> $A </s>", None, [("<s>", CLS), ("</s>", SEP)])
    tokenizer.backend_tokenizer.post_processor = around
    return tokenizer


def words(count: int, first: int = 4) -> str:
    return " ".join(f"w{first + i}" for i in range(count))


def words_of(data_folder, output, model=None, **settings):
    """The command line of a run of a new BERT with RoBERTa's tokenizer."""
    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "intermediate_size": 12, "vocab_size": 50265, **(model or {})}
    shared = {"model_type": "bert", "config_overrides": json.dumps(sizes), "output_dir": output, "max_steps": 1}
    shared |= {"tokenizer_name": data_folder / "tokenizers" / "roberta", "use_cpu": True, "report_to": "none"}
    return [f"--{key}={value}" for key, value in (shared | settings).items()]


def test_codexglue_finds_the_accuracy_of_a_run(data_folder, tmp_path):
    """By the arithmetic of its evaluator: lines of `idx` and class, against the functions of the test split."""
    output, settings = tmp_path / "run", {"max_seq_length": 32, "per_device_eval_batch_size": 64}
    for split, name, size in (("train", "train", 64), ("validation", "valid", 64), ("test", "test", 400)):
        settings[f"{split}_file"] = path = tmp_path / f"{name}.jsonl"
        with lzma.open(data_folder / "devign" / f"{name}.jsonl.xz", "rt", encoding="utf-8") as lines:
            path.write_text("".join(islice(lines, size)), encoding="utf-8")
    answers = {row["idx"]: row["target"] for row in map(json.loads, path.read_text().splitlines())}
    # Its weights are so large that both classes are predicted.
    model = {"hidden_size": 48, "intermediate_size": 48, "initializer_range": 0.5}
    arguments = words_of(data_folder, output, model, **settings)
    main(arguments)
    scores = json.loads((output / "all_results.json").read_text())
    lines = (output / "predictions.txt").read_text().splitlines()
    predictions = dict(tuple(map(int, line.split("\t"))) for line in lines)
    assert predictions.keys() == answers.keys()
    assert len(lines) == scores["test_num_examples"] == 400
    assert sum(predictions[idx] == answers[idx] for idx in answers) / 400 == scores["test_accuracy"]
    # The other scores follow from `predictions.jsonl` alone.
    rows = [json.loads(line) for line in (output / "predictions.jsonl").read_text().splitlines()]
    targets, probabilities = (np.array(x) for x in zip(*((answers[r["idx"]], r["score"]) for r in rows), strict=True))
    for at, classes in (("", probabilities > 0.5), ("_at_threshold", [row["label"] == "defective" for row in rows])):
        assert scores[f"test_f1{at}"] == pytest.approx(f1_score(targets, classes))
        assert scores[f"test_predicted_positive_share{at}"] == np.mean(classes)
    # A pipeline of transformers has the same scores, and `predict`, which reads no labels.
    files = [word for word in arguments if "_file=" in word]
    functions = [json.loads(line)["func"] for line in path.read_text().splitlines()]
    found = predict(str(output), str(path), files)
    assert [each["idx"] for each in found] == list(answers)
    assert all((each["label"] == "defective") == (each["score"] > scores["test_threshold"]) for each in found)
    assert [int(each["score"] > 0.5) for each in found] == [predictions[each["idx"]] for each in found]
    classifier = pipeline("text-classification", str(output), top_k=None)
    assert classifier.tokenizer("puts('</s>');").input_ids.count(classifier.tokenizer.eos_token_id) == 1
    for each, answer in zip(found[:40], classifier(functions[:40], truncation=True), strict=True):
        assert {part["label"]: part["score"] for part in answer}["defective"] == pytest.approx(each["score"], abs=1e-5)
    with lzma.open(tmp_path / "unlabelled.csv.xz", "wt", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["code"], *([function] for function in functions[:3])])
    of_run = ["--paired", "--time_column_name=when"]  # a run's settings, which say nothing of unlabelled functions
    unlabelled = predict(str(output), str(tmp_path / "unlabelled.csv.xz"), of_run)
    assert [each["idx"] for each in unlabelled] == [0, 1, 2]
    assert [each["score"] for each in unlabelled] == pytest.approx([each["score"] for each in found[:3]], abs=1e-5)
    audit = json.loads((output / "audit.json").read_text())
    assert audit["splits"]["test"]["examples"] == 400 and "accuracy" in audit["word_counts"]["test"]
    assert (output / "confusion_test.png").stat().st_size > 1000


@pytest.mark.usefixtures("small_library")
def test_a_run_reports_pairs_and_says_when_all_answers_are_one(tmp_path, data_folder, capsys):
    settings = {"max_train_samples": 40, "max_eval_samples": 20, "max_characters": 100, "max_seq_length": 16}
    main(words_of(data_folder, tmp_path / "run", **settings, learning_rate=0, rsa="none"))
    scores = json.loads((tmp_path / "run" / "all_results.json").read_text())
    rates = [scores[f"test_pair_{name}"] for name in ("correct", "vulnerable", "benign", "reversed")]
    assert sum(rates) == pytest.approx(1)
    share = scores["test_predicted_positive_share"]
    assert ("WARNING: all functions of test" in capsys.readouterr().out) is (share in (0, 1))


def test_validation_without_one_class_is_refused(tmp_path, data_folder):
    files = {}
    for split, targets in (("train", (0, 1)), ("validation", (0, 0))):
        files[f"{split}_file"] = path = tmp_path / f"{split}.jsonl"
        path.write_text("\n".join(json.dumps({"func": f"{split}{i}", "target": t}) for i, t in enumerate(targets)))
    with pytest.raises(ValueError, match="no validation split of both classes.*split_by"):
        main(words_of(data_folder, tmp_path / "run", **files))


@pytest.mark.parametrize("cutting", ["truncate", "chunk"])
def test_the_number_of_tokens_is_that_of_the_uncut_function(tokenizer, cutting):
    examples = [Example(words(n), 0) for n in (1, 6, 7, 30)]
    config = DefectDataConfig(max_seq_length=8, long_functions=cutting, chunk_overlap=3)
    assert _rows_and_tokens(examples, tokenizer, config)[1] == [3, 8, 9, 32]


# --- inputs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "max_length", "overlap"), [(20, 8, 2), (6, 8, 2), (7, 8, 5), (13, 9, 0), (1, 3, 0)])
def test_chunks_cover_the_function(tokenizer, size, max_length, overlap):
    config = DefectDataConfig(max_seq_length=max_length, long_functions="chunk", chunk_overlap=overlap)
    rows = tokenize([Example(words(2), 1), Example(words(size), 0)], tokenizer, config)
    chunks = [row["input_ids"] for row in rows if row["example_id"] == 1]
    assert all(chunk[0] == CLS and chunk[-1] == SEP and len(chunk) <= max_length for chunk in chunks)
    covered = chunks[0][1:-1]
    for chunk in chunks[1:]:
        shared = min(overlap, len(covered))
        assert chunk[1 : 1 + shared] == covered[len(covered) - shared :]
        covered = covered + chunk[1 + shared : -1]
    assert covered == [n + 4 for n in range(size)]
    assert len(chunks) == 1 + max(0, -(-(size - (max_length - 2)) // (max_length - 2 - overlap)))
    assert [row["labels"] for row in rows] == [1] * sum(e == 0 for e in rows["example_id"]) + [0] * len(chunks)


def test_truncation_keeps_the_beginning_and_rows_can_be_collated(tokenizer):
    examples = [Example(words(n), n % 2) for n in (9, 2)] * 800  # more than a batch of the tokenizer
    rows = tokenize(examples, tokenizer, DefectDataConfig(max_seq_length=6))
    assert rows["example_id"][:] == list(range(1600))
    batch = DataCollatorWithPadding(tokenizer)([rows[1598], rows[1599]])
    assert batch["input_ids"].tolist() == [[CLS, 4, 5, 6, 7, SEP], [CLS, 4, 5, SEP, PAD, PAD]]
    assert batch["attention_mask"].tolist() == [[1] * 6, [1, 1, 1, 1, 0, 0]]
    assert batch["labels"].tolist() == [1, 0]
    config = DefectDataConfig(max_seq_length=6, long_functions="chunk", chunk_overlap=1)
    chunked = tokenize(examples, tokenizer, config)
    assert chunked["example_id"][-4:] == [1598, 1598, 1598, 1599]


@pytest.mark.parametrize(
    "settings", [{"max_seq_length": 2}, *({"max_seq_length": 6, "chunk_overlap": overlap} for overlap in (4, -1))]
)
def test_lengths_without_room_for_text_are_refused(tokenizer, settings):
    config = DefectDataConfig(long_functions="chunk" if "chunk_overlap" in settings else "truncate", **settings)
    with pytest.raises(ValueError, match=f"max_seq_length={config.max_seq_length}"):
        tokenize([Example("w5", 0)], tokenizer, config)


# --- scores ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 1), min_size=2, max_size=50).filter(lambda labels: 0 < sum(labels) < len(labels)))
def test_class_weights_agree_with_scikit_learn(labels):
    balanced = compute_class_weight("balanced", classes=np.array([0, 1]), y=labels)
    torch.testing.assert_close(class_weights(labels), torch.tensor(balanced / balanced.mean(), dtype=torch.float32))


@given(seed=st.integers(0, 1000), size=st.integers(1, 40))
def test_logits_of_a_function_are_the_mean_over_its_chunks(seed, size):
    rng = np.random.default_rng(seed)
    ids, labels_of = rng.integers(0, 12, size), rng.integers(0, 2, 12)
    logits = torch.tensor(rng.normal(size=(size, 2)), dtype=torch.bfloat16)
    functions = sorted(set(ids.tolist()))
    means = [[logits[i].double().numpy() for i in range(size) if ids[i] == f] for f in functions]
    expected = compute_metrics(np.array([np.mean(m, axis=0) for m in means]), labels_of[functions])
    found = compute_metrics(logits, torch.tensor(labels_of[ids]), ids.tolist())
    assert found == pytest.approx(expected, nan_ok=True)  # no area under a curve of one class


def with_probabilities(probabilities):
    """Logits of classifiers that give class 1 these probabilities."""
    odds = np.log(np.array(probabilities) / (1 - np.array(probabilities)))
    return np.stack([np.ones_like(odds), 1 + odds], axis=1)


@pytest.mark.filterwarnings("ignore:A single label was found")
@given(pairs=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 1)), min_size=1, max_size=25))
def test_no_threshold_has_a_higher_mcc(pairs):
    ranks, labels = (np.array(column) for column in zip(*pairs, strict=True))
    logits = with_probabilities(ranks / 13)
    threshold = choose_threshold(logits, labels)

    def mcc(threshold):
        return matthews_corrcoef(labels, ranks / 13 > threshold)

    best = max(mcc((i + 0.5) / 13) for i in range(13))
    at = compute_metrics(logits, labels, threshold=threshold)["mcc_at_threshold"]
    assert at == pytest.approx(best) or (best == 0 and threshold == 0.5)
    assert at == pytest.approx(mcc(threshold))
    for each in np.linspace(-1, 1, 99):  # no threshold lies between equal logits
        assert len({*probabilities(np.array([[0, each]] * 9))}) == 1


def test_the_threshold_is_for_the_mean_of_the_chunks():
    """Not for their sum, by which a function of many chunks would seem surer."""
    chunks, ids = with_probabilities([0.4] * 5 + [0.1, 0.45]), [0] * 5 + [1, 2]
    labels = np.array([0, 0, 1])[ids]
    threshold = choose_threshold(chunks, labels, ids)
    scores = compute_metrics(chunks, labels, ids, threshold)
    assert threshold == scores["threshold"] == pytest.approx(0.425)
    assert (scores["num_examples"], scores["mcc"], scores["mcc_at_threshold"], scores["roc_auc"]) == (3, 0, 1, 1)


def test_bad_input_to_the_scores_is_refused():
    for message, arguments in (
        (r"\[2, 1\]", ([[1.0], [2.0]], [0, 1])),
        ("diverged", ([[1.0, float("nan")]], [0])),
        ("example_ids", ([[1.0, 2.0]] * 3, [0, 1, 0], [4, 4, 5])),
    ):
        with pytest.raises(ValueError, match=message):
            compute_metrics(*arguments)


def test_transformers_trainer_reports_the_scores_of_functions(tokenizer, tmp_path):
    data = DefectDataConfig(max_seq_length=8, long_functions="chunk", chunk_overlap=2)
    functions = [Example(words(n, n + 4), n % 2) for n in (20, 3, 17, 9, 24)]
    rows, collate = tokenize(functions, tokenizer, data), DataCollatorWithPadding(tokenizer)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    # No two scores are so near that the batch decides their order.
    model = BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), **sizes, initializer_range=1.0))
    names = ["labels", "example_id"]
    arguments = TrainingArguments(str(tmp_path), label_names=names, per_device_eval_batch_size=2, use_cpu=True)
    trainer = Trainer(model, arguments, eval_dataset=rows, data_collator=collate, compute_metrics=trainer_metrics)
    scores = trainer.evaluate()
    batch = collate(list(rows))
    ids = batch.pop("example_id")
    with torch.no_grad():
        expected = compute_metrics(model.eval()(**batch).logits, batch["labels"], ids)
    assert scores["eval_num_examples"] == 5
    assert {name: scores[f"eval_{name}"] for name in expected} == pytest.approx(expected)
