r"""Appendix B: data from a two-layer RNN that goes from linear to nonlinear, and three models fitted to it.

    z_t^(i) = α act(h_t^(i)) + (1 − α) h_t^(i),   h_t^(i) = W_h^(i) z_{t−1}^(i) + W_z^(i) z_t^(i−1) + b^(i),   i = 1, 2
    y_t = z_t^(2) + ε_t,   z_t^(0) = x_t,   all 2-dimensional, x and ε standard normal

The paper leaves the weights, the inputs of the fitted models and the learning rate open. Here W_h is a random matrix
of spectral norm `NORM`, which makes every α stable (the mixture never stretches a distance); W_z and b are standard
normal; the models see x_1 … x_t when they predict y_t, start from a state of 0, and end in a linear readout. All
replications are trained at once: N is how many there are, in front of every shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rsa_hf.ops import rem_product
from rsa_hf.rem import decay_rates

__all__ = ["ACTIVATIONS", "MODELS", "fit", "generate", "rsa", "two_layer_rnn"]

Parameters = dict[str, Tensor]
Model = Callable[[Tensor, Parameters], Tensor]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
}
SIZE = 2
NORM = 0.9
HEADS = ("regular", "cos", "sin")
LEARNING_RATE = 0.02
DROP = 1e-5  # of the training loss, a step; less ends the training (paper, appendix B)
PATIENCE = 200  # steps without a lower error on what is held out; so many more end early stopping
WINDOW = 20  # steps over which the drop is taken, Adam's losses being no straight line


def two_layer_rnn(x: Tensor, weights: Parameters, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """The states z^(2) of the second layer, from states of 0.

    Both layers are taken in one step, the second one step behind the first, as an RNN of twice the size.

    Args:
        x: [N, T, 2].
        weights: `W_h` and `W_z`, [N, 2, 2, 2], and `b`, [N, 2, 2], of layer 1 and layer 2.
        activation: what h becomes; gets [N, 1, 4].

    Returns:
        [N, T, 2].
    """
    N, T, n = x.shape
    W_h, W_z, b = weights["W_h"], weights["W_z"], weights["b"]
    lower = torch.cat([W_z[:, 1], W_h[:, 1]], dim=2)
    upper = torch.cat([W_h[:, 0], torch.zeros_like(W_h[:, 0])], dim=2)
    both = torch.cat([upper, lower], dim=1).transpose(1, 2)
    first = x @ W_z[:, 0].transpose(1, 2) + b[:, None, 0]
    first = torch.cat([first, first.new_zeros(N, 1, n)], dim=1)
    driven = torch.cat([first, b[:, None, 1].expand(N, T + 1, n)], dim=2)
    behind = torch.cat([x.new_ones(n), x.new_zeros(n)])  # layer 2 has no step yet when layer 1 has one
    state = activation(driven[:, :1]) * behind
    states = []
    for step in driven.unbind(1)[1:]:
        state = activation(torch.baddbmm(step[:, None], state, both))
        states.append(state)
    return torch.cat(states, dim=1)[..., n:]


def generate(activation: str, alphas: Sequence[float], segments: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """One sequence for each α, of the same weights, inputs and errors, cut into segments.

    Returns:
        x and y, each [len(alphas), segments, length, 2].
    """
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
    """Two RSA layers (paper, eq. 4) of one regular, one cos and one sin head, 2-dimensional, masked.

    As in proposition 2 a head's value matrix goes from input to output, and the head whose P is the identity is a
    linear map beside the others. There is no feed-forward part: softmax is the only nonlinearity.

    Args:
        x: [N, T, 2].
        p: `query`, `key`, `value`, [N, 2, 3, 2, 2]; `identity`, [N, 2, 2, 2]; `b`, [N, 2, 2]; `mu`, `eta`, `nu`,
            `theta`, [N, 2].

    Returns:
        [N, T, 2].
    """
    N, T, n = x.shape
    kinds = HEADS * N
    lam, gamma = decay_rates(p["eta"], p["nu"])
    for i in range(2):
        query, key, value = (torch.einsum("ntm,nhkm->nhtk", x, p[name][:, i]) for name in ("query", "key", "value"))
        attention = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        decay = torch.stack([lam[:, i], gamma[:, i], gamma[:, i]], dim=1)
        theta = p["theta"][:, i, None].expand(N, len(HEADS))
        # A REM has one rate a head: the heads of all replications are the heads of one product.
        recurrence = rem_product(value.reshape(1, -1, T, n), kinds, decay.flatten(), theta.flatten())
        g = torch.sigmoid(p["mu"][:, i, None, None])
        mixed = (1 - g) * attention.sum(1) + g * recurrence.view(N, len(HEADS), T, n).sum(1)
        x = mixed + x @ p["identity"][:, i].transpose(1, 2) + p["b"][:, None, i]
    return x


def _rnn_model(activation: Callable[[Tensor], Tensor]) -> Model:
    return lambda x, p: _read_out(two_layer_rnn(x, p, activation), p)


def _read_out(z: Tensor, p: Parameters) -> Tensor:
    return z @ p["out"].transpose(1, 2) + p["out_b"][:, None]


MODELS: dict[str, Callable[[str], Model]] = {
    "linear": lambda activation: _rnn_model(lambda h: h),
    "nonlinear": lambda activation: _rnn_model(ACTIVATIONS[activation]),
    "rsa": lambda activation: lambda x, p: _read_out(rsa(x, p), p),
}


def _start(name: str, N: int, generator: torch.Generator) -> Parameters:
    """Parameters to start from: weights uniform within ±1/√2, as torch's own RNN has them; rates as RSAHeads has them.

    An RNN of size 2 may be unstable with those, and a linear one then does not come back: W_h of more than `NORM` is
    scaled down to that. The gates start at σ(2) = 0.88: near the linear RNN that attention is to correct.
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


