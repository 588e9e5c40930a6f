"""Run a program that does not know rsa_hf, with the hooks installed: `rsa-hf run`, or `python -m rsa_hf.run`.

    rsa-hf run lm_eval --model hf --model_args pretrained=outputs/gpt2-rsa --tasks blimp
    rsa-hf run -m lm_eval --model hf …
    rsa-hf run score.py --batch-size 8
    accelerate launch -m rsa_hf.run score.py

The program replaces this process, so its exit code, its traceback and the signals it gets are its own. The hooks are
installed by `startup/sitecustomize.py` when its Python starts, and in every Python process that it starts.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

STARTUP = Path(__file__).resolve().parent / "startup"


def command_of(arguments: Sequence[str]) -> list[str]:
    """The command line that runs a console script, a Python file or `-m` and a module, with its arguments.

    A console script is looked up in this Python's environment first, then on PATH. Raises a ValueError if no program
    is named, and a FileNotFoundError if none is found.
    """
    if not arguments or arguments == ["-m"]:
        raise ValueError("no program is named. Give a console script, a Python file, or -m and a module.")
    name, *others = arguments
    if name == "-m" or (name.endswith(".py") and Path(name).is_file()):
        return [sys.executable, *arguments]
    scripts = sysconfig.get_path("scripts")
    program = shutil.which(name, path=os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)]))
    if program is None:
        raise FileNotFoundError(
            f"{name}: there is no Python file (.py) and no program of this name in {scripts} or on PATH. If a package "
            f"has it, install that: {sys.executable} -m pip install …"
        )
    return [program, *others]


def run(arguments: Sequence[str]) -> None:
    """Replace this process with a program that has rsa_hf's hooks installed; arguments as for `command_of`."""
    command = command_of(arguments)
    path = os.environ.get("PYTHONPATH")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(STARTUP), path] if path else [str(STARTUP)])}
    sys.stdout.flush()
    if os.name == "nt":  # Windows has no exec: it would start a second process and end this one at once
        raise SystemExit(subprocess.run(command, env=environment, check=False).returncode)
    os.execve(command[0], command, environment)


if __name__ == "__main__":
    try:
        run(sys.argv[1:])
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
