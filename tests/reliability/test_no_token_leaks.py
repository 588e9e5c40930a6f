"""A write token reaches only the Hub: no log, message, traceback, card or uploaded file has it."""

import logging
import traceback

import huggingface_hub
import pytest
from huggingface_hub.errors import HTTPError

from families import build
from hub_stand_in import TOKEN, USER
from rsa_hf import RSAConfig, cli, patch_model
from rsa_hf.hub.card import CardFacts, write_card
from rsa_hf.hub.push import push_folder
from rsa_hf.utils.text import holds_credentials, without_credentials

REPO = f"{USER}/rsa"


@pytest.fixture
def saved(tmp_path):
    patch_model(build("gpt2"), RSAConfig(gate_init=0.0)).save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


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


def test_the_command_line_prints_no_token(failing_hub, saved, monkeypatch, caplog, capfd):
    monkeypatch.setattr("sys.argv", ["rsa-hf", "push", str(saved), REPO])
    with caplog.at_level(logging.DEBUG), pytest.raises(SystemExit) as end:
        cli.main()
    printed = "".join(capfd.readouterr())
    assert end.value.code == 2
    assert "error: " in printed and "Traceback" not in printed
    assert TOKEN not in printed + caplog.text


@pytest.mark.parametrize(
    "given",
    [
        {"repo_id": f"https://someone:{TOKEN}@huggingface.co/{REPO}"},
        {"repo_id": REPO, "revision": TOKEN},
        {"repo_id": REPO, "message": f"with {TOKEN}"},
    ],
)
def test_a_token_in_another_place_is_refused(given, hub, saved, caplog, capfd):
    with caplog.at_level(logging.DEBUG), pytest.raises(ValueError, match="a token or a password in") as error:
        push_folder(saved, **given)
    assert TOKEN not in everything_said(error.value, caplog, capfd)
    assert hub.requests == []


def test_a_file_with_a_token_is_not_uploaded(hub, saved):
    (saved / "notes.txt").write_text(TOKEN)
    with pytest.raises(ValueError, match="notes.txt, which would be uploaded") as error:
        push_folder(saved, REPO)
    assert TOKEN not in str(error.value)
    assert hub.requests == []


def test_a_token_is_not_written_on_a_card(tmp_path):
    model = patch_model(build("gpt2"))
    write_card(model, tmp_path, CardFacts(command=f"python train.py --hub-token {TOKEN} --url http://a:b@c/d"))
    card = (tmp_path / "README.md").read_text()
    assert "--hub-token hf_… --url http://…@c/d" in card
    assert TOKEN not in card


def test_credentials_are_recognised_and_removed():
    for text in (TOKEN, f"x={TOKEN}.", "http://a:b@c", "https://user@host/x"):
        assert holds_credentials(text)
        assert not holds_credentials(without_credentials(text))
    for text in ("hf_hub_download", "rsa_hf", "a@b.org", '{"://":12,"@":3}', "http://127.0.0.1:9/x@y"):
        assert not holds_credentials(text)
        assert without_credentials(text) == text
