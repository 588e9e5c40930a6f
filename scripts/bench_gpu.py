"""The Triton kernels on a GPU: equality first, then product, training, decoding and memory, against floor and rival.

    python scripts/bench_gpu.py --out results

Needs an NVIDIA GPU, torch, triton and transformers, and no network: the models have random weights. Takes under ten
minutes on an H100. Unless values and every gradient agree with float64, nothing is measured. Rows stand in the order
of their worth. Each is measured on its own, and bench_gpu.json is written after each, so that what fails or runs out
of time loses nothing else. A row that this run does not get to keeps what an earlier one found, with its card and
commit; without one the table says 'not measured'. Writes bench_gpu.json and .md.

To measure next, and what is predicted:

* All rows with RSA on all heads (so far half of them): the kernels' share doubles, from 1.07 to 1.13 for GPT-2 at
  T = 1,024. The small operations on rates, about 35 a layer and direction, are gone since: two kernels forward and
  three backward are left, so a step costs what its kernels cost, 1.15.
* BERT at T = 128 and batch 32 is bound by the host, as GPT-2 was: 1.2. A Llama of 150M at T = 2,048: 1.1.
* A compiled step of GPT-2 costs the ratio of its kernels, 1.13.
* Decoding without a compiler costs as much as compiled decoding in milliseconds, so relatively less: 1.4.
* A sliding window reads V and dOut once more, mostly from the L2 cache, and multiplies one more matrix each way.
  Backward it spills 424 bytes a thread: 1.6 times what the same heads take without it.
* A million positions take 128 times as long as 8,192.
* Kernels are compiled for each length and block shape: seconds each, most of the run. A first step of BERT takes half
  a minute.

`--dry` runs all of it on a CPU in Triton's interpreter, at sizes that say nothing about speed.
"""

import os
import sys

if "--dry" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import functools
import gc
import json
import math
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measuring import interleaved, machine, make_parser, ratio, table, write
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    DynamicCache,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    StaticCache,
)
from triton_interpreter import repair_interpreter

from rsa_hf import RSAConfig, patch_model, rem_matrix, rem_product
from rsa_hf.layer import RSAHeads
from rsa_hf.ops import autograd
from rsa_hf.ops.autograd import solve
from rsa_hf.ops.mask import AttentionMask, document_index
from rsa_hf.ops.problem import Learned, Problem
from rsa_hf.ops.triton import tuning
from rsa_hf.ops.triton.launch import triton_backward, triton_forward

