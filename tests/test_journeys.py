"""CONTRIBUTING.md lists the journeys as a trace finds them."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
needs_qualnames = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="the trace needs Python 3.11, which has code.co_qualname"
)


def journeys_of_the_page():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    begin, end = "<!-- journeys: written by scripts/journeys.py -->", "<!-- end of journeys -->"
    return text[text.index(begin) + len(begin) : text.index(end)].strip()


@needs_qualnames
def test_the_page_lists_what_the_trace_prints():
    """The trace runs in a process of its own, where every function is called for the first time."""
    command = [sys.executable, str(ROOT / "scripts" / "journeys.py")]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    printed = done.stdout.strip()
    assert printed.count("### ") == 3
    assert printed == journeys_of_the_page(), "run: python scripts/journeys.py --write"


def test_every_file_of_the_page_exists():
    named = [line.split("`")[1] for line in journeys_of_the_page().splitlines() if line[:1].isdigit() and "`" in line]
    assert len(named) > 10
    for name in named:
        assert (ROOT / "rsa_hf" / name).is_file(), name


def imported(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs_qualnames
def test_code_that_runs_during_an_import_does_not_count(tmp_path, monkeypatch):
    journeys = imported(ROOT / "scripts" / "journeys.py")
    monkeypatch.setattr(journeys, "PACKAGE", tmp_path)
    (tmp_path / "one.py").write_text("def f():\n    return 1\n\n\nf()\n", encoding="utf-8")
    with journeys.trace() as visits:
        module = imported(tmp_path / "one.py")
    assert visits == {}
    with journeys.trace() as visits:
        module.f()
    assert visits == {"one.py": "f"}
