"""The results of a survey: a JSON file, and the page SUPPORTED.md."""

import json
import platform
from pathlib import Path
from typing import Any

import torch
import transformers

import rsa_hf
from rsa_hf.utils.files import write_text
from survey.checks import CHECKS
from survey.tiny_models import TASKS

MEANING = {
    "works": "every check that applies holds for every task, and fails where RSA is broken on purpose",
    "refused": "`patch_model` raises an error that says why, and leaves the model as it was",
    "not built": "no tiny model could be built or run, so nothing is known",
    "unproven": "a check holds, but with a broken RSA too",
    "wrong": "a check fails",
}


def _versions() -> dict[str, str]:
    return {
        "rsa_hf": rsa_hf.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0],
        "python": platform.python_version(),
    }


class Records(dict[str, dict[str, Any]]):
    """The record (`survey_type`) of each type, written to a file whenever one is set.

    Args:
        path: the file. Its records are read if they were made with the same versions.
        fresh: start without records.
    """

    def __init__(self, path: Path, fresh: bool = False) -> None:
        super().__init__()
        self.path = path
        self.versions = _versions()
        if path.exists() and not fresh:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["versions"] == self.versions:
                self.update(content["types"])

    def __setitem__(self, model_type: str, record: dict[str, Any]) -> None:
        super().__setitem__(model_type, record)
        content = {"versions": self.versions, "types": dict(sorted(self.items()))}
        write_text(self.path, json.dumps(content, indent=1) + "\n")


def outcome(record: dict[str, Any]) -> str:
    """The outcome of a type: the worst one among its tasks that were built."""
    found = {task["outcome"] for task in record.values()}
    return next(name for name in ("wrong", "unproven", "refused", "works", "not built") if name in found)


def write_table(records: Records, path: Path) -> str:
    """Write the page, and return its summary line."""
    by_outcome = {name: [t for t in sorted(records) if outcome(records[t]) == name] for name in MEANING}
    counts = ", ".join(f"{len(names)} {name}" for name, names in by_outcome.items())
    summary = f"{len(records)} model types: {counts}."
    versions = ", ".join(f"{name} {version}" for name, version in records.versions.items())
    lines = [
        "# Which models RSA works on",
        "",
        "Written by `make survey` (scripts/survey_architectures.py), not by hand. Every model type in transformers'",
        "causal-LM, masked-LM, sequence-classification and seq2seq mappings, as a tiny model with random weights on the",
        "CPU, under the attention that transformers chooses for it (sdpa where there is, else eager).",
        "",
        f"**{summary}** {versions}.",
        "",
        "| | types | meaning |",
        "|---|---|---|",
        *(f"| {name} | {len(by_outcome[name])} | {meaning} |" for name, meaning in MEANING.items()),
        "",
        "## The checks",
        "",
        *(f"* **{name}**: {(check.__doc__ or '').strip()}" for name, (check, _) in CHECKS.items()),
        "",
        "Each is run again with RSA broken on purpose, and has to fail then. A check that does not apply is one whose",
        "property the plain model does not have; the reasons are in results/architectures.json.",
        "",
        "## Works",
        "",
        "| type | tasks | RSA layers | checks that do not apply |",
        "|---|---|---|---|",
        *(_works(name, records[name]) for name in by_outcome["works"]),
    ]
    notes = [f"* `{name}`: {note}" for name in by_outcome["works"] for note in _notes(records[name])]
    lines += ["", "In part, with a warning that says so:", "", *notes] if notes else []
    for name in ("refused", "not built", "unproven", "wrong"):
        if by_outcome[name]:
            lines += ["", f"## {name.capitalize()}", "", "| type | tasks | why |", "|---|---|---|"]
            lines += [row for model_type in by_outcome[name] for row in _reasons(model_type, records[model_type])]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return f"{path}: {summary}"


def _works(model_type: str, record: dict[str, Any]) -> str:
    tried = {task: record[task] for task in TASKS if task in record and record[task]["outcome"] == "works"}
    skipped = [name for name in CHECKS if all(found["checks"][name] != "holds" for found in tried.values())]
    layers = sorted({str(found["layers"]) for found in tried.values()})
    return f"| `{model_type}` | {', '.join(tried)} | {', '.join(layers)} | {', '.join(skipped)} |"


def _notes(record: dict[str, Any]) -> list[str]:
    notes = [note for found in record.values() for note in found.get("without", [])]
    notes += [
        f"{task} not built: {_cell(found['why'])}" for task, found in record.items() if found["outcome"] == "not built"
    ]
    return list(dict.fromkeys(notes))


def _reasons(model_type: str, record: dict[str, Any]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for task, found in record.items():
        reasons.setdefault(found["why"] or "works", []).append(task)
    return [f"| `{model_type}` | {', '.join(tasks)} | {_cell(why)} |" for why, tasks in reasons.items()]


def _cell(text: str) -> str:
    text = text.replace("|", "\\|")
    return text if len(text) <= 400 else text[:399] + "…"
