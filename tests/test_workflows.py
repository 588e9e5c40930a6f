"""The nightly tests cover the oldest, the pinned and the newest supported versions."""

import re
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from rsa_hf.integration import TRANSFORMERS_RANGE

tomllib = pytest.importorskip("tomllib", reason="reads pyproject.toml, which takes Python 3.11 or newer")

ROOT = Path(__file__).parents[1]
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NEEDED = {Requirement(text).name: Requirement(text).specifier for text in PROJECT["dependencies"]}


def recipes():
    """The commands of each target of the Makefile."""
    parts = re.split(r"^([\w-]+):.*\n", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def nightly():
    """The targets that the schedule runs, each with its Python version."""
    assert WORKFLOW[True]["schedule"][0]["cron"]  # YAML reads the key `on` as True
    found = []
    for job in WORKFLOW["jobs"].values():
        assert "schedule" not in job.get("if", "")  # every job runs on schedule
        entries = job.get("strategy", {}).get("matrix", {}).get("include") or [{}]
        for entry in entries:
            python = entry.get("python") or job["steps"][1]["with"]["python-version"]
            for run in [step["run"] for step in job["steps"] if step.get("run", "").startswith("make")]:
                found.append((run.split()[1] if entry == {} else entry["target"], python))
    return found


def test_the_schedule_runs_the_oldest_the_newest_and_every_python():
    targets, pythons = zip(*nightly(), strict=True)
    assert {"test", "docs", "dist", "test-oldest", "test-newest", "test-reliability"} <= set(targets)
    assert set(targets) <= set(recipes())
    named = {classifier.rpartition(" ")[2] for classifier in PROJECT["classifiers"] if ":: 3." in classifier}
    assert set(pythons) == named


def test_the_oldest_versions_are_the_lower_ends_of_the_ranges():
    pinned = dict(re.findall(r"(torch|transformers|peft)==([\d.]+)", recipes()["test-oldest"]))
    assert sorted(pinned) == ["peft", "torch", "transformers"]
    for name, version in pinned.items():
        (lowest,) = [Version(one.version) for one in NEEDED[name] if one.operator == ">="]
        assert lowest == Version(version)
    assert NEEDED["transformers"] == SpecifierSet(f">={TRANSFORMERS_RANGE[0]},<{TRANSFORMERS_RANGE[1]}")


def test_the_pinned_versions_are_in_the_ranges():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    for name in ("transformers", "peft", "accelerate", "safetensors"):
        assert Version(pinned[name]) in NEEDED[name]
