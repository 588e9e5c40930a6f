"""Propositions 1, 2 and 4: a linear RNN and its heads have the same hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from experiments.runner.experiment import Experiment, Size
from experiments.runner.fit import fit
from experiments.runner.summary import Conclusion, Rows, Run, Settings, Values, Verdict
from experiments.theory.linear_rnn import LinearRNNHeads, init_from_linear_rnn, linear_rnn, linear_rnn_to_heads
from rsa_hf.config import RSAConfig
from rsa_hf.heads import RSAHeads
from rsa_hf.plots import COLOURS, panels

__all__ = ["EXPERIMENT"]

EXACT = 1e-9
INPUTS = 5
SHAPES: dict[Size, tuple[int, int, int]] = {"toy": (4, 40, 10), "quick": (16, 200, 100), "full": (16, 200, 500)}
ALLOWED = ("random", "trained", "singular")
REFUSED = ("defective", "unstable")


def make_grid(size: Size, seeds: int) -> list[Settings]:
    """Weights that heads can represent, undilated and dilated, and weights that they cannot."""
    n, length, steps = SHAPES[size]
    shape = {"n": n, "length": length, "training_steps": steps}
    return [
        {"weights": weights, "dilation": dilation, **shape, "seed": seed}
        for weights in (*ALLOWED, *REFUSED)
        for dilation in ((1, 4) if weights in ALLOWED else (1,))
        for seed in range(seeds)
    ]


def measure(settings: Settings) -> Values:
    """The largest difference between hidden states in float64, and that of a control that should differ."""
    length, dilation = settings["length"], settings["dilation"]
    generator = torch.Generator().manual_seed(settings["seed"])
    W_h, W_x = _weights(settings["weights"], settings["n"], dilation, settings["training_steps"], generator)
    if settings["weights"] in REFUSED:
        try:
            linear_rnn_to_heads(W_h, W_x, dilation)
        except ValueError:
            return {"refused": 1.0}
        return {"refused": 0.0}
    x = torch.randn(1, length, INPUTS, dtype=torch.float64, generator=generator)
    expected = linear_rnn(x, W_h, W_x, dilation)
    heads = linear_rnn_to_heads(W_h, W_x, dilation)
    found = heads.hidden_states(x)
    difference = float((found - expected).abs().max())
    # Control: an RNN that forgets 1 % faster.
    control = float((linear_rnn(x, 0.99 * W_h, W_x, dilation) - expected).abs().max())
    values: Values = {
        "largest difference": difference,
        "agrees to 1e-9": float(difference <= EXACT),
        "control difference": control,
        "heads": float(len(heads.kinds) + 1),
        "rates' difference in a layer": _difference_in_layer(heads, W_h),
    }
    if settings["seed"] == 0:
        values |= {"recurrent": expected[0, :, 0].tolist(), "from heads": found[0, :, 0].tolist()}
    return values


def _weights(kind: str, n: int, dilation: int, steps: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    W_h, W_x = normal(n, n), normal(n, INPUTS)
    W_h = 0.9 * W_h / torch.linalg.eigvals(W_h).abs().max()
    if kind == "trained":
        return _trained(W_h, W_x, normal(n, INPUTS) / n**0.5, dilation, steps, generator)
    if kind == "singular":
        values, vectors = torch.linalg.eigh(W_h + W_h.T)
        values[: n // 2] = 0
        return vectors * (0.9 * values / values.abs().max()) @ vectors.T, W_x
    if kind == "defective":
        return 0.5 * torch.eye(n, dtype=torch.float64) + torch.diag(torch.ones(n - 1, dtype=torch.float64), 1), W_x
    return W_h * 1.05 / 0.9 if kind == "unstable" else W_h, W_x


def _trained(
    W_h: Tensor, W_x: Tensor, readout: Tensor, dilation: int, steps: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Weights trained to repeat the input of three recurrence steps before."""
    W_h, W_x = W_h.clone().requires_grad_(), W_x.clone().requires_grad_()
    optimizer = torch.optim.Adam([W_h, W_x], lr=0.003)
    ago = 3 * dilation

    def loss(step: int) -> Tensor:
        x = torch.randn(8, 8 * ago, INPUTS, dtype=torch.float64, generator=generator)
        return (linear_rnn(x, W_h, W_x, dilation)[:, ago:] @ readout - x[:, :-ago]).square().mean()

    fit(loss, optimizer, steps)
    return W_h.detach(), W_x.detach()


