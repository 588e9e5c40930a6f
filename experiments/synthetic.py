r"""Appendix B and figure 6: data from a two-layer RNN between linear and nonlinear, and three models fitted to it.

    z_t^(i) = α act(h_t^(i)) + (1 − α) h_t^(i),   h_t^(i) = W_h^(i) z_{t−1}^(i) + W_z^(i) z_t^(i−1) + b^(i),   i = 1, 2
    y_t = z_t^(2) + ε_t,   z_t^(0) = x_t,   all 2-dimensional, x and ε standard normal

The paper does not specify the weights, the inputs of the fitted models and the learning rate. Here W_h is a random
matrix of spectral norm `NORM`, which is stable for every α (the mixture never increases a distance); W_z and b are
standard normal; the models see x_1 … x_t to predict y_t, start from state 0, and end in a linear readout. All N
replications are trained at once; N is the first dimension of every shape.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from experiments.runner.experiment import Experiment, Size, combinations
from experiments.runner.fit import default_device, fit
from experiments.runner.panels import COLOURS, panels
from experiments.runner.summary import Conclusion, Rows, Run, Settings, Values, summarise, worst_if_nan
from rsa_hf import rem_product
from rsa_hf.rem import decay_rates

Parameters = dict[str, Tensor]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "sigmoid": torch.sigmoid, "relu": torch.relu}
SIZE = 2
NORM = 0.9
HEADS = ("regular", "cos", "sin")
LEARNING_RATE = 0.02
DROP = 1e-5  # training ends when the loss falls by less per step (paper, appendix B)
PATIENCE = 200  # early stopping ends after so many steps without a lower held-out error
WINDOW = 20  # steps over which the drop is averaged, since Adam's loss is not monotonic


def two_layer_rnn(x: Tensor, weights: Parameters, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """The states z^(2) [N, T, 2] of the second layer, from initial states of 0, for x [N, T, 2].

    The weights are `W_h` and `W_z`, [N, 2, 2, 2], and `b`, [N, 2, 2], of layer 1 and layer 2.
    """
    W_h, W_z, b = weights["W_h"], weights["W_z"], weights["b"]
    z = x
    for i in range(2):
        driven = z @ W_z[:, i].transpose(1, 2) + b[:, None, i]
        state, states = torch.zeros_like(x[:, :1]), []
        for step in driven.unbind(1):
            state = activation(torch.baddbmm(step[:, None], state, W_h[:, i].transpose(1, 2)))
            states.append(state)
        z = torch.cat(states, dim=1)
    return z


def generate(activation: str, alphas: Sequence[float], segments: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """A sequence for each α, with the same weights, inputs and errors: x and y [α, segments, length, 2]."""
    generator = torch.Generator().manual_seed(seed)
    count, total = len(alphas), segments * length

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    W_h, W_z, b = normal(2, SIZE, SIZE), normal(2, SIZE, SIZE), normal(2, SIZE)
    W_h = NORM * W_h / torch.linalg.matrix_norm(W_h, ord=2)[:, None, None]
    weights = {name: value.expand(count, *value.shape) for name, value in (("W_h", W_h), ("W_z", W_z), ("b", b))}
    x, errors = normal(total, SIZE), normal(total, SIZE)
    act, alpha = ACTIVATIONS[activation], torch.tensor(alphas, dtype=torch.float64)[:, None, None]
    z = two_layer_rnn(x.expand(count, total, SIZE), weights, lambda h: alpha * act(h) + (1 - alpha) * h)
    shape = (count, segments, length, SIZE)
    return x.expand(count, total, SIZE).reshape(shape).float(), (z + errors).reshape(shape).float()


def rsa(x: Tensor, p: Parameters) -> Tensor:
    """Two RSA layers (paper, eq. 4) of one regular, one cos and one sin head, masked, from x [N, T, 2] to [N, T, 2].

    As in proposition 2, a head's value matrix maps input to output, and the head whose P is the identity is a linear
    map. There is no feed-forward part: softmax is the only nonlinearity. `_start` has the shapes of p.
    """
    N, T, n = x.shape
    kinds = HEADS * N
    lam, gamma = decay_rates(p["eta"], p["nu"])
    for i in range(2):
        query, key, value = (torch.einsum("ntm,nhkm->nhtk", x, p[name][:, i]) for name in ("query", "key", "value"))
        attention = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        decay = torch.stack([lam[:, i], gamma[:, i], gamma[:, i]], dim=1)
        theta = p["theta"][:, i, None].expand(N, len(HEADS))
        # Rates are per head, so the heads of all replications become the heads of one product.
        recurrence = rem_product(value.reshape(1, -1, T, n), kinds, decay.flatten(), theta.flatten())
        g = torch.sigmoid(p["mu"][:, i, None, None])
        mixed = (1 - g) * attention.sum(1) + g * recurrence.view(N, len(HEADS), T, n).sum(1)
        x = mixed + x @ p["identity"][:, i].transpose(1, 2) + p["b"][:, None, i]
    return x


MODELS = ("linear", "nonlinear", "rsa")


def _predict(name: str, activation: str, x: Tensor, p: Parameters) -> Tensor:
    """The prediction of y by one of `MODELS`."""
    act = ACTIVATIONS[activation] if name == "nonlinear" else lambda h: h
    z = rsa(x, p) if name == "rsa" else two_layer_rnn(x, p, act)
    return z @ p["out"].transpose(1, 2) + p["out_b"][:, None]


def _start(name: str, N: int, generator: torch.Generator) -> Parameters:
    """Initial parameters: weights uniform in ±1/√2, as in torch's RNN.

    An RNN of size 2 may be unstable with those, and a linear one does not recover, so W_h is scaled down to norm
    `NORM`. Gates start at σ(2) = 0.88: near the linear RNN, which attention has to correct.
    """

    def uniform(*shape: int) -> Tensor:
        bound = 1 / math.sqrt(SIZE)
        return (2 * torch.rand(N, *shape, generator=generator) - 1) * bound

    p = {"out": uniform(SIZE, SIZE), "out_b": torch.zeros(N, SIZE), "b": uniform(2, SIZE)}
    if name != "rsa":
        W_h, W_z = uniform(2, SIZE, SIZE), uniform(2, SIZE, SIZE)
        norm = torch.linalg.matrix_norm(W_h, ord=2, keepdim=True)
        return p | {"W_h": W_h / (norm / NORM).clamp(min=1), "W_z": W_z}
    heads = {part: uniform(2, len(HEADS), SIZE, SIZE) for part in ("query", "key", "value")}
    starts = {"mu": 2.0, "eta": 1.0, "nu": 1.0, "theta": math.pi / 4}
    rates = {part: torch.full((N, 2), start) for part, start in starts.items()}
    return p | heads | rates | {"identity": uniform(2, SIZE, SIZE)}


def predict_last(
    name: str, activation: str, x: Tensor, y: Tensor, *, most_steps: int, held_out: int = 0, seed: int = 0
) -> Tensor:
    """Fit one of `MODELS` to x and y [N, T, 2] without their last step, by Adam; its squared error at y_T, [N].

    With nothing held out, training of a segment ends when its loss falls by less than `DROP` per step, averaged over
    `WINDOW` steps, as in the paper; if the loss has risen, the prediction of `WINDOW` steps before is used, since one
    step may lead to an unstable RNN. Otherwise the last observations before the prediction are not trained on: the
    prediction is taken where their error is lowest, and training ends `PATIENCE` steps later (early stopping).
    """
    N, T, _ = x.shape
    trained = T - 1 - held_out
    starts = _start(name, N, torch.Generator().manual_seed(seed))
    p = {part: start.to(x.device).requires_grad_() for part, start in starts.items()}
    optimizer = torch.optim.Adam(p.values(), lr=LEARNING_RATE)
    errors, best, since = x.new_full((N,), math.nan), x.new_full((N,), math.inf), x.new_zeros(N)
    before, training = errors.clone(), torch.ones(N, dtype=torch.bool, device=x.device)

    def loss(step: int) -> Tensor:
        nonlocal best, since, before, training
        is_last = step == most_steps + 1
        # Steps that are not trained on see the others and are not seen by them, so one pass serves both.
        squared = (_predict(name, activation, x, p) - y).square().mean(2)
        losses, last = squared[:, :trained].mean(1), squared[:, -1].detach()
        if held_out:
            now = squared[:, trained:-1].mean(1).detach()
            better = training & (now < best)
            errors[better] = last[better]
            best, since = torch.where(better, now, best), torch.where(better, 0, since + 1)
            training = since < PATIENCE
        elif (step - 1) % WINDOW == 0 or is_last:
            now = losses.detach()
            falls = (best - now >= DROP * WINDOW) & (not is_last)  # not where it is NaN
            ends = training & ~falls
            errors[ends] = torch.where(now < best, last, before)[ends]
            best, before, training = now, last, training & falls
        return losses.sum()

    # Replications that have ended are trained on, and not looked at.
    fit(loss, optimizer, most_steps + 1, after_step=lambda *_: not bool(training.any()))
    return errors


# --- the experiment ------------------------------------------------------------

PUBLISHED_LENGTH = 100
# The share of observations held out by the paper's stopping rule, and by early stopping, which a model of RSA's size
# needs with 99 observations.
RULES = {"loss": 0.0, "early": 0.1}
# Observations, with the last one that is predicted; α; number of segments with so many observations.
DATA: dict[Size, list[tuple[int, tuple[float, ...], int]]] = {
    "toy": [(PUBLISHED_LENGTH, (0.0, 1.0), 3)],
    "quick": [(PUBLISHED_LENGTH, (0.0, 0.7, 1.0), 12)],
    "full": [(PUBLISHED_LENGTH, tuple(i / 10 for i in range(11)), 100), (300, (0.8, 1.0), 20)],
}
STEPS: dict[Size, int] = {"toy": 10, "quick": 150, "full": 2000}
NONLINEAR = 0.6  # for larger α the paper reports RSA better than the linear RNN


def make_grid(size: Size, seeds: int) -> list[Settings]:
    """Observations × seeds × activations × stopping rules; one run fits all α."""
    activations = ["tanh"] if size == "toy" else ACTIVATIONS
    return [
        {"observations": observations, "segments": segments, "most_steps": STEPS[size], "size": size, **each}
        for observations, _, segments in DATA[size]
        for each in combinations(seed=range(seeds), activation=activations, rule=RULES)
    ]


def measure(settings: Settings) -> Values:
    """The MSPE of each model, a list over α."""
    activation, segments, seed = settings["activation"], settings["segments"], settings["seed"]
    length = settings["observations"]
    [alphas] = [alphas for observations, alphas, _ in DATA[settings["size"]] if observations == length]
    held_out = round(RULES[settings["rule"]] * length)
    data = generate(activation, alphas, segments, length, seed)
    x, y = (part.flatten(0, 1).to(default_device()) for part in data)
    values: Values = {"alpha": list(alphas)}
    for name in MODELS:
        errors = predict_last(name, activation, x, y, most_steps=settings["most_steps"], held_out=held_out, seed=seed)
        values[name] = errors.view(len(alphas), segments).mean(1).tolist()
    return values


def summarise_ratios(runs: Sequence[Run]) -> Rows:
    """Mean ratios of MSPEs at each α, paired by seed."""
    by_alpha = []
    for run in runs:
        for alpha, *errors in zip(*(run.values[name] for name in ("alpha", *MODELS)), strict=True):
            linear, nonlinear, rsa = errors
            values: Values = {
                "linear / nonlinear": linear / nonlinear,
                "rsa / nonlinear": rsa / nonlinear,
                "rsa / linear": worst_if_nan(rsa) / linear,
                "mspe nonlinear": nonlinear,
            }
            by_alpha.append(replace(run, settings={**run.settings, "alpha": alpha}, values=values))
    return summarise(by_alpha)


def conclude(rows: Rows) -> Conclusion:
    """Confirmed if RSA beats the linear RNN at every α above 0.6 and activation, under the paper's stopping rule."""
    findings, answers, counts, verdicts = [], [], [], []
    nonlinear = Rows(row for row in rows.find("rsa / linear") if row.settings["alpha"] > NONLINEAR)
    for rule, name in (("loss", "the paper's stopping rule"), ("early", "early stopping")):
        for length, ratios in nonlinear.by("rule")[rule].by("observations").items():
            result = f"RSA's MSPE is {ratios.span('.2f')} times the linear RNN's"
            steps = ratios[0].settings["most_steps"]
            findings.append(
                f"{length} observations, {name} (at most {steps} steps): {result}; {_better_and_worse(ratios)}"
            )
            if length == PUBLISHED_LENGTH:
                answers.append(f"{result} with {name}")
                counts.append(f"{_better_and_worse(ratios)} with {name}")
                verdicts.append(ratios.judge(1))
    sentence = f"Relative to the linear RNN at α > {NONLINEAR}, RSA predicts {', and '.join(counts)}."
    return Conclusion(verdicts[0], "; ".join(answers), sentence, tuple(findings))


