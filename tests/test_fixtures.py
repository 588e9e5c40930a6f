"""Models and adapters of earlier versions give the same outputs."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rsa_hf.ops.cpp.build import library

ROOT = Path(__file__).parents[1]
FIXTURES = ROOT / "tests" / "fixtures"
CHECK = Path(__file__).parent / "earlier_versions.py"
VERSIONS = sorted(path for path in FIXTURES.glob("*") if path.is_dir())
MODELS = [(version, path.parent.name) for version in VERSIONS for path in sorted(version.glob("*/fixture.json"))]

pytestmark = pytest.mark.skipif(
    (ROOT / "PKG-INFO").exists(), reason="the source distribution has no fixtures: they are in the repository"
)


@functools.cache
def check(version, backend):
    """Run earlier_versions.py in a process of its own, where it can set torch up for bitwise results."""
    environment = os.environ | {"RSA_HF_BACKEND": backend}
    return subprocess.run(
        [sys.executable, CHECK, version], env=environment, capture_output=True, text=True, check=False
    )


def result(version, name, backend="pytorch"):
    done = check(version, backend)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])[name]
    assert "error" not in found, found["error"]
    return found


def test_version_0_1_has_fixtures():
    assert FIXTURES / "0.1" in VERSIONS
    assert {path.name for path in (FIXTURES / "0.1").iterdir()} >= {
        *("gpt2", "roberta", "bert", "llama", "t5", "transformer_xl", "gpt2_lora", "roberta_rsa_only", "configs"),
    }


def label(value):
    return value.name if isinstance(value, Path) else value


BACKENDS = ["pytorch", *([] if isinstance(library(), str) else ["cpp"])]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("version", "name"), MODELS, ids=label)
def test_a_model_gives_the_same_outputs(version, name, backend):
    assert result(version, name, backend)["wrong"] == {}


# Tries one element of each parameter.
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("version", "name"), MODELS, ids=label)
def test_a_changed_gate_or_rate_changes_the_outputs(version, name, backend):
    found = result(version, name, backend)
    assert found["unnoticed"] == []
    assert found["checked"] or name.startswith("recurrent")  # recurrent networks have no attention