repair_interpreter()
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
SUMS = 1e-4  # gradients of rates and gates, whatever the dtype
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Sizes:
    """How large everything is."""

    heads: int = 16
    head_size: int = 64
    values: int = 2**30  # in V of the product: 2 GB of bfloat16
    lengths: tuple[int, ...] = (512, 8192)
    checked: int = 700
    dense: int = 8192
    longest: int = 2**20
    texts: tuple[tuple[str, int, int], ...] = (  # model, T and batch
        ("GPT-2", 1024, 8),
        ("GPT-2", 8192, 1),
        ("BERT", 128, 32),
        ("Llama", 2048, 4),
    )
    batches: tuple[int, ...] = (1, 64)
    context: int = 512
    steps: int = 16
    rounds: int = 15
    matrix: int = 8192

    def model(self, name: str) -> PreTrainedConfig:
        """GPT-2 small with room for the longest text, BERT-base, or a Llama of 150M with two heads per value head."""
        if name == "BERT":
            return BertConfig()
        if name == "Llama":
            shape = {"num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 6}
            return LlamaConfig(hidden_size=768, intermediate_size=3072, tie_word_embeddings=True, **shape)
        return GPT2Config(n_positions=max(length for _, length, _ in self.texts))


@dataclass(frozen=True)
class DrySizes(Sizes):
    """What the interpreter gets through in seconds."""

    heads: int = 3
    head_size: int = 16
    values: int = 2 * 16 * 40
    lengths: tuple[int, ...] = (20, 40)
    checked: int = 20
    dense: int = 20
    longest: int = 70
    texts: tuple[tuple[str, int, int], ...] = (("GPT-2", 20, 1), ("GPT-2", 33, 1), ("BERT", 12, 2), ("Llama", 14, 1))
    batches: tuple[int, ...] = (1, 2)
    context: int = 20
    steps: int = 2
    rounds: int = 1
    matrix: int = 64

    def model(self, name: str) -> PreTrainedConfig:
        """A tiny one."""
        config = super().model(name)
        sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        for key, size in {**sizes, "num_key_value_heads": 1, "intermediate_size": 48}.items():
            if hasattr(config, key):
                setattr(config, key, size)
        return config


class Bench:
    """All measurements; each returns what goes into the record."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes, self.device, self.dry = sizes, device, isinstance(sizes, DrySizes)

    # --- problems ---------------------------------------------------------------------------------------------------

    def problem(
        self, length: int, batch: int, causal: bool, dtype: torch.dtype = torch.bfloat16, **masks: Any
    ) -> Problem:
        """That of a layer of RSA heads of every kind, laid out as models do: [B, T, H, D] in memory."""
        H, D = self.sizes.heads, self.sizes.head_size
        shape = (batch, length, H, D)
        value = torch.randn(shape, device=self.device, dtype=dtype).transpose(1, 2)
        attention = torch.randn(shape, device=self.device, dtype=dtype)
        counts = {"num_regular": H - H // 3 * 2, "num_cyclical_pairs": H // 3}
        config = RSAConfig(**counts, gate_init=-1.0, gate_per_head=True)
        heads = RSAHeads(config.layer_specs([H])[0]).to(self.device)
        mask = AttentionMask(length, length, 0, causal, **masks)
        return Problem(value, attention, heads.learned, heads.spec.layout, 1, mask)

    def batch(self, length: int) -> int:
        """How many rows make up V's size."""
        return max(self.sizes.values // (self.sizes.heads * self.sizes.head_size * length), 1)

    def time(self, **arms: Callable[[], Any]) -> dict[str, dict[str, float]]:
        """Milliseconds of each arm."""
        return interleaved(arms, self.sizes.rounds, self.device)

    # --- equality ---------------------------------------------------------------------------------------------------

    def equality(self) -> dict[str, float]:
        """The largest relative error of the output and of any gradient, for every kind of geometry.

        Raises:
            SystemExit: one is too large; nothing is to be reported then.
        """
        T = self.sizes.checked
        key_mask = torch.ones(2, T, dtype=torch.bool, device=self.device)
        key_mask[0, : T // 3] = False
        documents = torch.arange(T, device=self.device).expand(2, -1) // max(T // 5, 1)
        masks = {"plain": {}, "padded": {"key_mask": key_mask}, "packed": {"documents": document_index(documents)}}
        masks["window"] = {"sliding_window": T // 3}
        errors = {}
        for dtype in TOLERANCE:
            for causal in (True, False):
                for name, mask in masks.items():
                    torch.manual_seed(0)
                    problem = self.problem(T, 2, causal, dtype, **mask)
                    where = f"{str(dtype).removeprefix('torch.')}, {'causal' if causal else 'bidirectional'}, {name}"
                    errors[where] = self.error(problem, where)
        return errors

    def error(self, problem: Problem, where: str) -> float:
        """The largest relative error of one problem against the explicit P in float64."""
        given = [tensor.detach() for tensor in problem.tensors[:-1]]  # without free lags
        weights = torch.randn_like(problem.attention)

        def run(tensors: list[Tensor], weights: Tensor) -> list[Tensor]:
            value, attention, *learned = (tensor.requires_grad_() for tensor in tensors)
            changed = problem._replace(value=value, attention=attention, learned=Learned(*learned, None))
            output = solve(changed)
            return [output, *torch.autograd.grad(output, tensors, weights)]

        autograd.REQUESTED = "pytorch"
        expected = run([tensor.double() for tensor in given], weights.double())
        autograd.REQUESTED = "triton"
        names = ("output", "dV", "d attention", "d mu", "d eta", "d nu", "d theta")
        worst = 0.0
        for name, a, b in zip(names, run(given, weights), expected, strict=True):
            error = float((a.double() - b).detach().norm() / b.detach().norm().clamp_min(1e-30))
            limit = TOLERANCE[problem.value.dtype] if name in ("output", "dV", "d attention") else SUMS
            if not error <= limit:
                raise SystemExit(f"{where}: {name} is off by {error:.1e}, more than {limit:.0e}; nothing is reported.")
            worst = max(worst, error)
        return worst

    # --- rows -------------------------------------------------------------------------------------------------------

    def ceilings(self) -> dict[str, float]:
        """What the card does at best: a copy of V, in bytes a second, and a bf16 matrix product, in operations."""
        source = torch.randn(self.sizes.values, device=self.device, dtype=torch.bfloat16)
        target = torch.empty_like(source)
        n = self.sizes.matrix
        a, b = (torch.randn(n, n, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        times = self.time(copy=lambda: target.copy_(source), matmul=lambda: a @ b)
        seconds = {arm: spread["median"] / 1000 for arm, spread in times.items()}
        return {"bytes_per_s": 2 * source.nbytes / seconds["copy"], "operations_per_s": 2 * n**3 / seconds["matmul"]}

    def product(self, length: int, causal: bool) -> dict[str, Any]:
        """P V alone against a copy of as many bytes as it reads and writes, in the same run."""
        problem = self.problem(length, self.batch(length), causal)
        value = problem.value
        alone = problem._replace(attention=None, learned=problem.learned._replace(mu=None))
        moved = value.nbytes + 2 * value.nbytes  # V in, float32 out
        half = torch.empty(moved // 2, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(half)
        times = self.time(product=lambda: triton_forward(alone), copy=lambda: target.copy_(half))
        share, operations = times["copy"]["median"] / times["product"]["median"], 266 * value.numel()
        return {"value": share, "batch": len(value), "times_ms": times, "bytes": moved, "operations": operations}

    def both(self, problem: Problem) -> Callable[[], None]:
        """Forward and backward of one problem, as a call."""
        grad = torch.randn_like(problem.attention)

        def run() -> None:
            triton_forward(problem)
            triton_backward(grad, problem)

        return run

    def fused(self, length: int, causal: bool, **masks: Any) -> dict[str, Any]:
        """Forward and backward with the gate, against a copy of as many bytes as they must read and write."""
        problem = self.problem(length, self.batch(length) // 2 or 1, causal, **masks)
        value, both = problem.value, self.both(problem)
        moved = 8 * value.nbytes  # V, attention, output; V, attention, dOut, dV, dAttention
        half = torch.empty(moved // 2, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(half)
        times = self.time(both=both, forward=lambda: triton_forward(problem), floor=lambda: target.copy_(half))
        slower, operations = ratio(times, "both", "floor"), 680 * value.numel()
        return {"value": slower, "batch": len(value), "times_ms": times, "bytes": moved, "operations": operations}

    def dense(self) -> dict[str, Any]:
        """P V and its gradients against the explicit P."""
        T = self.sizes.dense
        value = self.problem(T, 1, True).value.requires_grad_()
        H = value.shape[1]
        kinds, theta = (("regular", "cos", "sin") * H)[:H], torch.full((H,), math.pi / 4, device=self.device)
        decay, theta = torch.linspace(0.7, 0.99, H, device=self.device).requires_grad_(), theta.requires_grad_()
        grad = torch.randn(value.shape, device=self.device)

        def linear() -> Any:
            return torch.autograd.grad(rem_product(value, kinds, decay, theta), (value, decay, theta), grad)

        def explicit() -> Any:
            P = rem_matrix(kinds, decay, theta, query_length=T).to(value.dtype)
            return torch.autograd.grad(P @ value, (value, decay, theta), grad.to(value.dtype))

        times = self.time(rsa=linear, dense=explicit)
        return {"value": ratio(times, "dense", "rsa"), "times_ms": times}

    def build(self, name: str, patched: bool) -> PreTrainedModel:
        """A model with the same random weights, in bf16."""
        torch.manual_seed(0)
        config = self.sizes.model(name)
        auto = AutoModelForMaskedLM if name == "BERT" else AutoModelForCausalLM
        with self.device:  # a processor draws random numbers far more slowly
            model = auto.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
        plan = RSAConfig(num_cyclical_pairs=config.num_attention_heads // 2)
        return patch_model(model, plan) if patched else model

    def training(self, name: str, length: int, batch: int, compiled: bool = False) -> dict[str, Any]:
        """A training step, patched over unpatched: time, in turns; then peak memory and the time of all kernels."""
        ids = torch.randint(0, 97, (batch, length), device=self.device)

        def step_of(patched: bool) -> Callable[[], None]:
            model = self.build(name, patched).train()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
            forward = torch.compile(model.forward, backend="eager" if self.dry else "inductor") if compiled else model
            keywords = {} if name == "BERT" else {"use_cache": False}

            def step() -> None:
                optimizer.zero_grad()
                forward(input_ids=ids, labels=ids, **keywords).loss.backward()
                optimizer.step()

            return step

        times = self.time(unpatched=step_of(False), patched=step_of(True))
        found: dict[str, Any] = {"value": ratio(times, "patched", "unpatched"), "times_ms": times}
        if self.device.type == "cuda":
            memory, kernels = {}, {}
            for arm in ("unpatched", "patched"):
                gc.collect()
                before = torch.cuda.memory_allocated()
                step = step_of(arm == "patched")
                step()
                torch.cuda.reset_peak_memory_stats()
                step()
                memory[arm] = (torch.cuda.max_memory_allocated() - before) / 1e6
                with profile(activities=[ProfilerActivity.CUDA]) as recorded:
                    step()
                    torch.cuda.synchronize()
                kernels[arm] = sum(event.self_device_time_total for event in recorded.key_averages()) / 1000
                del step
            found |= {"memory": memory["patched"] / memory["unpatched"], "memory_mb": memory}
            found |= {"kernels": kernels["patched"] / kernels["unpatched"], "kernels_ms": kernels}
        return found

    def decoding(self, batch: int, compiled: bool) -> dict[str, Any]:
        """Steps of decoding, patched over unpatched: compiled with a static cache, or eager with a growing one."""
        times = self.time(unpatched=self.decoder(False, batch, compiled), patched=self.decoder(True, batch, compiled))
        return {"value": ratio(times, "patched", "unpatched"), "steps": self.sizes.steps, "times_ms": times}

    def decoder(self, patched: bool, batch: int, compiled: bool) -> Callable[[], None]:
        """Some steps behind the same context, as a call."""
        context, length = self.sizes.context, self.sizes.context + self.sizes.steps
        model = self.build("GPT-2", patched).eval()
        ids = torch.randint(0, 97, (batch, length), device=self.device)
        positions = torch.arange(length, device=self.device).expand(batch, -1)
        masks = torch.ones(length, length, dtype=torch.long, device=self.device).tril()
        static = StaticCache(config=model.config, max_cache_len=length)
        options = {"backend": "eager"} if self.dry else {"mode": "reduce-overhead"}
        forward = torch.compile(model.forward, fullgraph=True, **options) if compiled else model

        @torch.no_grad()
        def run() -> None:
            static.reset()
            cache = static if compiled else DynamicCache(config=model.config)
            model(input_ids=ids[:, :context], past_key_values=cache)
            for t in range(context, length):
                inputs = {"input_ids": ids[:, t : t + 1], "past_key_values": cache}
                if compiled:
                    inputs |= {"attention_mask": masks[t].expand(batch, -1), "position_ids": positions[:, t : t + 1]}
                    inputs |= {name: inputs[name].clone() for name in inputs if name != "past_key_values"}
                forward(**inputs)

        return run

    def longest(self) -> dict[str, Any]:
        """Forward and backward of one layer's heads over a million positions."""
        times = self.time(both=self.both(self.problem(self.sizes.longest, 1, True)))
        return {"value": times["both"]["median"], "times_ms": times}

    def sweep(self) -> dict[str, Any]:
        """Every block shape worth trying, in the shapes of the product: milliseconds, or why it does not run."""
        length = self.sizes.lengths[-1]
        problem = self.problem(length, max(self.batch(length) // 8, 1), True)
        grad = torch.randn_like(problem.attention)
        kernels = {
            "forward": lambda shape: triton_forward(problem, shape),
            "backward": lambda shape: triton_backward(grad, problem, shape),
        }
        found: dict[str, Any] = {}
        for name, kernel in kernels.items():
            tried = found[name] = []
            for shape in self.shapes():
                entry: dict[str, Any] = shape._asdict()
                tried.append(entry)
                try:
                    entry["ms"] = interleaved({"it": lambda: kernel(shape)}, 3, self.device)["it"]["median"]  # noqa: B023
                except Exception as error:
                    entry["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
        return found

    def shapes(self) -> list[tuning.Tuning]:
        """What the sweep tries."""
        if self.dry:
            return [tuning.Tuning(16, 16, 4, 2)]
        chosen = [(64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 8, 2), (64, 8, 3), (32, 4, 3), (32, 4, 4), (128, 8, 2)]
        shapes = [tuning.Tuning(chunk, 64, warps, stages) for chunk, warps, stages in chosen]
        return shapes + [tuning.Tuning(64, 32, warps, 3) for warps in (2, 4)]


@dataclass(frozen=True)
class Row:
    """One row of the table: what is measured, what it is compared with, and what it is to reach."""

    name: str
    rival: str
    target: str
    measure: Callable[[Bench], Any]
    form: str = "{value:.3f}"


def rows_of(sizes: Sizes) -> list[Row]:
    """All rows, in the order of their worth."""
    rates = "{bytes_per_s:.3g} B/s, {operations_per_s:.3g} /s"
    forms = "{value:.3f}; {memory:.3f}; {kernels:.3f}"

    def training(name: str, T: int, B: int, target: str, compiled: bool = False) -> Row:
        what = f"{name}, T = {T:,}, batch {B}{', compiled' * compiled}"
        measure = functools.partial(Bench.training, name=name, length=T, batch=B, compiled=compiled)
        return Row(f"training step, {what}: time; memory; time of kernels", "unpatched", target, measure, forms)

    def decoding(B: int, target: str, compiled: bool) -> Row:
        how = "static cache, compiled" if compiled else "growing cache, eager"
        measure = functools.partial(Bench.decoding, batch=B, compiled=compiled)
        return Row(f"decoding, GPT-2, {how}, batch {B}", "unpatched", target, measure)

    def layer(what: str, direction: str, T: int, target: str) -> Row:
        name = {
            "product": f"P V forward, {direction}, T = {T:,}, share of the copy's bandwidth",
            "fused": f"forward + backward, gate fused, {direction}, T = {T:,}, times the floor",
        }[what]
        measure = functools.partial(getattr(Bench, what), length=T, causal=direction == "causal")
        return Row(name, "copy of as many bytes", target, measure)

    longest = f"one layer's heads, T = {sizes.longest:,}, forward + backward"
    short, long = sizes.lengths
    (gpt2, gpt2_long, bert, llama), (one, many) = sizes.texts, sizes.batches
    return [
        Row("copy, and a bf16 matrix product", "", "", Bench.ceilings, rates),
        training(*gpt2, "≤ 1.05"),
        training(*gpt2_long, "≤ 1.04"),
        layer("product", "causal", long, "≥ 0.75"),
        layer("fused", "causal", long, "≤ 2"),
        decoding(one, "≤ 1.10", compiled=True),
        training(*bert, "≤ 1.05"),
        training(*llama, "≤ 1.05"),
        training(*gpt2, "≤ 1.04", compiled=True),
        decoding(many, "≤ 1.04", compiled=True),
        decoding(one, "≤ 1.10", compiled=False),
        Row(
            f"forward + backward, gate fused, causal, T = {long:,}, a window of {long // 8:,}, times the floor",
            "copy of as many bytes",
            "",
            functools.partial(Bench.fused, length=long, causal=True, sliding_window=long // 8),
        ),
        Row(longest, "", "runs", Bench.longest, "{value:.1f} ms"),
        layer("product", "bidirectional", long, "≥ 0.6"),
        layer("fused", "bidirectional", long, "≤ 3"),
        layer("product", "causal", short, "≥ 0.75"),
        layer("product", "bidirectional", short, "≥ 0.6"),
        Row(f"P V forward + backward, T = {sizes.dense:,}, times faster", "dense P", "≥ 50", Bench.dense),
        Row("sweep over block shapes", "", "", Bench.sweep, "in bench_gpu.json"),
    ]


def run(record: dict[str, Any], bench: Bench, rows: list[Row], out: Path, budget: float) -> None:
    """Measure row by row, writing after each."""
    started = time.perf_counter()
    for row in rows:
        if time.perf_counter() - started > budget:
            break
        entry = record["rows"][row.name] = {"machine": record["machine"]}
        try:
            entry["found"] = row.measure(bench)
        except Exception as error:
            entry["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
            entry["traceback"] = traceback.format_exc()
        torch._dynamo.reset()
        gc.collect()
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
        entry["seconds_since_start"] = round(time.perf_counter() - started, 1)
        record["tuned"] = [[*map(str, question), shape._asdict()] for question, shape in tuning._known.items()]
        write(out / "bench_gpu.json", json.dumps(record, indent=1) + "\n")
        print(f"{row.name}: {measured(row, record)}", flush=True)


def earlier_rows(path: Path, rows: list[Row]) -> dict[str, Any]:
    """What earlier runs found, by row."""
    names = {row.name for row in rows}
    found = json.loads(path.read_text())["rows"] if path.exists() else {}
    return {name: entry for name, entry in found.items() if name in names}


def measured(row: Row, record: dict[str, Any]) -> str:
    """What a row found, or that it was not measured, and why if something was tried."""
    entry = record["rows"].get(row.name, {})
    found = entry.get("found")
    if found is None:
        return f"{NOT_MEASURED} ({entry['error']})" if "error" in entry else NOT_MEASURED
    if record["dry"]:
        return f"{NOT_MEASURED} (interpreted)"
    parts = []
    for part in row.form.split("; "):
        try:
            parts.append(part.format(**found))
        except KeyError:
            parts.append(NOT_MEASURED)
    return "; ".join(parts)


def page(record: dict[str, Any], rows: list[Row]) -> str:
    cells = [[row.name, row.rival, row.target, measured(row, record), card(row, record)] for row in rows]
    lines = [
        "# The Triton kernels on a GPU",
        "",
        f"Made by `{record['command']}`, which holds values and every gradient against float64 first (largest "
        f"relative error of the last run {max(record['equality'].values()):.0e}). Medians of {record['rounds']} "
        "interleaved rounds; bf16.",
        "",
        *table(["", "against", "target", "measured", "on"], cells),
    ]
    return "\n".join(lines) + "\n"


def card(row: Row, record: dict[str, Any]) -> str:
    """Where and with what a row was measured."""
    head = record["rows"].get(row.name, {}).get("machine")
    if head is None:
        return ""
    on = head.get("gpu", head["processor"])
    heads = f"RSA on {head.get('heads', 'half of the')} heads"
    return f"{on}, torch {head['torch']}, triton {head['triton']}, {head['commit']}, {heads}"


def main() -> None:
    parser = make_parser(__doc__, "--out")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU, in Triton's interpreter")
    parser.add_argument("--budget", type=float, default=400.0, help="seconds after which no further row is begun")
    options = parser.parse_args()
    autograd.REQUESTED = "triton"
    sizes = DrySizes() if options.dry else Sizes()
    rows = rows_of(sizes)
    if not options.dry and not torch.cuda.is_available():
        raise SystemExit(
            "no GPU is here; --dry runs everything in Triton's interpreter, at sizes that measure nothing."
        )
    device = torch.device("cpu" if options.dry else "cuda")
    bench = Bench(sizes, device)
    import triton

    record = {
        "command": "python scripts/bench_gpu.py" + " --dry" * options.dry,
        "dry": options.dry,
        "machine": {**machine(device), "triton": triton.__version__, "heads": "all"},
        "rounds": sizes.rounds,
        "equality": bench.equality(),
        "rows": {} if options.dry else earlier_rows(options.out / "bench_gpu.json", rows),
    }
    print(f"equality: {max(record['equality'].values()):.1e}", flush=True)
    run(record, bench, rows, options.out, options.budget)
    text = page(record, rows)
    write(options.out / "bench_gpu.md", text)
    print(text)


if __name__ == "__main__":
    main()
