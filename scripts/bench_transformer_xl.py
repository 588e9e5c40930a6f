"""A training step of Transformer-XL: ours, with and without RSA heads, against that of transformers 4.57.

    python scripts/bench_transformer_xl.py --output results

The published text8 shape (512 wide, 8 heads of 64, inner width 2048), fewer layers, segments of --length behind a
memory of as many. Each arm runs in a process of its own, the reference in its own environment (see
transformer_xl_reference.py), and they take turns: one step each, round by round. A step is forward, backward and
AdamW. Before anything is reported, both give the same loss for the same weights. Writes bench_transformer_xl.json and
.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measuring import Worker, answer, machine, make_parser, on, publish, spread, table
from transformer_xl_reference import load_reference, reference_python

REFERENCE, EAGER, PLAIN, RSA = "transformers 4.57", "rsa_hf, eager", "rsa_hf, sdpa", "rsa_hf, sdpa, 4 RSA heads"
ARMS = {REFERENCE: "reference", EAGER: "eager", PLAIN: "sdpa", RSA: "rsa"}
SIZES = {"layers": 3, "length": 512, "batch": 2, "rounds": 10, "threads": 1}
TOLERANCE = 1e-5


def build(arm: str, arguments: argparse.Namespace) -> torch.nn.Module:
    """The model of an arm, with the reference's weights."""
    if arm == "reference":
        from transformers import TransfoXLConfig

        torch.manual_seed(0)
        config = TransfoXLConfig(
            vocab_size=27, cutoffs=[], div_val=1, d_model=512, d_embed=512, n_head=8, d_head=64, d_inner=2048,
            n_layer=arguments.layers, mem_len=arguments.length, clamp_len=-1, same_length=False, untie_r=False,
            dropout=0.1, dropatt=0.0,
        )  # fmt: skip
        model = load_reference().TransfoXLLMHeadModel(config)
        model.save_pretrained(arguments.checkpoint, safe_serialization=False)
        return model
    from transformers import AutoModelForCausalLM

    from rsa_hf import RSAConfig, patch_model

    attention = "eager" if arm == "eager" else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(arguments.checkpoint, attn_implementation=attention)
    if arm == "rsa":
        patch_model(model, RSAConfig(num_dilated_cyclical_pairs=2, dilation=[6, 6, 12, 12], gate_init=1.0))
    return model


def work(arguments: argparse.Namespace) -> None:
    """Answer the first line with the loss of fresh weights, and each other one with the seconds of a step."""
    torch.set_num_threads(arguments.threads)
    model = build(arguments.worker, arguments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2.5e-4)
    generator = torch.Generator().manual_seed(0)
    mems: Any = None

    def step(line: str) -> list[float]:
        nonlocal mems
        tokens = torch.randint(27, (arguments.batch, arguments.length), generator=generator)
        if line == "loss":
            with torch.no_grad():
                out = model.eval()(tokens, labels=tokens)
            model.train()
            mems = out.mems
            return [float(out.loss)]
        start = time.perf_counter()
        out = model(tokens, mems=mems, labels=tokens)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mems = out.mems
        return [time.perf_counter() - start]

    answer(step)


def measure(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Times of all arms, in milliseconds, one a round."""
    here = {"PYTHONPATH": os.pathsep.join(sys.path), **os.environ}
    there = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    workers, losses = {}, {}
    for name, arm in ARMS.items():
        is_reference = arm == "reference"
        options = [f"--{key}={getattr(arguments, key)}" for key in (*SIZES, "checkpoint")]
        python = str(reference_python()) if is_reference else sys.executable
        command = [python, str(Path(__file__).resolve()), *options, f"--worker={arm}"]
        workers[name] = Worker(command, there if is_reference else here, quiet=is_reference)
        [losses[name]] = workers[name].ask("loss")
    rounds = [{name: 1000 * worker.ask()[0] for name, worker in workers.items()} for _ in range(1 + arguments.rounds)]
    for worker in workers.values():
        worker.close()
    for name in ARMS:
        # Open gates are another model; the rest is the same one.
        if name != RSA and abs(losses[name] - losses[REFERENCE]) > TOLERANCE * abs(losses[REFERENCE]):
            raise RuntimeError(f"{name} has the loss {losses[name]}, {REFERENCE} has {losses[REFERENCE]}.")
    return {name: [each[name] for each in rounds[1:]] for name in ARMS}


def page(record: dict[str, Any]) -> list[str]:
    """The times, and the ratios within a round."""

    def cells(found: dict[str, dict[str, float]], form: str) -> list[list[str]]:
        return [[name, f"{v['median']:{form}}", f"{v['low']:{form}}–{v['high']:{form}}"] for name, v in found.items()]

    return [
        "# A training step of Transformer-XL",
        "",
        f"Made by `{record['command']}` on {on(record['machine'])}, commit {record['machine']['commit']}.",
        "",
        *table(["", "milliseconds a step", "quartiles"], cells(record["milliseconds"], ".0f")),
        "",
        "Ratios within a round, where the arms take turns:",
        "",
        *table(["", "median", "quartiles"], cells(record["ratios"], ".3f")),
    ]


def main() -> None:
    parser = make_parser(__doc__)
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--checkpoint", help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments.checkpoint = folder
        times = measure(arguments)
    pairs = [(PLAIN, REFERENCE), (EAGER, REFERENCE), (RSA, REFERENCE), (RSA, PLAIN)]
    ratios = {
        f"{arm} / {rival}": spread([x / y for x, y in zip(times[arm], times[rival], strict=True)])
        for arm, rival in pairs
    }
    sizes = " ".join(f"--{name} {getattr(arguments, name)}" for name in SIZES)
    record = {
        "command": f"python scripts/bench_transformer_xl.py {sizes}",
        "machine": {**machine(torch.device("cpu")), "threads": arguments.threads},
        "milliseconds": {name: spread(values) for name, values in times.items()},
        "ratios": ratios,
    }
    publish(arguments.output, "bench_transformer_xl", record, page(record))


if __name__ == "__main__":
    main()