def fit(
    name: str, activation: str, x: Tensor, y: Tensor, *, most_steps: int, held_out: int = 0, seed: int = 0
) -> Tensor:
    """Fit one model to each segment without its last step, by Adam, and predict that step.

    With nothing held out, the training of a segment ends when its loss falls by less than `DROP` a step, taken over
    `WINDOW` steps, as the paper has it; where it has risen, the prediction is that of `WINDOW` steps before, since one
    step may lead to an RNN that is unstable. Else the observations before the last one are not trained on: the
    prediction is taken where their error is lowest, and training ends `PATIENCE` steps behind it (early stopping).

    Args:
        name: one of `MODELS`.
        activation: of the nonlinear RNN.
        x: [N, T, 2].
        y: [N, T, 2].
        most_steps: end there at the latest.
        held_out: how many observations before the last one are held out.
        seed: of the parameters to start from.

    Returns:
        The squared error of the prediction of y_T, its mean over the two dimensions, shape [N].
    """
    N, T, _ = x.shape
    trained = T - 1 - held_out
    model = MODELS[name](activation)
    p = {part: start.requires_grad_() for part, start in _start(name, N, torch.Generator().manual_seed(seed)).items()}
    optimizer = torch.optim.Adam(p.values(), lr=LEARNING_RATE)
    errors = x.new_full((N,), math.nan)
    running = torch.arange(N)
    best, since, before = x.new_full((N,), math.inf), torch.zeros(N), errors
    for step in range(most_steps + 1):
        # What is not trained on sees the others and is not seen by them, so that one pass serves both.
        squared = (model(x, p) - y).square().mean(2)
        loss, last = squared[:, :trained].mean(1), squared[:, -1].detach()
        ended = torch.full_like(running, step == most_steps, dtype=torch.bool)
        if held_out:
            now = squared[:, trained:-1].mean(1).detach()
            better = now < best
            errors[running] = torch.where(better, last, errors[running])
            best, since = torch.where(better, now, best), torch.where(better, 0, since + 1)
            ended |= since >= PATIENCE
        elif step % WINDOW == 0 or step == most_steps:
            now = loss.detach()
            ended |= ~(best - now >= DROP * WINDOW)  # also where it is NaN
            errors[running[ended]] = torch.where(now < best, last, before)[ended]
            best, before = now, last
        optimizer.zero_grad()
        loss.sum().backward()
        optimizer.step()
        if bool(ended.any()):
            left = ~ended
            if not bool(left.any()):
                break
            running, best, since, before = running[left], best[left], since[left], before[left]
            x, y = x[left], y[left]
            p = _continue_with(left, p, optimizer)
    return errors


def _continue_with(left: Tensor, p: Parameters, optimizer: torch.optim.Adam) -> Parameters:
    """The parameters and moments of the replications that train on: most end long before the last one."""
    kept = {}
    for name, tensor in p.items():
        state = optimizer.state.pop(tensor)
        kept[name] = tensor.detach()[left].requires_grad_()
        optimizer.state[kept[name]] = {key: value[left] if value.dim() else value for key, value in state.items()}
    optimizer.param_groups[0]["params"] = list(kept.values())
    return kept
