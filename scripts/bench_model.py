"""Models with and without RSA heads: training steps and steps of generation, time and peak memory.

    python scripts/bench_model.py --output results

Random weights; all heads of the patched model are RSA heads. Training: forward, backward and AdamW. Decoding: one
token at a time behind a context. Host: GPT-2 with 12 layers of 64 at T = 8 on one thread, where a step is the time of
Python and of operations, not of computing; and how many operations a layer RSA adds. Both models run in the same
process and take turns; peak memory is measured in a process for each. Before anything is reported, all checks of
`rsa-hf doctor --model` have to hold on GPT-2. Writes bench_model.json and .md.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from measuring import (
    interleaved,
    machine,
    make_parser,
    on,
    peak_memory,
    publish,
    ratio,
    ratio_spread,
    table,
    throughput,
)
from torch.profiler import ProfilerActivity, profile
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from experiments import language_model
from rsa_hf import RSAConfig, patch_model
from rsa_hf.checks import examine

ARMS = PLAIN, RSA = "unpatched", "RSA on all heads"
TOKENS = 8  # of decoding, timed together


def sizes(width: int, layers: int, heads: int) -> dict[str, int]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return dict(zip(names, (width, 4 * width, layers, heads), strict=True))


def bert() -> PreTrainedModel:
    return BertForSequenceClassification._from_config(BertConfig(**sizes(384, 6, 12)), attn_implementation="sdpa")


def llama() -> PreTrainedModel:
    config = LlamaConfig(vocab_size=256, **sizes(128, 4, 4))
    return LlamaForCausalLM._from_config(config, attn_implementation="sdpa")


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel._from_config(GPT2Config(), attn_implementation="sdpa")


def with_memory(architecture: str) -> Callable[[], PreTrainedModel]:
    return lambda: language_model.build(architecture, 256, "plain")


class Training(NamedTuple):
    """A training step: the model, its number of heads, the batch, and the rounds of timing."""

    model: Callable[[], PreTrainedModel]
    heads: int
    batch: int
    length: int
    rounds: int


TRAINING = {
    "BERT, 6 layers of 384, T = 128, 16 rows": Training(bert, 12, 16, 128, 25),
    "GPT-2 small, T = 128, 4 rows": Training(gpt2, 12, 4, 128, 15),
    "GPT-2 small, T = 512": Training(gpt2, 12, 1, 512, 15),
    "GPT-2 small, T = 1,024": Training(gpt2, 12, 1, 1024, 9),
    "Llama, 4 layers of 128, T = 256, 16 rows": Training(llama, 4, 16, 256, 25),
    "Transformer-XL, 2 layers of 64, T = 64, 8 rows": Training(with_memory("transformer-xl"), 8, 8, 64, 80),
    "Block-Recurrent, 3 layers of 64, T = 64, 8 rows": Training(with_memory("block-recurrent"), 8, 8, 64, 80),
}
CONTEXTS = (500, 1000)
HOST_LAYERS = 12


def patched(arm: str, model: PreTrainedModel, heads: int) -> PreTrainedModel:
    return patch_model(model, RSAConfig(num_cyclical_pairs=heads // 2)) if arm == RSA else model


def training_step(arm: str, name: str, device: str) -> Callable[[], Any]:
    """Forward, backward and AdamW, as a call. Models with a memory carry it from step to step."""
    torch.manual_seed(0)
    case = TRAINING[name]
    model = patched(arm, case.model(), case.heads).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ids = torch.randint(0, 256, (case.batch, case.length), generator=torch.Generator().manual_seed(1)).to(device)
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids[:, 0] % 2 if case.model is bert else ids}
    if case.model in (gpt2, llama):
        inputs["use_cache"] = False

    def step() -> None:
        optimizer.zero_grad()
        out = model(**inputs)
        out.loss.backward()
        optimizer.step()
        if "mems" in out:
            inputs["mems"] = out.mems

    return step


def decoding(arm: str, context: int, device: str) -> Callable[[], Any]:
    """Some steps of GPT-2 small behind a context; each call begins behind the same context."""
    torch.manual_seed(0)
    model = patched(arm, gpt2(), 12).to(device).eval()
    ids = torch.randint(0, 50_000, (1, context + TOKENS), generator=torch.Generator().manual_seed(1)).to(device)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids[:, :context], past_key_values=cache)

    @torch.no_grad()
    def steps() -> None:
        for t in range(context, context + TOKENS):
            model(input_ids=ids[:, t : t + 1], past_key_values=cache)
        cache.crop(-TOKENS)

    return steps


def host_step(arm: str, backward: bool, device: str) -> Callable[[], Any]:
    """Forward and backward, or forward alone, where there is hardly anything to compute."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=HOST_LAYERS, n_embd=64, n_head=8, n_positions=64, vocab_size=128, use_cache=False)
    model = patched(arm, GPT2LMHeadModel._from_config(config, attn_implementation="sdpa"), 8).to(device)
    ids = torch.randint(0, 128, (1, 8)).to(device)

    def step() -> None:
        with torch.set_grad_enabled(backward):
            loss = model(input_ids=ids, labels=ids).loss
        if backward:
            loss.backward()

    return step


