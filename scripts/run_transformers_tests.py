"""transformers' own common model tests on plain and on patched GPT-2, RoBERTa and Llama, and a table of what differs.

    python scripts/run_transformers_tests.py --output results

Fetches the source distribution of the installed transformers from the package index; nothing of it is kept in the
repository. Each part is a process of its own that runs one model's tests in one arm: plain, patched with shut gates,
patched with open gates. A part that is finished is not repeated, until outputs/transformers_tests is removed. Writes
transformers_tests.md.
"""

import os
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch
import transformers
from measuring import make_parser, table, write

HERE = Path(__file__).parent
WORK = Path("outputs/transformers_tests")
ARMS = {"plain": "unpatched", "shut": "patched, gates shut", "open": "patched, gates at 1/2"}
FAMILIES = {"gpt2": "GPT2Tests", "roberta": "RobertaTests", "llama": "LlamaTests"}
SECONDS_A_TEST = 100
LIMIT = 1200  # seconds a part
UNEXPECTED = "NOT EXPECTED:"

# Tests that a patched model is not expected to pass, and why.
EXPECTED = {
    "test_model_weights_reload_no_missing_tied_weights": "the test empties the checkpoint and wants a warning for "
    "every parameter; a checkpoint without its RSA parameters is an error by design"
}


def fetch() -> Path:
    """The unpacked source distribution of the installed version."""
    source = WORK / f"transformers-{transformers.__version__}"
    if not source.exists():
        wanted = f"transformers=={transformers.__version__}"
        command = ["download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", str(WORK), wanted]
        subprocess.run([sys.executable, "-m", "pip", *command], check=True)
        with tarfile.open(f"{source}.tar.gz") as archive:
            archive.extractall(WORK, filter="data")
    return source


def run_part(source: Path, family: str, arm: str) -> Path:
    """Run a part unless that was done; its results, as JUnit XML."""
    results = WORK / f"{source.name}-results" / f"{family}-{arm}.xml"
    if results.exists():
        return results
    results.parent.mkdir(exist_ok=True)
    tests = f"{HERE / 'transformers_tests' / 'test_models.py'}::{FAMILIES[family]}"
    unfinished = results.with_suffix(".unfinished.xml")
    options = f"-q -W always -p plugin -p no:cacheprovider -o log_cli=0 --tb=line --timeout={SECONDS_A_TEST}".split()
    options += ["--disable-warnings", "-c", str(source / "pyproject.toml"), f"--junit-xml={unfinished.resolve()}"]
    paths = [str(source.resolve()), str((HERE / "transformers_tests").resolve()), str(HERE.parent.resolve())]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
        "RSA_HF_ARM": arm,
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run([sys.executable, "-m", "pytest", tests, *options], env=environment, timeout=LIMIT)
    if done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(f"the tests of {family}, {arm}, could not be run; see above.")
    unfinished.rename(results)
    return results


def outcomes(results: Path) -> dict[str, tuple[str, str]]:
    """For each test `passed`, `failed` or `skipped`, and the first line of why."""
    found = {}
    for case in ET.parse(results).iter("testcase"):
        outcome, why = "passed", ""
        for child in case:
            if child.tag in ("failure", "error", "skipped") and outcome != "failed":
                outcome = "skipped" if child.tag == "skipped" else "failed"
                why = (child.get("message") or "").strip().partition("\n")[0]
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        # The subtests of a test come under its name: it passes where all of them do.
        if found.get(name, ("passed", ""))[0] != "failed":
            found[name] = (outcome, why)
    return found


def page(found: dict[str, dict[str, dict[str, tuple[str, str]]]]) -> list[str]:
    rows, differing = [], defaultdict(list)
    for family, arms in found.items():
        for arm, tests in arms.items():
            counts = Counter(outcome for outcome, _ in tests.values())
            rows.append([family, ARMS[arm], *(str(counts[each]) for each in ("passed", "failed", "skipped"))])
        for test, (outcome, _) in arms["plain"].items():
            for arm in ("shut", "open"):
                other, why = arms[arm].get(test, ("failed", "was not run"))
                if other != outcome:
                    name = test.partition("::")[2]
                    reason = EXPECTED.get(name, f"{UNEXPECTED} {why:.300}")
                    line = f"`{name}` {outcome} → {other}" + ("" if other == "passed" else f": {reason}")
                    differing[line].append(f"{family} {arm}")
    failing = [
        f"* {family}: `{test}`: {why:.200}"
        for family, arms in found.items()
        for test, (outcome, why) in arms["plain"].items()
        if outcome == "failed"
    ]
    return [
        "# transformers' own model tests on patched models",
        "",
        f"`python scripts/run_transformers_tests.py`: transformers {transformers.__version__}, torch "
        f"{torch.__version__}, on the CPU. `tests/test_modeling_common.py` of the source distribution, which has no "
        "`tests/models`, `tests/generation` and `tests/exporters`: they are left out. A test may take "
        f"{SECONDS_A_TEST} seconds.",
        "",
        *table(["model", "arm", "passed", "failed", "skipped"], rows),
        "",
        "## Where a patched model differs from the plain one",
        "",
        *([f"* {line} ({', '.join(where)})" for line, where in differing.items()] or ["Nowhere."]),
        "",
        "## What fails on the plain model, too",
        "",
        *(failing or ["Nothing."]),
    ]


def main() -> None:
    arguments = make_parser(__doc__).parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    source = fetch()
    found = {family: {arm: outcomes(run_part(source, family, arm)) for arm in ARMS} for family in FAMILIES}
    text = "\n".join(page(found)) + "\n"
    write(arguments.output / "transformers_tests.md", text)
    if UNEXPECTED in text:
        raise SystemExit(f"patched models fail where they should not: see {arguments.output}/transformers_tests.md")


if __name__ == "__main__":
    main()
