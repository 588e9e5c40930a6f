"""P V against its rivals: time and memory, forward and backward, over lengths.

    python scripts/bench_product.py --output results

Rivals, in the same run and interleaved:

* copy: reading V and dOut and writing out and dV once, which nothing can beat;
* sdpa: fused causal softmax attention, forward and backward, of the same shape;
* dense: P as a matrix, multiplied with V, built from the rates as public re-implementations do;
* fft: the same convolution by fast Fourier transforms;
* layer: eq. 4 with sdpa and P V, whose time beyond that of sdpa is what RSA costs;
* explicit: eq. 4 of the paper with both T×S matrices, as public re-implementations compute it (for memory and scale).

A length is reported only if values and every gradient agree with float64 Fourier transforms. What would take more than
--budget seconds or --memory gigabytes is left out. Writes bench_product.json and .md.
"""

import argparse
import math
from typing import Any

import torch
import torch.nn.functional as F
from measuring import interleaved, machine, make_parser, on, peak_memory, publish, ratio, table
from torch import Tensor

from rsa_hf import rem_matrix, rem_product
from rsa_hf.ops.autograd import solve
from rsa_hf.ops.mask import AttentionMask
from rsa_hf.ops.problem import from_rems
from rsa_hf.rem import Rems

HEADS, DIM = 12, 64
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
TOLERANCE = 1e-5
ARMS = ("rsa", "copy", "sdpa", "layer", "dense", "fft", "explicit")
QUADRATIC = ("sdpa", "layer", "dense", "explicit")
PATIENCE = 20.0  # seconds of timing a length, after which five rounds of an arm are enough


