"""The explicit matrices P, entry by entry."""

import math

import pytest
import torch

from rsa_hf import rem_matrix
from rsa_hf.rem import decay_rates


def test_the_six_rems_have_the_entries_of_the_paper():
    lam, gamma, theta = -0.7, 0.8, 0.6
    kinds = ["regular", "cos", "sin"] * 2
    decay, angles = torch.tensor([[lam, gamma, gamma] * 2, [0.0, theta, theta] * 2], dtype=torch.float64)
    P = rem_matrix(kinds, decay, angles, [1, 1, 1, 2, 3, 3], query_length=7)
    assert P.shape == (6, 7, 7)
    assert P[0, 5, 2].item() == pytest.approx(lam**3)
    assert P[1, 5, 2].item() == pytest.approx(gamma**3 * math.cos(3 * theta))
    assert P[2, 5, 2].item() == pytest.approx(gamma**3 * math.sin(3 * theta))
    assert P[3, 6, 2].item() == pytest.approx(lam**2)
    assert P[3, 5, 2].item() == 0
    assert P[4, 6, 0].item() == pytest.approx(gamma**2 * math.cos(2 * theta))
    assert P[5, 4, 1].item() == pytest.approx(gamma * math.sin(theta))


def test_queries_are_the_last_positions_unless_an_offset_is_given():
    whole = rem_matrix("cos", 0.9, 0.5, query_length=12)
    torch.testing.assert_close(rem_matrix("cos", 0.9, 0.5, query_length=5, key_length=12), whole[:, 7:])
    early = rem_matrix("cos", 0.9, 0.5, query_length=5, key_length=12, query_offset=2)
    torch.testing.assert_close(early, whole[:, 2:7])


def test_gradients_are_those_of_finite_differences():
    parameters = torch.tensor([[0.0, -1.3], [1.2, 0.1], [0.3, 0.9]], dtype=torch.float64)

    def matrices(eta, nu, theta):
        lam, gamma = decay_rates(eta, nu)
        decay, angles = torch.cat([lam, gamma, gamma]), torch.cat([torch.zeros_like(theta), theta, theta])
        kinds = ["regular"] * 2 + ["cos"] * 2 + ["sin"] * 2
        return rem_matrix(kinds, decay, angles, [1, 2, 1, 3, 1, 2], query_length=6)

    assert torch.autograd.gradcheck(matrices, [parameter.requires_grad_() for parameter in parameters.unbind()])


def test_a_decay_of_zero_has_second_derivatives_in_float32(monkeypatch):
    monkeypatch.setattr("rsa_hf.rem.widest_dtype", lambda device: torch.float32)  # as on Apple's GPUs

    def total(decay):  # 3 λ + 2 λ² + λ³
        return rem_matrix("regular", decay, query_length=4).sum()

    assert torch.autograd.functional.hessian(total, torch.zeros(1)).item() == 4
