"""Files that are made once for their settings, and pretrained weights that are kept so."""

import pytest
import torch

from experiments import pretrained
from experiments.runner.kept import VARIABLE, kept


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_file_is_made_once_for_its_settings():
    made = []

    def make(path):
        made.append(path)
        path.write_text(str(len(made)))

    first, again = (kept("x", {"seed": 0, "steps": 3}, ".txt", make) for _ in range(2))
    assert first == again == kept("x", {"steps": 3, "seed": 0}, ".txt", make)
    other = kept("x", {"seed": 1, "steps": 3}, ".txt", make)
    assert (first.read_text(), other.read_text(), len(made)) == ("1", "2", 2)


def test_what_was_not_finished_is_made_again(folder):
    def fail(path):
        path.write_text("half")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        kept("x", {}, ".txt", fail)
    assert not list(folder.glob("x-*.txt"))
    assert kept("x", {}, ".txt", lambda path: path.write_text("whole")).read_text() == "whole"


@pytest.mark.usefixtures("use_small_data")
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_pretrained_weights_are_those_of_the_training(family, folder, monkeypatch):
    first, tokenizer = pretrained.load_pretrained(
        f"{family}-0.03M", pretraining_steps=10, schedule="warmup_stable_decay"
    )
    assert tokenizer is None
    trained = []
    monkeypatch.setattr(pretrained, "train_on_bytes", lambda *_, **__: trained.append(1))
    again, _ = pretrained.load_pretrained(f"{family}-0.03M", pretraining_steps=10, schedule="warmup_stable_decay")
    fresh = pretrained.build(family, pretrained.SHAPES["0.03M"])
    assert not trained
    for (name, weight), other in zip(first.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(weight, other)
        if "embed" in name or "wte" in name:
            assert not torch.equal(weight, fresh.state_dict()[name])
