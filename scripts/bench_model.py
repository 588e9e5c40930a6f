"""GPT-2 small with and without RSA heads: a training step and a step of decoding, time and peak memory.

    python scripts/bench_model.py --output results

Random weights of the published shape (124 M parameters). Training: forward, backward and AdamW on a text of --length
tokens. Decoding: one token at a time behind a context of --context tokens. All arms run in the same process and take
turns; peak memory is measured in a process for each. Before anything is reported, a shut gate has to give the plain
model bit for bit, and a cached run with open gates the uncached one. Writes bench_model.json and .md.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import interleaved, machine, peak_memory, ratio
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from rsa_hf import RSAConfig, patch_model

PLANS = {
    "unpatched": None,
    "RSA, the default plan": RSAConfig(),
    "RSA on all heads": RSAConfig(num_cyclical_pairs=6),
}
STEPS = 8  # of decoding, timed together
TOLERANCE = 1e-4


def build(arm: str, length: int, device: str) -> PreTrainedModel:
    """GPT-2 small with the same random weights for every arm."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel._from_config(GPT2Config(n_positions=max(length, 1024)), attn_implementation="sdpa")
    plan = PLANS[arm]
    return (model if plan is None else patch_model(model, plan)).to(device)


def training_step(arm: str, length: int, device: str) -> Callable[[], Any]:
    """Forward, backward and AdamW, as a call."""
    model = build(arm, length, device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ids = torch.randint(0, 50_000, (1, length), generator=torch.Generator().manual_seed(1)).to(device)

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()

    return step


def decoding(arm: str, context: int, device: str) -> Callable[[], Any]:
    """Some steps of decoding behind a context; each call begins behind the same context."""
    model = build(arm, context + STEPS, device).eval()
    ids = torch.randint(0, 50_000, (1, context + STEPS), generator=torch.Generator().manual_seed(1)).to(device)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids[:, :context], past_key_values=cache)

    @torch.no_grad()
    def steps() -> None:
        for t in range(context, context + STEPS):
            model(input_ids=ids[:, t : t + 1], past_key_values=cache)
        cache.crop(-STEPS)

    return steps


@torch.no_grad()
def check(device: str) -> dict[str, float]:
    """What has to hold before a figure is reported.

    Raises:
        SystemExit: it does not.
    """
    plain = build("unpatched", 200, device).eval()
    ids = torch.randint(0, 50_000, (1, 200)).to(device)
    expected = plain(ids).logits
    shut = patch_model(copy.deepcopy(plain), RSAConfig(gate_init=-math.inf))
    if not torch.equal(shut(ids).logits, expected):
        raise SystemExit("a shut gate does not give the unpatched model; nothing is reported.")
    opened = patch_model(copy.deepcopy(plain), RSAConfig(gate_init=0.0))
    whole = opened(ids, use_cache=False).logits
    cache = DynamicCache(config=opened.config)
    pieces = [opened(ids[:, :190], past_key_values=cache).logits]
    pieces += [opened(ids[:, t : t + 1], past_key_values=cache).logits for t in range(190, 200)]
    error = float((torch.cat(pieces, 1) - whole).abs().max() / whole.abs().max())
    if error > TOLERANCE or torch.allclose(whole, expected):
        raise SystemExit(f"cached and uncached runs differ by {error:.1e}, or RSA does nothing; nothing is reported.")
    return {"cached_against_uncached": error}


def table(record: dict[str, Any]) -> str:
    head = record["machine"]
    lines = [
        "# GPT-2 small with RSA heads",
        "",
        f"Made by `{record['command']}` on {head.get('gpu', head['processor'])}, {head['threads']} threads, torch "
        f"{head['torch']}, transformers {head['transformers']}, commit {head['commit']}. float32, batch 1. Medians, "
        "in brackets the quartiles; the ratio is that of the medians of one run whose arms took turns.",
    ]
    for name, part in record["parts"].items():
        lines += [
            "",
            f"## {name}",
            "",
            "| | ms | × unpatched | peak memory, MB | × unpatched |",
            "|---|---|---|---|---|",
        ]
        for arm, times in part["times_ms"].items():
            memory, plain = part["memory_mb"][arm], part["memory_mb"]["unpatched"]
            spread = f"{times['median']:.1f} [{times['low']:.1f}–{times['high']:.1f}]"
            by_time = ratio(part["times_ms"], arm, "unpatched")
            lines.append(f"| {arm} | {spread} | {by_time:.3f} | {memory:,.0f} | {memory / plain:.3f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results"))
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    equality = check(options.device)
    parts = {}
    for name, prepare, length in (
        (f"A training step, T = {options.length:,}", training_step, options.length),
        (f"{STEPS} steps of decoding, context {options.context:,}", decoding, options.context),
    ):
        times = interleaved({arm: prepare(arm, length, options.device) for arm in PLANS}, options.rounds, device)
        memory = {arm: peak_memory(prepare, arm, length, options.device) for arm in PLANS}
        parts[name] = {"times_ms": times, "memory_mb": memory}
    command = f"python scripts/bench_model.py --length {options.length} --context {options.context}"
    command += f" --rounds {options.rounds}"
    record = {"command": command, "machine": machine(device), "equality": equality, "parts": parts}
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "bench_model.json").write_text(json.dumps(record, indent=1) + "\n")
    text = table(record)
    (options.output / "bench_model.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
