"""A plugin of pytest that writes PROGRAMS.md: `PYTHONPATH=scripts pytest -p programs_page tests/programs`."""

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

HEAD = """# Which programs RSA works with

Written by `make programs` (tests/programs), not by hand. Each row is a test that runs the real program, or the real
library, on a patched model, and checks what came out. Commands are started by `rsa-hf run`, as the programs know
nothing of rsa_hf.

| program | version | what was tried | outcome |
|---|---|---|---|
"""
OUTCOMES = {"passed": "works", "failed": "**fails**"}

# A row for a program that no test can run, with the reason.
WHY_NOT = "its releases need transformers below 5; `torch.onnx.export` works, see docs/hub.md"
NOT_TRIED = ("optimum-onnx", "export to ONNX", f"not tried: {WHY_NOT}")

rows: dict[str, tuple[str, str, str | None]] = {}


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Take down the row of a test."""
    report = (yield).get_result()
    marker = item.get_closest_marker("program")
    if marker is None or (report.when != "call" and report.passed) or report.when == "teardown":
        return
    outcome = OUTCOMES.get(report.outcome)
    if report.passed and marker.kwargs.get("refused"):
        outcome = f"refused: {marker.kwargs['refused']}"
    elif report.skipped:
        outcome = f"not tried: {report.longrepr[2].removeprefix('Skipped: ')}"
    rows[item.nodeid] = (*marker.args, outcome)


def pytest_sessionfinish() -> None:
    """Write the page."""
    if rows:
        lines = [f"| {row[0]} | {_version(row[0])} | {row[1]} | {row[2]} |\n" for row in (*rows.values(), NOT_TRIED)]
        ours = ("rsa_hf", "transformers", "torch", "peft", "accelerate")
        found = ", ".join(f"{name} {_version(name)}" for name in ours)
        text = f"{HEAD}{''.join(lines)}\nWith {found}, on the CPU.\n"
        (Path(__file__).parents[1] / "PROGRAMS.md").write_text(text, encoding="utf-8")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "–"