def _better_and_worse(ratios: Rows) -> str:
    better, worse = ratios.below(1), ratios.negated().below(-1)
    return f"significantly better in {better} and worse in {worse} of {len(ratios)} cases"


def draw(runs: Sequence[Run], path: Path) -> None:
    """The paper's figure 6: a panel for each number of observations, stopping rule and activation."""
    rows = summarise_ratios(runs)
    activations = dict.fromkeys(row.settings["activation"] for row in rows)
    lengths = dict.fromkeys(row.settings["observations"] for row in rows)
    groups = combinations(observations=lengths, rule=RULES, activation=activations)
    with panels(path, len(groups), columns=len(activations)) as grid:
        for axes, group in zip(grid, groups, strict=True):
            for name, colour in (("linear / nonlinear", COLOURS[0]), ("rsa / nonlinear", COLOURS[1])):
                found = rows.find(name, **group)
                alpha, means = [row.settings["alpha"] for row in found], [row.mean for row in found]
                axes.errorbar(alpha, means, yerr=found.error_bars(), fmt="o-", capsize=3, color=colour, label=name)
            axes.axhline(1, color="#666666", linewidth=0.8)
            rule = "stopping by loss" if group["rule"] == "loss" else "early stopping"
            title = f"{group['activation']}, {group['observations']} observations\n{rule}"
            axes.set(title=title, xlabel=f"α\nmean and 95 % interval, {found[0].seeds} seeds", ylabel="MSPE ratio")
        grid[0].legend()


EXPERIMENT = Experiment(
    name="synthetic",
    claim="For α > 0.6, RSA predicts better than a linear RNN, with tanh, sigmoid and ReLU.",
    published="Appendix B, figure 6: curves without figures; RSA's ratio is below the linear RNN's for α > 0.6.",
    remark="The errors ε have variance 1 in each dimension, so no model can have an MSPE below 1 except by chance. "
    "RSA has several times the RNNs' parameters for 99 observations: trained to the end it learns the errors too, "
    "which early stopping avoids in part. Runs with more observations, at two values of α, tell how much of its error "
    "is due to that; they are not part of the verdict.",
    seeds={"toy": 2, "quick": 3, "full": 10},
    grid=make_grid,
    measure=measure,
    summarise=summarise_ratios,
    conclude=conclude,
    draw=draw,
    parts=("activation",),
    revision=3,
)
