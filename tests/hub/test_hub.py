"""Pushing to the Hub and loading from it, against a stand-in of its HTTP API; checkpoints of strangers."""

import logging
from pickle import UnpicklingError

import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer, pipeline

from families import CONFIGS, FULL_PLAN, build, inputs, move_rates
from file_edits import edit_json
from hub_stand_in import TOKEN, USER
from rsa_hf import RSAConfig, is_patched, patch_model

REPO = f"{USER}/rsa"
SECTION = "<!-- rsa_hf: end -->"


@pytest.fixture
def model():
    model = AutoModelForSequenceClassification.from_config(CONFIGS["roberta"]())
    return move_rates(patch_model(model, RSAConfig(**FULL_PLAN)))


def test_a_pushed_model_comes_back_bit_for_bit(hub, model, tokenizer, caplog, capfd):
    with caplog.at_level(logging.DEBUG):
        model.push_to_hub(REPO)
        tokenizer.push_to_hub(REPO)
        loaded = AutoModelForSequenceClassification.from_pretrained(REPO)
    text, batch = "w5 w6 w7 w8 w90", inputs("roberta")
    with torch.no_grad():
        assert torch.equal(loaded(**batch).logits, model(**batch).logits)
        expected = model(**tokenizer(text, return_tensors="pt")).logits[0]
        base = AutoModel.from_pretrained(REPO)(**inputs("roberta"))
    assert base.last_hidden_state.shape[-1] == model.config.hidden_size
    assert AutoTokenizer.from_pretrained(REPO)(text) == tokenizer(text)
    scores = pipeline("text-classification", model=REPO, top_k=None, function_to_apply="none")([text])[0]
    named = {f"LABEL_{i}": value for i, value in enumerate(expected.tolist())}
    assert {score["label"]: score["score"] for score in scores} == named
    # Pushing the tokenizer leaves the model's card.
    card = hub.card(REPO)
    assert f'from_pretrained("{REPO}")' in card
    assert card.count(SECTION) == 1
    assert hub.files(REPO)["rsa.png"].startswith(b"\x89PNG")
    # A model that was loaded from the Hub names its repository as the base model.
    loaded.push_to_hub(f"{USER}/next")
    assert f"base_model: {REPO}\n" in hub.card(f"{USER}/next")
    # The token went to the Hub and is in no log, output or file.
    assert hub.authorised == {TOKEN}
    assert "HTTP Request" in caplog.text
    assert TOKEN not in caplog.text
    assert TOKEN not in "".join(capfd.readouterr())
    assert not any(TOKEN.encode() in content for content in hub.files(REPO).values())


def test_pushing_again_keeps_what_others_wrote(hub, model):
    model.push_to_hub(REPO)
    first = hub.card(REPO)
    edited = first.replace("---\n", "---\nlicense: mit\n", 1).replace("## RSA heads", "## Not ours to keep")
    hub.put(REPO, {**hub.files(REPO), "README.md": f"{edited}\n## Thanks\n\nTo all.\n".encode()})
    model.push_to_hub(REPO)
    card = hub.card(REPO)
    assert "license: mit\n" in card
    assert "To all." in card
    assert "Not ours to keep" not in card
    assert card.count(SECTION) == 1


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_no_code_in_a_checkpoint_is_run(tmp_path, hub):
    """Neither a pickle nor modelling code that writes a file."""
    folder, mark = tmp_path / "made", tmp_path / "was-here"
    patch_model(build("gpt2"), RSAConfig(**FULL_PLAN)).save_pretrained(folder)
    theirs = {"AutoModel": "modeling_x.Model", "AutoConfig": "modeling_x.Config"}
    edit_json(folder / "config.json", lambda content: content.update(auto_map=theirs))
    (folder / "modeling_x.py").write_text(f"open({str(mark)!r}, 'w')\nModel = Config = None\n")
    torch.save({"x": Payload(str(mark))}, folder / "training_args.bin")
    hub.put(REPO, {path.name: path.read_bytes() for path in folder.iterdir()})
    assert is_patched(AutoModel.from_pretrained(REPO))
    torch.save({"x": Payload(str(mark))}, folder / "pytorch_model.bin")
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "model.safetensors"}
    hub.put(f"{USER}/pickled", files)
    with pytest.raises(UnpicklingError, match="Weights only"):  # PyTorch's own refusal
        AutoModel.from_pretrained(f"{USER}/pickled")
    assert not mark.exists()
    torch.load(folder / "training_args.bin", weights_only=False)  # the control
    assert mark.exists()