def batch_of(length: int) -> int:
    """Rows, so that short texts are not measured alone: 2,048 positions at least."""
    return max(2048 // length, 1)


class Problem:
    """Inputs of one length, and every arm as a call without arguments that returns output and gradients."""

    def __init__(self, length: int, device: str, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(length)
        B, T = batch_of(length), length
        # As models lay them out: [B, T, H, D] in memory.
        self.value, self.query, self.key = (
            torch.randn(B, T, HEADS, DIM, generator=generator).to(device, dtype).transpose(1, 2).requires_grad_()
            for _ in range(3)
        )
        self.grad = torch.randn(B, HEADS, T, DIM, generator=generator).to(device, dtype)
        self.kinds = ("regular", "cos", "sin") * (HEADS // 3)
        self.decay = torch.linspace(0.7, 0.99, HEADS).to(device, dtype).requires_grad_()
        self.theta = torch.full((HEADS,), math.pi / 4).to(device, dtype).requires_grad_()
        self.gate = torch.tensor(0.3, device=device, dtype=dtype).requires_grad_()
        self.length = length

    def _differentiated(self, output: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        inputs = (self.value, self.decay, self.theta, *more)
        return (output, *torch.autograd.grad(output, inputs, self.grad))

    def rsa(self) -> Any:
        """P V of this package."""
        return self._differentiated(rem_product(self.value, self.kinds, self.decay, self.theta))

    def copy(self) -> Any:
        """The floor."""
        with torch.no_grad():
            return self.value.clone(), self.grad.clone()

    def sdpa(self) -> Any:
        """Fused softmax attention."""
        output = F.scaled_dot_product_attention(self.query, self.key, self.value, is_causal=True)
        return output, torch.autograd.grad(output, (self.query, self.key, self.value), self.grad)

    def layer(self) -> Any:
        """Fused softmax attention, mixed with P V."""
        output = F.scaled_dot_product_attention(self.query, self.key, self.value, is_causal=True)
        rems = Rems(self.kinds, self.decay, self.theta, (1,) * HEADS, 1, tuple(range(HEADS)))
        mask = AttentionMask(self.length, self.length, 0, True)
        mixed = solve(from_rems(self.value, rems, mask, output.transpose(1, 2), self.gate.expand(HEADS)))
        inputs = (self.query, self.key, self.value, self.decay, self.theta, self.gate)
        return mixed, torch.autograd.grad(mixed, inputs, self.grad.transpose(1, 2))

    def dense(self) -> Any:
        """P V through P."""
        return self._differentiated(self._matrix() @ self.value)

    def explicit(self) -> Any:
        """Paper eq. 4 with both matrices."""
        scores = self.query @ self.key.transpose(-1, -2) / math.sqrt(DIM)
        hidden = torch.ones(self.length, self.length, dtype=torch.bool, device=scores.device).triu(1)
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        mixed = (1 - self.gate) * weights + self.gate * self._matrix()
        return self._differentiated(mixed @ self.value, self.query, self.key, self.gate)

    def fft(self) -> Any:
        """P V through Fourier transforms."""
        return self._differentiated(self._convolve())

    def _matrix(self) -> Tensor:
        return rem_matrix(self.kinds, self.decay, self.theta, query_length=self.length)

    def _convolve(self) -> Tensor:
        n = 2 * self.length
        weights = rem_matrix(self.kinds, self.decay, self.theta, query_length=1, key_length=self.length)[:, 0].flip(-1)
        spectrum = torch.fft.rfft(weights, n=n)[:, :, None] * torch.fft.rfft(self.value, n=n, dim=2)
        return torch.fft.irfft(spectrum, n=n, dim=2)[:, :, : self.length]

    def error(self) -> float:
        """The largest relative error of P V and its gradients against float64 Fourier transforms."""
        exact = Problem(self.length, "cpu", torch.float64)
        for name in ("value", "grad", "decay", "theta"):
            getattr(exact, name).data = getattr(self, name).detach().double().cpu()
        pairs = zip(self.rsa(), exact.fft(), strict=True)
        return max(float((a.double().cpu() - b).detach().norm() / b.detach().norm()) for a, b in pairs)


def fits(arm: str, length: int, memory: float) -> bool:
    """Whether the arm's matrices, five of [B, H, T, T] at the most, stay within `memory` gigabytes."""
    if arm not in ("dense", "explicit"):
        return True
    return 5 * 4 * batch_of(length) * HEADS * length**2 <= memory * 1e9


def measure(length: int, arms: tuple[str, ...], options: argparse.Namespace) -> dict[str, Any]:
    problem = Problem(length, options.device)
    error = problem.error()
    if error > TOLERANCE:
        raise SystemExit(f"T = {length}: P V is off by {error:.1e}, more than {TOLERANCE:.0e}; nothing is reported.")
    calls = {arm: getattr(problem, arm) for arm in arms}
    times = interleaved(calls, options.rounds, torch.device(options.device), PATIENCE)
    memory = {arm: peak_memory(call) for arm, call in calls.items() if arm != "copy"}
    print(f"T = {length}: " + ", ".join(f"{arm} {times[arm]['median']:.2f} ms" for arm in arms), flush=True)
    return {"length": length, "batch": batch_of(length), "error": error, "times_ms": times, "memory_mb": memory}


def page(record: dict[str, Any]) -> list[str]:
    rows = []
    for row in record["rows"]:
        times, memory = row["times_ms"], row["memory_mb"]
        mine, layer = times["rsa"], ratio(times, "layer", "sdpa")
        rows.append(
            [
                f"{row['length']:,} × {row['batch']}",
                f"{mine['median']:.2f} [{mine['low']:.2f}–{mine['high']:.2f}]",
                _cell(ratio(times, "rsa", "copy"), ".1f"),
                _cell(ratio(times, "rsa", "sdpa"), ".3f"),
                _cell(None if layer is None else layer - 1, ".3f"),
                *(_cell(ratio(times, rival, "rsa"), ".1f") for rival in ("dense", "explicit", "fft")),
                *(_cell(memory.get(arm), ",.0f") for arm in ("rsa", "sdpa", "dense", "explicit")),
                f"{row['error']:.0e}",
            ]
        )
    ratios = ["× copy", "× sdpa", "a layer adds, × sdpa", "dense / RSA", "explicit / RSA", "fft / RSA"]
    return [
        "# P V, forward and backward",
        "",
        f"Made by `{record['command']}` on {on(record['machine'])}, commit {record['machine']['commit']}. {HEADS} "
        f"heads of {DIM}, float32, causal, a third of the heads "
        "regular; times and ratios (of neighbouring calls) are medians over "
        f"{record['rounds']} interleaved rounds (five at least, where a rival takes long), in brackets the quartiles. "
        "A layer is sdpa mixed with P V by eq. 4. Memory is what tensors take at the peak of a call. An empty cell "
        "was not run, for its time or memory.",
        "",
        *table(["T × batch", "RSA, ms", *ratios, "RSA, MB", "sdpa, MB", "dense, MB", "explicit, MB", "error"], rows),
    ]


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--budget", type=float, default=3.0, help="seconds that one call of a rival may take")
    parser.add_argument("--memory", type=float, default=6.0, help="gigabytes that a rival's matrices may take")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    slow: set[str] = set()
    for length in sorted(options.lengths):
        arms = tuple(arm for arm in ARMS if arm not in slow and fits(arm, length, options.memory))
        rows.append(measure(length, arms, options))
        # A rival that is past the budget now is left out of the longer lengths.
        slow |= {
            arm for arm in QUADRATIC if arm in arms and rows[-1]["times_ms"][arm]["median"] > 1000 * options.budget
        }
    lengths = " ".join(map(str, options.lengths))
    command = f"python scripts/bench_product.py --lengths {lengths} --rounds {options.rounds}"
    where = machine(torch.device(options.device))
    record = {"command": command, "machine": where, "rounds": options.rounds, "rows": rows}
    publish(options.output, "bench_product", record, page(record))


if __name__ == "__main__":
    main()
