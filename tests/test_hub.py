"""The model card."""

import pytest

from families import FULL_PLAN, build
from rsa_hf import RSAConfig, patch_model, rsa_report
from rsa_hf.hub import model_card


def test_card_says_how_to_load_and_what_was_learned():
    model = patch_model(build("gpt2"), RSAConfig(**FULL_PLAN))
    card = model_card(
        model,
        base_model="openai-community/gpt2",
        scores={"test": {"accuracy": 0.61234}},
        command="make demo",
        plot="rsa.png",
    )
    assert card.data.base_model == "openai-community/gpt2"
    assert card.data.library_name == "transformers"
    assert {"rsa_hf", "rsa"} <= set(card.data.tags)
    for part in (
        "import rsa_hf",
        "GPT2Model.from_pretrained",
        str(rsa_report(model)),
        "| test | 0.6123 |",
        "rsa.png",
        "make demo",
    ):
        assert part in card.content


def test_a_local_path_is_no_base_model(tmp_path):
    model = patch_model(build("gpt2"), RSAConfig(**FULL_PLAN))
    for path in (str(tmp_path), "./outputs/best", "/nowhere/at/all"):
        assert model_card(model, base_model=path).data.base_model is None


def test_a_plain_model_has_no_card():
    with pytest.raises(ValueError, match="no RSA heads"):
        model_card(build("gpt2"))
