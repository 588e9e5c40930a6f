"""Appendix B: the data against its equations step by step, RSA against the dense P, and a broken REM that loses."""

import math

import pytest
import torch

from experiments import synthetic
from experiments.runner.summary import Row, Rows
from experiments.synthetic import ACTIVATIONS, HEADS, conclude, generate, predict_last, rsa, two_layer_rnn
from rsa_hf import rem_matrix, rem_product


def double(p):
    return {name: value.double() for name, value in p.items()}


def start(name, N):
    return double(synthetic._start(name, N, torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_two_layers_step_by_step(activation):
    act, alpha = ACTIVATIONS[activation], 0.3
    p, x = start("linear", 3), torch.randn(3, 7, 2, dtype=torch.float64)
    found = two_layer_rnn(x, p, lambda h: alpha * act(h) + (1 - alpha) * h)
    for n in range(3):
        z = torch.zeros(2, 2, dtype=torch.float64)
        for t in range(7):
            below = x[n, t]
            for i in range(2):
                h = p["W_h"][n, i] @ z[i] + p["W_z"][n, i] @ below + p["b"][n, i]
                below = z[i] = alpha * act(h) + (1 - alpha) * h
            torch.testing.assert_close(found[n, t], z[1], atol=1e-12, rtol=0)


def test_rsa_is_equation_4_with_the_dense_p():
    p, x = start("rsa", 3), torch.randn(3, 9, 2, dtype=torch.float64)
    p["eta"][1], p["nu"][1], p["theta"][2] = -0.4, 0.3, 1.1  # replications have rates of their own
    found = rsa(x, p)
    for n in range(3):
        z = x[n]
        for i in range(2):
            lam, gamma, theta = torch.tanh(p["eta"][n, i]), torch.sigmoid(p["nu"][n, i]), p["theta"][n, i]
            P = rem_matrix(HEADS, torch.stack([lam, gamma, gamma]), theta.expand(3), query_length=9)
            out = z @ p["identity"][n, i].T + p["b"][n, i]
            for h in range(3):
                query, key, value = (z @ p[name][n, i, h].T for name in ("query", "key", "value"))
                scores = (query @ key.T / math.sqrt(2)).masked_fill(torch.ones(9, 9).triu(1).bool(), -math.inf)
                g = torch.sigmoid(p["mu"][n, i])
                out = out + ((1 - g) * scores.softmax(-1) + g * P[h]) @ value
            z = out
        torch.testing.assert_close(found[n], z, atol=1e-10, rtol=0)


@pytest.mark.parametrize("held_out", [0, 5])
def test_steps_that_led_to_an_unstable_rnn_are_taken_back(held_out, monkeypatch):
    x, y = (part.flatten(0, 1) for part in generate("tanh", (0.5,), 4, 30, seed=0))
    untrained = predict_last("linear", "tanh", x, y, most_steps=0, held_out=held_out)
    monkeypatch.setattr(synthetic, "LEARNING_RATE", 10.0)
    assert torch.equal(predict_last("linear", "tanh", x, y, most_steps=100, held_out=held_out), untrained)


def ahead(value, *plan):
    """P shifted by one, so that the latest input is seen and the lags are wrong."""
    return rem_product(value, *plan).roll(1, dims=2)


def test_a_broken_rem_loses(monkeypatch):
    x, y = (part.flatten(0, 1) for part in generate("tanh", (0.0,), 30, 60, seed=3))
    right = predict_last("rsa", "tanh", x, y, most_steps=60, held_out=10).mean()
    monkeypatch.setattr(synthetic, "rem_product", ahead)
    assert predict_last("rsa", "tanh", x, y, most_steps=60, held_out=10).mean() > 1.1 * right


@pytest.mark.parametrize(
    ("mean", "half", "verdict"),
    [(0.8, 0.1, "confirmed"), (1.2, 0.1, "not confirmed"), (0.9, 0.2, "not measurable at this size")],
)
def test_the_verdict_follows_the_paper_s_rule(mean, half, verdict):
    def row(rule, activation, mean, half, length=100):
        settings = {"observations": length, "rule": rule, "activation": activation, "alpha": 0.7, "most_steps": 9}
        return Row(settings, "rsa / linear", mean, mean - half, mean + half, 5)

    rows = Rows([row("loss", "tanh", mean, half), row("loss", "relu", 0.8, 0.1), row("early", "tanh", 0.5, 0.01)])
    longer = Rows([*rows, row("loss", "tanh", 1.3, 0.1, length=300)])
    assert conclude(rows).verdict == conclude(longer).verdict == verdict
