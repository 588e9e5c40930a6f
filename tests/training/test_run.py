"""The code that all training scripts share: loading the model, its limits, logits, results."""

import json
import math

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
)

from rsa_hf import RSAConfig, is_patched
from rsa_hf.tasks.text_data import LanguageModelingDataConfig
from rsa_hf.training.arguments import ModelSettings, RunConfig, TrainingSettings
from rsa_hf.training.run import (
    TrainResult,
    load_model,
    predict_logits,
    report_results,
    require_positions_known,
    require_tokens_known,
)

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "vocab_size": 64,
}


@pytest.fixture
def saved(tmp_path):
    BertForMaskedLM(BertConfig(**SIZES)).to(torch.bfloat16).save_pretrained(tmp_path / "bert")
    return str(tmp_path / "bert")


def test_a_pretrained_model_is_loaded_in_float32_and_patched(saved):
    settings = ModelSettings(saved, config_overrides={"hidden_dropout_prob": 0.5}, attn_implementation="eager")
    model = load_model(AutoModelForSequenceClassification, settings, RSAConfig(num_regular=2), num_labels=3)
    assert is_patched(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config.num_labels == 3
    assert model.config.hidden_dropout_prob == 0.5
    assert model.config._attn_implementation == "eager"
    original = BertForMaskedLM.from_pretrained(saved).bert.encoder.layer[0].attention.self.query.weight
    assert torch.equal(model.bert.encoder.layer[0].attention.self.query.weight, original.float())


def test_a_model_type_gives_a_new_model():
    settings = ModelSettings(model_type="llama", config_overrides={**SIZES, "num_key_value_heads": 2})
    model = load_model(AutoModelForCausalLM, settings, None)
    assert not is_patched(model)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert (model.config.hidden_size, model.config.num_key_value_heads) == (32, 2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (ModelSettings(model_type="lama"), ["model_type='lama'", "Did you mean 'llama'?"]),
        (
            ModelSettings(model_type="llama", config_overrides={"hiden_size": 8}),
            ["LlamaConfig has no entry 'hiden_size'", "Did you mean 'hidden_size'?"],
        ),
        (ModelSettings("package:no_such_package/model"), ["'no_such_package' is not installed", "Install it"]),
        (ModelSettings("package:/model"), ["is not installed"]),
        (ModelSettings("package:no_such_package.part/model"), ["'no_such_package.part' is not installed"]),
        (ModelSettings("package:transformers/no_such_folder"), ["has no folder 'no_such_folder'"]),
        (ModelSettings("/no/such/folder"), ["/no/such/folder"]),
    ],
)
def test_a_model_that_cannot_be_loaded_is_refused(settings, words):
    with pytest.raises((ValueError, OSError)) as error:
        load_model(AutoModelForCausalLM, settings, None)
    for word in words:
        assert word in str(error.value)


def report(folder, rsa, scores):
    settings = ModelSettings(model_type="llama", config_overrides=SIZES)
    config = RunConfig(settings, rsa, LanguageModelingDataConfig(), TrainingSettings(output_dir=str(folder)))
    result = TrainResult(8, 100, {"loss": 2.0}, 4, {"loss": 1.0}, folder / "best", folder / "final")
    report_results(config, result, scores, [["a"], ["b"]], load_model(AutoModelForCausalLM, settings, rsa))


def test_results_are_printed_and_written(tmp_path, capsys):
    report(tmp_path, None, {"validation": {"loss": 1.0}, "test": {"loss": math.inf, "score": math.nan}})
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["config"]["training"]["output_dir"] == str(tmp_path)
    del written["config"]
    assert written == {
        "patched": False,
        "steps": 8,
        "best_step": 4,
        "train_tokens": 100,
        "validation": {"loss": 1.0},
        "test": {"loss": None, "score": None},
    }
    assert [line.strip() for line in capsys.readouterr().out.splitlines()][:4] == ["", "a", "-", "b"]
    assert not (tmp_path / "rsa.png").exists()


def test_results_of_a_patched_model_have_a_picture_if_matplotlib_is_installed(tmp_path, capsys, monkeypatch):
    def absent(*arguments):
        raise ImportError("drawing needs matplotlib: pip install 'rsa_hf[plot]'")

    with monkeypatch.context() as patch:
        patch.setattr("rsa_hf.training.run.plot_rem", absent)
        report(tmp_path, RSAConfig(num_regular=2), {})
    lines = capsys.readouterr().out.splitlines()
    assert "no picture of the RSA heads: drawing needs matplotlib: pip install 'rsa_hf[plot]'" in lines
    assert not (tmp_path / "rsa.png").exists()
    pytest.importorskip("matplotlib")
    report(tmp_path, RSAConfig(num_regular=2), {})
    assert (tmp_path / "rsa.png").exists()
    assert f"written: {tmp_path / 'results.json'}, {tmp_path / 'rsa.png'}" in capsys.readouterr().out


def test_logits_are_in_the_order_of_the_rows_at_any_batch_size(saved):
    model = load_model(AutoModelForSequenceClassification, ModelSettings(saved), None, num_labels=2)
    rows = [{"input_ids": list(range(1, 2 + i % 5)), "labels": 0} for i in range(7)]

    def collate(batch):
        longest = max(len(row["input_ids"]) for row in batch)
        ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in batch])
        return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.zeros(len(batch))}

    expected = torch.cat([predict_logits(model, [row], collate, 1) for row in rows])
    assert not model.training
    for batch_size in (2, 3, 10):
        torch.testing.assert_close(predict_logits(model, rows, collate, batch_size), expected)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(saved):
    model = load_model(AutoModelForSequenceClassification, ModelSettings(saved), None)
    require_tokens_known(model, 64)
    with pytest.raises(ValueError, match="the tokenizer has 65 tokens, the model 64"):
        require_tokens_known(model, 65)


@pytest.mark.parametrize(
    ("model_type", "has_a_table"), [("gpt2", True), ("opt", True), ("bert", True), ("llama", False), ("bloom", False)]
)
def test_inputs_longer_than_the_position_table_are_refused(model_type, has_a_table):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
    more = {"word_embed_proj_dim": 16, "is_decoder": True, "max_position_embeddings": 32}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes, **more)).eval()
    ids = torch.ones(1, 33, dtype=torch.long)
    require_positions_known(model, "data.block_size", 32)
    model(ids[:, :32])
    if not has_a_table:
        require_positions_known(model, "data.block_size", 33)
        model(ids)
        return
    with pytest.raises(ValueError, match=r"data\.block_size=33: this model takes at most 32 tokens\."):
        require_positions_known(model, "data.block_size", 33)
    with pytest.raises((IndexError, RuntimeError)):
        model(ids)
