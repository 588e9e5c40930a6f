"""The README's code does what it says, on a tiny model in place of CodeBERT."""

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from families import CONFIGS
from rsa_hf import is_patched

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.fixture(scope="module")
def codebert(data_folder, tmp_path_factory):
    """A tiny RoBERTa with CodeBERT's real vocabulary."""
    folder = tmp_path_factory.mktemp("codebert")
    tokenizer = AutoTokenizer.from_pretrained(data_folder / "tokenizers" / "roberta")
    config = CONFIGS["roberta"]()
    config.vocab_size = len(tokenizer)
    config.max_position_embeddings = 514
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow  # builds the embedded data and trains
def test_all_code_runs_in_order(codebert, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    replaced = {
        '"microsoft/codebert-base"': repr(str(codebert)),
        'DefectDataConfig(source="hub", ': "DefectDataConfig(max_train_examples=8, max_eval_examples=4, ",
        'TrainingArguments("outputs/trainer")': 'TrainingArguments("outputs/trainer", max_steps=2, report_to="none")',
    }
    code = "\n".join(BLOCKS)
    for old, new in replaced.items():
        assert old in code, f"the README no longer has {old}"
        code = code.replace(old, new)
    names: dict = {}
    exec(compile(code, str(README), "exec"), names)
    assert is_patched(names["same"])
    for name, value in names["same"].state_dict().items():
        assert torch.equal(value, names["model"].state_dict()[name]), name
    assert set(names["classify"]("int f() { return 1; }")[0]) == {"label", "score"}
    assert is_patched(names["merged"])
    assert names["config"].num_dilated_cyclical_pairs == 2


def test_files_that_are_named_exist():
    text = README.read_text(encoding="utf-8")
    named = set(re.findall(r"(?:scripts|configs|rsa_hf)/[\w/]+\.(?:py|yaml)", text))
    assert named
    for name in named:
        assert (README.parent / name).is_file(), name