def operators_a_layer(device: str) -> dict[str, float]:
    """How many operations a layer RSA adds, forward and, after that, backward."""

    def count(arm: str, backward: bool) -> int:
        step = host_step(arm, backward, device)
        step()
        with profile(activities=[ProfilerActivity.CPU]) as found:
            step()
        return sum(event.name.startswith(("aten::", "rsa_hf::")) for event in found.events())

    added = {backward: (count(RSA, backward) - count(PLAIN, backward)) / HOST_LAYERS for backward in (False, True)}
    return {"forward": added[False], "backward": added[True] - added[False]}


def check(device: str) -> dict[str, str]:
    """The correctness checks on GPT-2, by name, which have to hold before a figure is reported.

    Raises:
        SystemExit: one of them does not.
    """
    torch.manual_seed(0)
    found = list(examine(gpt2().to(device)))
    if failed := [f"{name}: {text}" for verdict, name, text in found if verdict != "ok"]:
        raise SystemExit(f"{'; '.join(failed)}; nothing is reported.")
    return {name: text for _, name, text in found}


def page(record: dict[str, Any]) -> list[str]:
    head, speed = record["machine"], record["throughput"]
    rows = []
    for name, part in record["parts"].items():
        times, memory = part["times_ms"], part["memory_mb"]
        ratios = ratio_spread(times, RSA, PLAIN) or {}
        rows.append(
            [
                name,
                *(f"{t['median']:.1f} [{t['low']:.1f}–{t['high']:.1f}]" for t in (times[PLAIN], times[RSA])),
                f"{ratios['median']:.3f} [{ratios['low']:.3f}–{ratios['high']:.3f}]",
                f"{memory[RSA]:,.0f}",
                f"{memory[RSA] / memory[PLAIN]:.3f}",
            ]
        )
    return [
        "# Models with RSA heads",
        "",
        f"Made by `{record['command']}` on {on(head)}, transformers {head['transformers']}, commit {head['commit']}. "
        f"In the same run the machine copied {speed['copy_gb_per_s']:.1f} GB/s (read and written) and multiplied "
        f"matrices at {speed['matrix_gflop_per_s']:.0f} GFLOP/s, both in float32.",
        "",
        "The two models took turns in one run. Times and ratios are medians, in brackets the quartiles; a ratio is "
        "that of two neighbouring steps. Memory is what tensors take at the peak of a step beyond those from before "
        "it.",
        "",
        "RSA adds {forward:.1f} operations a layer to the forward and {backward:.1f} to the backward pass, those "
        "within others counted too.".format(**record["operators_a_layer"]),
        "",
        *table(["", "unpatched, ms", "RSA on all heads, ms", "ratio", "memory, MB", "ratio"], rows),
    ]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", default="", help="measure only what has this in its name")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    equality = check(options.device)
    cases: list[tuple[str, Callable[..., Callable[[], Any]], Any, int]] = [
        (f"training step: {name}", training_step, name, case.rounds) for name, case in TRAINING.items()
    ]
    cases += [(f"{TOKENS} tokens: GPT-2 small behind {context:,}", decoding, context, 40) for context in CONTEXTS]
    for name, backward in (("forward", False), ("forward and backward", True)):
        cases.append((f"host: GPT-2, 12 layers of 64, T = 8, {name}", host_step, backward, 100))
    parts, threads = {}, torch.get_num_threads()
    for name, prepare, what, rounds in cases:
        if options.only not in name:
            continue
        torch.set_num_threads(1 if prepare is host_step else threads)
        calls = {arm: prepare(arm, what, options.device) for arm in ARMS}
        times = interleaved(calls, rounds, device)
        parts[name] = {"times_ms": times, "memory_mb": {arm: peak_memory(call) for arm, call in calls.items()}}
        print(f"{name}: {ratio(times, RSA, PLAIN):.3f}", flush=True)
    torch.set_num_threads(threads)
    record = {
        "command": "python scripts/bench_model.py" + (f" --only {options.only!r}" if options.only else ""),
        "machine": machine(device),
        "throughput": throughput(device),
        "equality": equality,
        "operators_a_layer": operators_a_layer(options.device),
        "parts": parts,
    }
    publish(options.output, "bench_model", record, page(record))


if __name__ == "__main__":
    main()
