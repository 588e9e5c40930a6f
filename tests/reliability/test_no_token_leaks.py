"""A write token reaches only the Hub: no log, message, traceback or card has it."""

import logging
import traceback

import huggingface_hub
import pytest
from huggingface_hub.errors import HTTPError

from families import build
from hub_stand_in import TOKEN, USER
from rsa_hf import patch_model
from rsa_hf.hub import write_card

REPO = f"{USER}/rsa"


@pytest.fixture(params=["401", "500", "no connection"])
def failing_hub(request, hub, monkeypatch):
    """A Hub that fails, and repeats the token in its own message."""
    if request.param == "no connection":
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    else:
        hub.fails_with = int(request.param)
    # huggingface_hub retries with growing delays.
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    return hub


def everything_said(error, caplog, capfd):
    """The traceback, all log records, and everything printed."""
    said = "".join(traceback.format_exception(error)) + caplog.text + "".join(capfd.readouterr())
    return said + "".join(repr(vars(record)) for record in caplog.records if not record.args)


@pytest.mark.parametrize("where", ["argument", "environment"])
def test_a_failed_push_shows_no_token(where, failing_hub, monkeypatch, caplog, capfd):
    if where == "argument":
        monkeypatch.delenv("HF_TOKEN")
    with caplog.at_level(logging.DEBUG), pytest.raises(HTTPError) as error:
        patch_model(build("gpt2")).push_to_hub(REPO, **({"token": TOKEN} if where == "argument" else {}))
    said = everything_said(error.value, caplog, capfd).replace(f"no: {TOKEN}", "no")
    assert len(said) > 200
    assert TOKEN not in said


def test_a_token_is_not_written_on_a_card(tmp_path):
    model = build("gpt2")
    patch_model(model)
    write_card(model, tmp_path, command=f"python train.py --hub-token {TOKEN} --url http://a:b@c/d")
    card = (tmp_path / "README.md").read_text()
    assert "--hub-token hf_… --url http://…@c/d" in card
    assert TOKEN not in card
