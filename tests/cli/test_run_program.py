"""`rsa-hf run`: programs that do not import rsa_hf load patched checkpoints, and end as they do without it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import rsa_hf.run
from families import FULL_PLAN, build
from launching import ROOT, run_python
from rsa_hf import patch_model

RUN = ["-m", "rsa_hf.run"]

LOADS = """
import multiprocessing, sys
from transformers import AutoModel

def load():
    model = AutoModel.from_pretrained(sys.argv[1])
    print(sum(name.endswith("rsa.mu") for name, _ in model.named_parameters()), flush=True)

if __name__ == "__main__":
    load()
    worker = multiprocessing.get_context("spawn").Process(target=load)
    worker.start()
    worker.join()
    sys.exit(7)
"""


@pytest.fixture
def environment(tmp_path):
    """The variables of an environment in which another package has a `sitecustomize`, which prints that it runs."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import sys\nprint('the other one', file=sys.stderr)\n")
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path / "site")])}


@pytest.mark.slow  # starts processes
def test_a_program_and_its_workers_load_a_patched_checkpoint(tmp_path, environment):
    patch_model(build("gpt2"), FULL_PLAN).save_pretrained(tmp_path / "patched")
    (tmp_path / "loads.py").write_text(LOADS)
    program = [str(tmp_path / "loads.py"), str(tmp_path / "patched")]
    ended = run_python(*RUN, *program, code=7, **environment)
    assert ended.stdout == "2\n2\n"
    assert "the other one" in ended.stderr
    without = run_python(*program, code=1, **environment)
    assert "import rsa_hf before loading it, or start the program with rsa-hf run" in without.stderr


def test_traceback_and_exit_code_are_those_of_the_program(tmp_path, environment):
    (tmp_path / "fails.py").write_text("import sys\nprint(sys.argv[1:])\n{}['absent']\n")
    program = [str(tmp_path / "fails.py"), "--help", "-x"]
    plain, ended = (run_python(*command, *program, code=1, **environment) for command in ([], RUN))
    assert ended.stdout == plain.stdout == "['--help', '-x']\n"
    # Both processes, that of rsa_hf.run and that of the program, run the other package's sitecustomize.
    assert ended.stderr == "the other one\n" + plain.stderr


@pytest.mark.skipif(os.name == "nt", reason="Windows has no POSIX signals: there the program is a child process")
def test_signals_reach_the_program(environment):
    waits = "import sys, time\nprint('rsa_hf.integration.hook_table' in sys.modules, flush=True)\ntime.sleep(60)\n"
    (Path(environment["PYTHONPATH"].split(os.pathsep)[1]) / "waits.py").write_text(waits)
    command, environment = [sys.executable, *RUN, "-m", "waits"], {**os.environ, **environment}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "True\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == -signal.SIGTERM
    process.stdout.close()


def test_words_are_read_as_a_script_a_file_or_a_module(tmp_path, monkeypatch):
    script = tmp_path / "tool"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    file = tmp_path / "program.py"
    file.touch()
    assert rsa_hf.run.command_of(["tool", "-m", "x"]) == [str(script), "-m", "x"]
    assert rsa_hf.run.command_of([str(file), "-a"]) == [sys.executable, str(file), "-a"]
    assert rsa_hf.run.command_of(["-m", "module", "-a"]) == [sys.executable, "-m", "module", "-a"]
