"""Each protection is needed: without it, a test fails."""

import os
from pkgutil import resolve_name

import pytest

from reliability.mutations import MUTATIONS, Mutation
from reliability.record import note_mutation
from reliability.runs import ROOT, run_in_process

SECONDS = 280  # for one test
BY_PROTECTION = {mutation.protection: mutation for mutation in MUTATIONS}


def run_tests(tests: list[str], mutation: Mutation | None) -> None:
    """Run tests with the protection disabled, and exit with pytest's code."""
    for name in [name for name in os.environ if name.startswith("RSA_HF_RELIABILITY")]:
        del os.environ[name]  # a fast run is enough, and its outcomes do not belong on the page
    if mutation is not None:
        os.environ["RSA_HF_MUTATION"] = mutation.protection  # for soak_run.py
        mutation.apply()
    os.chdir(ROOT / "tests")
    raise SystemExit(int(pytest.main([*tests, "-x", "-p", "no:cacheprovider", "-m", "slow or not slow"])))


@pytest.mark.parametrize("name", BY_PROTECTION)
def test_the_target_and_the_test_exist(name):
    mutation = BY_PROTECTION[name]
    resolve_name(mutation.target)
    path, _, test = mutation.red.partition("::")
    assert f"def {test.partition('[')[0]}(" in (ROOT / "tests" / path).read_text(encoding="utf-8")


@pytest.mark.slow  # each runs a test in another process
@pytest.mark.parametrize("red", sorted({mutation.red for mutation in MUTATIONS}))
def test_with_all_protections_the_test_passes(red, tmp_path):
    log = tmp_path / "log.txt"
    assert run_in_process(run_tests, ([red], None), log, seconds=SECONDS) == 0, log.read_text()


@pytest.mark.slow  # each runs a test in another process
@pytest.mark.parametrize("name", BY_PROTECTION)
def test_without_the_protection_the_test_fails(name, tmp_path):
    mutation, log = BY_PROTECTION[name], tmp_path / "log.txt"
    # Code 1 means that tests failed. If the replacement prevented their collection, the code would be another.
    assert run_in_process(_run_tests_without, (name,), log, seconds=SECONDS) == 1, log.read_text()
    assert f"FAILED {mutation.red.partition('[')[0]}" in log.read_text()
    note_mutation(mutation.part, mutation.protection, f"tests/{mutation.red}")


def _run_tests_without(name):
    run_tests([BY_PROTECTION[name].red], BY_PROTECTION[name])