def _difference_in_layer(heads: LinearRNNHeads, W_h: Tensor) -> float:
    """Largest difference between the spectrum and the rates of a float32 layer initialised from it."""
    layer = RSAHeads(RSAConfig(**heads.head_counts()).layer_plans([len(heads.kinds)])[0])  # type: ignore[arg-type]
    init_from_linear_rnn(layer, W_h, dilated=heads.dilation > 1)
    rates, pairs = layer.rates(), heads.kinds.count("cos")
    found = torch.cat([rates["lam"], rates["gamma"][:pairs], rates["gamma"][:pairs]])
    return float((found.detach() - heads.decay).abs().max())


def conclude(rows: Rows) -> Conclusion:
    """Confirmed if every RNN agrees with its heads and every RNN that heads cannot represent is refused."""
    (right, count), (refusals, asked) = (
        (round(sum(row.mean * row.seeds for row in each)), sum(row.seeds for row in each))
        for each in (rows.find("agrees to 1e-9"), rows.find("refused"))
    )
    largest = max(row.mean for row in rows.find("largest difference"))
    control = min(row.mean for row in rows.find("control difference"))
    sentence = (
        f"The hidden states of {right} of {count} linear RNNs (random, trained and singular, dilated and not) "
        f"agree with their heads' to 1e-9. The mean largest difference is at most {largest:.1e}; forgetting 1 % "
        f"faster makes {control:.1e}. {refusals} of {asked} defective or unstable RNNs were refused."
    )
    # With a small difference of the control the comparison would show nothing.
    valid = control > 1000 * EXACT
    verdict: Verdict = "confirmed" if (right, refusals) == (count, asked) and valid else "not confirmed"
    return Conclusion(verdict, f"{right} of {count} have the same hidden states, to {largest:.0e}", sentence)


def draw(runs: Sequence[Run], path: Path) -> None:
    """One hidden unit of a trained RNN, from the RNN and from its heads, and the differences of all runs."""
    shown = next(r.values for r in runs if r.settings["weights"] == "trained" and "recurrent" in r.values)
    measured = [run for run in runs if "largest difference" in run.values]
    kinds = [f"{run.settings['weights']}\nd = {run.settings['dilation']}" for run in measured]
    with panels(path, 2, columns=2) as [left, right]:
        left.plot(shown["recurrent"], color=COLOURS[0], linewidth=2.5, alpha=0.5, label="step by step")
        left.plot(shown["from heads"], "--", color=COLOURS[1], linewidth=1, label="from heads")
        left.set(title="a trained RNN", xlabel="step t", ylabel="state of hidden unit 0")
        left.legend()
        for name, label, colour in (
            ("control difference", "decay 1 % faster", COLOURS[2]),
            ("largest difference", "its heads", COLOURS[1]),
        ):
            right.semilogy(kinds, [run.values[name] for run in measured], ".", color=colour, label=label)
        right.axhline(EXACT, color="#666666", linewidth=0.8, label="limit of agreement")
        right.set(title="each RNN against", ylabel="largest difference of a hidden state")
        right.tick_params(axis="x", labelsize=7)
        right.legend()


EXPERIMENT = Experiment(
    name="linear-rnn",
    claim="A linear RNN with a basis of eigenvectors is a sum of r + 2s + 1 heads without queries and keys, exactly.",
    published="Propositions 1, 2 and 4: equality; no figure.",
    seeds={"toy": 2, "quick": 5, "full": 20},
    grid=make_grid,
    measure=measure,
    conclude=conclude,
    draw=draw,
)
