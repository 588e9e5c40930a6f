"""Runs pytest in processes that begin with torch, transformers and PEFT loaded, and nothing of this project.

    python prepared.py

A line on standard input, {"folder": …, "arguments": […], "output": …, "environment": {…}}, is one run of pytest in
that folder; its exit code is a line on standard output. What takes seconds to load is loaded once.
"""

import json
import os
import sys
import traceback

import accelerate  # noqa: F401
import datasets  # noqa: F401
import hypothesis  # noqa: F401
import peft  # noqa: F401
import pytest
import torch
import transformers
import transformers.trainer  # noqa: F401
from transformers.models.bert import modeling_bert  # noqa: F401
from transformers.models.gpt2 import modeling_gpt2  # noqa: F401
from transformers.models.llama import modeling_llama  # noqa: F401
from transformers.models.roberta import modeling_roberta  # noqa: F401


def run(folder, arguments, output, environment):
    """Run pytest, in a process that is forked for it."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[0] = folder  # before all that may have this project in it
    torch.manual_seed(0)
    try:
        code = int(pytest.main(arguments))
    except BaseException:
        traceback.print_exc()
        code = 70
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main():
    assert not any(name.partition(".")[0] == "rsa_hf" for name in sys.modules)
    torch.set_num_threads(1)  # a process that has threads cannot be forked
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
