"""rsa-hf inspect, and how it ends."""

import json

import pytest

from families import FULL_PLAN, build
from rsa_hf import RSAConfig, cli, patch_model, rsa_report


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["rsa-hf", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code, *capsys.readouterr()


def test_inspect_shows_the_report(tmp_path, monkeypatch, capsys):
    model = patch_model(build("gpt2"), RSAConfig(**FULL_PLAN))
    model.save_pretrained(tmp_path)
    code, out, _ = run(monkeypatch, capsys, "inspect", tmp_path, "--plot", tmp_path / "rsa.png")
    assert (code or 0) == 0
    assert str(rsa_report(model)) in out
    assert (tmp_path / "rsa.png").read_bytes().startswith(b"\x89PNG")
    code, out, _ = run(monkeypatch, capsys, "inspect", tmp_path, "--json")
    assert json.loads(out) == json.loads(json.dumps(rsa_report(model).to_dict()))


def test_mistakes_end_without_a_traceback(tmp_path, monkeypatch, capsys):
    code, _, err = run(monkeypatch, capsys, "inspect", tmp_path / "nothing")
    assert (code, err.count("\n")) == (2, 1)
    assert "there is no such folder" in err
    build("gpt2").save_pretrained(tmp_path)
    code, _, err = run(monkeypatch, capsys, "inspect", tmp_path)
    assert code == 2
    assert "plain checkpoint" in err


def test_help_shows_an_example(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "inspect", "--help")
    assert (code or 0) == 0
    assert "Example: rsa-hf inspect" in out
