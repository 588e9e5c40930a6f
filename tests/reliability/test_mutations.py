"""Each protection is needed: without it, a test of ours goes red."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from reliability.mutations import MUTATIONS
from reliability.record import note_mutation

ROOT = Path(__file__).parents[2]
COPIED = ("rsa_hf", "tests", "scripts", "configs", "pyproject.toml")


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the project to edit."""
    folder = tmp_path_factory.mktemp("project")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Runs pytest in a process that has torch and transformers loaded, see prepared.py."""
    output = tmp_path_factory.mktemp("prepared") / "output.txt"
    command = [sys.executable, str(Path(__file__).with_name("prepared.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:

        def run(folder, arguments, environment):
            asked = {"folder": str(folder), "arguments": arguments, "output": str(output), "environment": environment}
            print(json.dumps(asked), file=server.stdin, flush=True)
            return int(server.stdout.readline()), output.read_text(encoding="utf-8")

        yield run
        server.stdin.close()


def _environment(copy):
    """Small numbers are enough, and what a copy finds does not belong on the page."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RSA_HF_RELIABILITY")}
    return environment | {"PYTHONPATH": str(copy)}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.protection)
def test_the_edit_fits(mutation):
    assert (ROOT / mutation.file).read_text(encoding="utf-8").count(mutation.old) == 1
    assert (ROOT / mutation.red.partition("::")[0]).exists()


@pytest.mark.slow  # runs many tests in another process
@pytest.mark.timeout(900)
def test_with_all_of_them_they_are_green(copy, prepared):
    """A test that is red in any case shows nothing."""
    named = sorted({mutation.red for mutation in MUTATIONS})
    code, said = prepared(copy, [*named, "-p", "no:cacheprovider", "-m", "slow or not slow"], _environment(copy))
    assert code == 0, said


@pytest.mark.slow  # each runs a test in another process
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.protection)
def test_without_it_a_test_is_red(mutation, copy, prepared):
    path = copy / mutation.file
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole.replace(mutation.old, mutation.new), encoding="utf-8")
    arguments = [mutation.red, "-x", "-p", "no:cacheprovider", "-m", "slow or not slow"]
    try:
        code, said = prepared(copy, arguments, _environment(copy))
    finally:
        path.write_text(whole, encoding="utf-8")
    # 1: tests failed. An edit that keeps the tests from being collected would end with another code.
    assert code == 1, said
    assert f"FAILED {mutation.red.partition('[')[0]}" in said
    note_mutation(mutation.part, mutation.protection, mutation.red)
