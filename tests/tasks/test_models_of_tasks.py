"""Whether a model was made for a task, takes its inputs, and is scored on the text asked for alone."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from tokenizers import Tokenizer, models
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    ByT5Tokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from families import CONFIGS
from rsa_hf.tasks import defect_detection, language_modeling
from rsa_hf.training.arguments import ModelArguments
from rsa_hf.training.model_setup import largest_token_id, load_model, require_inputs_fit

SMALL = {"vocab_size": 259, "n_embd": 16, "n_layer": 1, "n_head": 2, "rotary_dim": 4, "n_positions": 12}
TINY = {"vocab_size": 97, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
BART = {"d_model": 8, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "eos_token_id": 2}


def save(folder, config, auto_class, **changes):
    """Save a model with random weights and a tokenizer of bytes; returns the folder's name."""
    config = type(config).from_dict({**config.to_dict(), "vocab_size": 400, **changes})
    auto_class.from_config(config).save_pretrained(folder)
    ByT5Tokenizer().save_pretrained(folder)
    return str(folder)


def ids_up_to(last):
    """A stand-in for a tokenizer."""
    return SimpleNamespace(get_vocab=lambda: {"a": 0, "b": last})


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return save(tmp_path_factory.mktemp("gpt2"), CONFIGS["gpt2"](), AutoModelForCausalLM)


@pytest.fixture(scope="module")
def three_classes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    return save(folder, CONFIGS["bert"](), AutoModelForSequenceClassification, num_labels=3)


@pytest.mark.parametrize(
    ("model_type", "settings", "longest"),
    [
        ("roberta", {**TINY, "max_position_embeddings": 514}, 512),  # two of its positions are never reached
        ("bart", {**TINY, **BART, "max_position_embeddings": 12}, 12),  # it reads the end of a text
        ("gpt2", SMALL, 12),
        ("gptj", SMALL, 12),  # its table of positions is a buffer
        ("codegen", {**SMALL, "n_head": 4}, 12),
        ("llama", {**TINY, "max_position_embeddings": 12}, math.inf),  # rotary
    ],
)
def test_the_longest_input_is_tried(model_type, settings, longest):
    auto_class = AutoModelForSequenceClassification if model_type in ("roberta", "bart") else AutoModelForCausalLM
    model = auto_class.from_config(AutoConfig.for_model(model_type, **settings)).train()
    require_inputs_fit(model, ids_up_to(40), min(longest, 200), "block_size")
    assert model.training
    if longest < math.inf:
        with pytest.raises(ValueError, match=f"block_size={longest + 1}"):
            require_inputs_fit(model, ids_up_to(40), longest + 1, "block_size")


def test_the_trial_leaves_the_attention_of_big_bird():
    """On an input too short for blocks, it would become full attention for good."""
    config = AutoConfig.for_model("big_bird", **TINY, max_position_embeddings=256, block_size=4, num_random_blocks=1)
    model = AutoModelForSequenceClassification.from_config(config)
    require_inputs_fit(model, ids_up_to(40), 128, "max_seq_length")
    assert model.bert.attention_type == "block_sparse"


