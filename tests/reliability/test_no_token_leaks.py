"""A write token reaches only the Hub: no log, message, traceback, card or file has it."""

import logging
import traceback

import huggingface_hub
import pytest
from huggingface_hub.errors import HTTPError

from families import build
from hub_stand_in import TOKEN, USER
from rsa_hf import patch_model
from rsa_hf.hub import write_card
from rsa_hf.utils.text import without_credentials

REPO = f"{USER}/rsa"
FAILURES = ["401", "403", "500", "no connection", "no answer"]


@pytest.fixture
def fail(hub, monkeypatch):
    """A function that makes the Hub fail, in one of five ways."""

    def fail(how):
        if how == "no connection":
            monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
        elif how == "no answer":
            hub.delay = 1
            monkeypatch.setattr(huggingface_hub.get_session(), "timeout", 0.2)
        else:
            hub.fails_with = int(how)
        # huggingface_hub retries with growing delays.
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)

    return fail


def everything_said(error, caplog, capfd):
    """The traceback, all log records, and everything printed."""
    said = "".join(traceback.format_exception(error)) + caplog.text + "".join(capfd.readouterr())
    return said + "".join(repr(vars(record)) for record in caplog.records if not record.args)


@pytest.mark.parametrize("how", FAILURES)
@pytest.mark.parametrize("where", ["argument", "environment"])
def test_a_failed_push_shows_no_token(how, where, hub, fail, monkeypatch, caplog, capfd):
    options = {"token": TOKEN} if where == "argument" else {}
    if where == "argument":
        monkeypatch.delenv("HF_TOKEN")
    fail(how)
    model = patch_model(build("gpt2"))
    with caplog.at_level(logging.DEBUG), pytest.raises(HTTPError) as error:
        model.push_to_hub(REPO, **options)
    # huggingface_hub shows the Hub's own message, in which this Hub repeats the token.
    said = everything_said(error.value, caplog, capfd).replace(f"no: {TOKEN}", "no")
    assert len(said) > 200
    assert TOKEN not in said
    assert how == "no connection" or hub.authorised == {TOKEN}


def test_a_token_is_not_written_on_a_card(tmp_path):
    model = build("gpt2")
    patch_model(model)
    write_card(model, tmp_path, command=f"python train.py --hub-token {TOKEN} --url http://a:b@c/d")
    card = (tmp_path / "README.md").read_text()
    assert "--hub-token hf_… --url http://…@c/d" in card
    assert TOKEN not in card


def test_credentials_are_removed():
    for text in (TOKEN, f"x={TOKEN}.", "http://a:b@c", "https://user@host/x"):
        assert without_credentials(text) != text
    for text in ("hf_hub_download", "rsa_hf", "a@b.org", '{"://":12,"@":3}', "http://127.0.0.1:9/x@y"):
        assert without_credentials(text) == text
