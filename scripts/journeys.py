"""Trace three journeys through the package and print the files of rsa_hf that each visits, in order.

    python scripts/journeys.py           # print them
    python scripts/journeys.py --write   # also put them into CONTRIBUTING.md

A file is visited where one of its functions, methods or comprehensions runs during the journey, however small it is.
What only runs while a module is imported does not count, nor does the look-up of a package's lazy names. What a
journey needs beforehand (the hooks, the model, the saved checkpoint) is made before the trace. A file that an earlier
journey visits too is marked: its reader knows it.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "rsa_hf"
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- journeys: written by scripts/journeys.py -->", "<!-- end of journeys -->"

Visits = dict[str, str]  # file, below rsa_hf -> the first of its functions that ran


@contextmanager
def trace() -> Iterator[Visits]:
    """Collect the files of which a function runs, in the order of their first call, while the context is open."""
    visits: Visits = {}
    importing = threading.local()

    def watch(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(prefix):
            return
        depth = getattr(importing, "depth", 0)
        if code.co_name == "<module>":
            importing.depth = depth + (1 if event == "call" else -1)
        elif event == "call" and depth == 0 and code.co_name != "__getattr__":
            visits.setdefault(code.co_filename.removeprefix(prefix), code.co_qualname)

    prefix = f"{PACKAGE}{os.sep}"
    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        yield visits
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def patch_and_forward(folder: Path) -> Visits:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from rsa_hf import RSAConfig, patch_model

    model = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64))
    tokens = torch.arange(20)[None]
    with trace() as visits:
        patch_model(model, RSAConfig())
        model(input_ids=tokens, labels=tokens).loss.backward()
    model.save_pretrained(folder / "saved")
    return visits


def load(folder: Path) -> Visits:
    from transformers import AutoModelForCausalLM

    with trace() as visits:
        AutoModelForCausalLM.from_pretrained(folder / "saved")
    return visits


def train_lm(folder: Path) -> Visits:
    from rsa_hf import cli

    config = ROOT / "configs" / "lm_bytes_embedded.yaml"
    options = {
        "output_dir": folder / "run",
        "max_steps": 2,
        "eval_every_steps": 2,
        "log_every_steps": 1,
        "max_train_bytes": 20_000,
        "max_eval_bytes": 3_000,
        "config_overrides.num_hidden_layers": 1,
    }
    arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    before, sys.argv = sys.argv, ["rsa-hf", "train", "lm", str(config), *arguments]
    try:
        with trace() as visits, redirect_stdout(sys.stderr):
            cli.main()
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.argv = before
    return visits


JOURNEYS: dict[str, Callable[[Path], Visits]] = {
    "Patch and forward: `patch_model(gpt2)`, then a forward and a backward pass": patch_and_forward,
    "Load: `AutoModelForCausalLM.from_pretrained` of that model, saved": load,
    "Train: `rsa-hf train lm configs/lm_bytes_embedded.yaml`, two steps, an evaluation and a checkpoint": train_lm,
}


def lines() -> list[str]:
    """The journeys as Markdown."""
    result = []
    known: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        for title, journey in JOURNEYS.items():
            visits = journey(Path(folder))
            new = len(visits.keys() - known)
            count = f"{len(visits)} files" + (f", {new} of them in no journey above" if known else "")
            result += [f"### {title}", "", f"{count}:", ""]
            for i, (file, function) in enumerate(visits.items(), start=1):
                name = function.rpartition("<locals>.")[2]
                result.append(f"{i}. `{file}`: `{name}`" + (" (above)" if file in known else ""))
            result.append("")
            known |= visits.keys()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="also put the journeys into CONTRIBUTING.md")
    write = parser.parse_args().write
    # The same everywhere: on the CPU, in plain PyTorch, without the kernels that tests interpret, and from no network.
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ["RSA_HF_BACKEND"] = "chunked"
    os.environ.pop("TRITON_INTERPRET", None)
    text = "\n".join(lines()).strip()
    print(text)
    if write:
        page = PAGE.read_text(encoding="utf-8")
        new = re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n\n{text}\n\n{END}", page, flags=re.DOTALL)
        PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