def test_a_tokenizer_with_gaps_is_noticed():
    """Its ids go beyond its length."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 258})))
    assert largest_token_id(tokenizer) == 258 > len(tokenizer)
    fits, too_small = (GPT2LMHeadModel(GPT2Config(**{**SMALL, "vocab_size": size})) for size in (259, 258))
    require_inputs_fit(fits, tokenizer, 4, "block_size")
    with pytest.raises(ValueError, match="ids up to 258, the model 258 .*tokenizer_name"):
        require_inputs_fit(too_small, tokenizer, 4, "block_size")


def test_a_tokenizer_that_cannot_pad_is_refused_before_the_data_is_read(three_classes, tmp_path):
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}))).save_pretrained(tmp_path)
    settings = ["--ignore_mismatched_sizes", "--tokenizer_name", str(tmp_path), "--train_file", "absent.jsonl"]
    with pytest.raises(ValueError, match="no padding token"):
        defect_detection.plain_model_and_rows(["--model_name_or_path", three_classes, *settings])


def test_a_head_for_other_classes_is_replaced_only_where_it_is_asked_for(three_classes, capsys):
    load = partial(load_model, AutoModelForSequenceClassification, num_labels=2)
    with pytest.raises(ValueError, match="ignore_mismatched_sizes"):
        load(ModelArguments(three_classes))
    model = load(ModelArguments(three_classes, ignore_mismatched_sizes=True))
    assert model(torch.tensor([[1]])).logits.shape == (1, 2)
    assert "classifier.bias, classifier.weight: new" in capsys.readouterr().out


def test_what_is_scored_is_said(gpt2, tmp_path, capsys):
    detector = save(tmp_path / "detector", CONFIGS["bert"](), AutoModelForSequenceClassification)
    language_modeling.evaluate(gpt2, "test", ["--max_eval_bytes=200", "--block_size=32"])
    assert "scored: test of the embedded data" in capsys.readouterr().err
    (tmp_path / "rows.jsonl").write_text('{"func": "int a;", "target": 0}\n{"func": "int b;", "target": 1}\n')
    settings = [f"--test_file={tmp_path}/rows.jsonl", "--train_file=absent.jsonl", "--max_seq_length=16"]
    defect_detection.evaluate(detector, "test", settings)
    assert f"scored: 2 functions, test of {tmp_path}/rows.jsonl\n" in capsys.readouterr().err


def test_a_model_that_was_not_trained_for_a_task_is_not_scored(gpt2, three_classes, tmp_path):
    for model, message in ((three_classes, "3 classes"), (gpt2, r"has no score\.weight")):
        with pytest.raises(ValueError, match=message):
            defect_detection.evaluate(model, "test", [])
    llama = save(tmp_path, CONFIGS["llama"](), AutoModelForSequenceClassification)
    with pytest.raises(ValueError, match=r"has no lm_head\.weight"):
        language_modeling.evaluate(llama, "test", [])
    tied = save(tmp_path / "tied", CONFIGS["gpt2"](), AutoModelForSequenceClassification)
    with pytest.raises(ValueError, match=r"has score\.weight"):
        language_modeling.evaluate(tied, "test", [])


@pytest.mark.parametrize(
    ("name", "model_class"),
    [("bert", AutoModelForSequenceClassification), ("gpt2", AutoModelForCausalLM), ("llama", AutoModelForCausalLM)],
)
def test_a_model_without_its_tokenizer_is_not_scored(name, model_class, tmp_path, run):
    """AutoTokenizer gives one to which all words are unknown, or that leaves them out, or it has a long message."""
    base = tmp_path / "base"
    model_class.from_config(CONFIGS[name]()).save_pretrained(base)
    (tmp_path / "rows.jsonl").write_text('{"func": "int a;", "target": 0}\n')
    task = "defect" if name == "bert" else "lm"
    code, _, err = run("evaluate", task, base, "--test_file", tmp_path / "rows.jsonl", "--use_cpu")
    assert code == 2 and "Traceback" not in err
    code, out, _ = run("patch", base, tmp_path / "patched")
    assert code == 0 and "has no tokenizer to save" in out
    assert not list((tmp_path / "patched").glob("*token*"))


def test_only_the_text_to_score_is_read_and_tokenized(gpt2, tmp_path, text):
    """The other texts are absent, or begin with what is no UTF-8."""
    path = tmp_path / "test.txt"
    path.write_bytes(text)
    settings = [f"--train_file={tmp_path}/absent", f"--validation_file={tmp_path}/absent", "--block_size=32"]
    scores = language_modeling.evaluate(gpt2, "test", [*settings, f"--test_file={path}"])
    assert scores["num_bytes"] == len(text) - 1
    path.write_bytes(b"\xff\n" * 10 * len(text) + text * 2)
    shares = ["--test_split_percentage=5", "--validation_split_percentage=90"]
    scores = language_modeling.evaluate(gpt2, "test", [f"--train_file={path}", "--block_size=32", *shares])
    assert scores["num_bytes"] == pytest.approx(1.1 * len(text), abs=4)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"n_layers": 1}, "config_overrides: a GPT2Config has no entry 'n_layers'.* 'n_layer'"),
        ({"n_layer": "two"}, "(?s)n_layer.*expected int, got str"),
    ],
)
@pytest.mark.parametrize("from_scratch", [True, False])
def test_an_override_that_the_config_does_not_take_is_an_error(gpt2, from_scratch, overrides, words):
    model = {"model_type": "gpt2"} if from_scratch else {"model_name_or_path": gpt2}
    with pytest.raises((ValueError, StrictDataclassError), match=words):
        load_model(AutoModelForCausalLM, ModelArguments(**model, config_overrides=overrides))
