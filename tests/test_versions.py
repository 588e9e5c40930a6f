"""The oldest and the pinned versions that are tested fit the requirements."""

import re

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from launching import ROOT
from rsa_hf.integration import TRANSFORMERS_RANGE

tomllib = pytest.importorskip("tomllib", reason="reads pyproject.toml, which takes Python 3.11 or newer")

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NEEDED = {Requirement(text).name: Requirement(text).specifier for text in PROJECT["dependencies"]}


def test_the_oldest_versions_are_the_lower_ends_of_the_ranges():
    recipe = re.search(
        r"^test-oldest:.*\n((\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    pinned = dict(re.findall(r"(torch|transformers|peft)==([\d.]+)", recipe[1]))
    assert sorted(pinned) == ["peft", "torch", "transformers"]
    for name, version in pinned.items():
        (lowest,) = [Version(one.version) for one in NEEDED[name] if one.operator == ">="]
        assert lowest == Version(version)
    assert NEEDED["transformers"] == SpecifierSet(f">={TRANSFORMERS_RANGE[0]},<{TRANSFORMERS_RANGE[1]}")
