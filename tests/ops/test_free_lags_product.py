"""P V of REMs whose first weights are free, on every backend, held to two nested loops."""

import functools
import math

import pytest
import torch

from ops.agreement import values_and_gradients
from ops.mixed_product import device
from references import double_loop, lag_weight, relative_error, visible_keys
from rsa_hf import rem_matrix, rem_product

KINDS = ("regular", "cos", "sin", "cos", "sin", "cos")
DILATION = (1, 1, 1, 3, 2, 1)
# A rate of 0, so that nothing but the free lags is left; one near 1; angles of 0 and π.
DECAY = (-0.9, 0.0, 0.7, 0.5, 1 - 1e-6, 0.8)
THETA = (0.0, 1.0, 0.3, 2.0, math.pi, 0.0)
FREE_LAGS = ((1.0, 0.5, 0.0), (1.0, 0.0, -0.5), (0.0, 0.0, 0.0), (-2.0, 0.3, 1.0), (0.1, 0.2, 0.3), (0.0, 1.0, 0.0))


def draw(S, dtype):
    value = torch.randn(2, len(DECAY), S, 3, dtype=dtype, device=device())
    numbers = (torch.tensor(each, dtype=torch.float64, device=device()) for each in (DECAY, THETA, FREE_LAGS))
    return [tensor.requires_grad_() for tensor in (value, *numbers)]


def weight(described, rate, angle, step):
    """f at a step of one head, which is described by its kind and its free lags."""
    kind, free = described
    return free[step - 1] if step <= len(free) else lag_weight(kind, rate, angle, step)


BROKEN = {
    "one step late": lambda described, rate, angle, step: weight(described, rate, angle, step + 1),
    "backwards": lambda described, *others: weight((described[0], described[1].flip(0)), *others),
    "added to the paper's": lambda described, rate, *others: (
        lag_weight(described[0], rate, *others) + weight(("regular", described[1]), 0 * rate, *others)
    ),
}


# T, S, window, documents and direction; the kernels have chunks of 16.
CASES = [
    *((21, 21, None, (), causal) for causal in (True, False)),
    (18, 30, None, (), True),
    (5, 24, None, (), False),  # so few queries take another path
    *((24, 24, None, (3, 16, 17, 20), causal) for causal in (True, False)),
    (19, 19, 2, (), True),
    (19, 19, 9, (), False),
]


@pytest.mark.slow_unless(backend=["pytorch", "cpp"], T=[18, 5], window=[2])
@pytest.mark.parametrize(("T", "S", "window", "documents", "causal"), CASES)
def test_free_lags_agree_with_nested_loops(backend, T, S, window, documents, causal):
    tensors = draw(S, torch.float32 if backend == "triton" else torch.float64)
    key_mask = torch.ones(2, S, dtype=torch.bool, device=device())
    key_mask[1, S // 2] = False
    masks = {"causal": causal, "sliding_window": window, "key_mask": key_mask}
    if documents:
        ids = (torch.arange(S)[:, None] >= torch.tensor(documents)).sum(1)
        masks["documents"] = ids.expand(2, -1).to(device())
    visible = visible_keys(T, S, **masks)

    def product(value, decay, theta, free_lags):
        return rem_product(value, KINDS, decay, theta, DILATION, query_length=T, **masks, free_lags=free_lags)

    def loops(weight, value, decay, theta, free_lags):
        described, where = [*zip(KINDS, free_lags, strict=True)], {"causal": causal, "visible": visible}
        return double_loop(value, described, decay, theta, DILATION, weight=weight, query_length=T, **where)

    found = [each.cpu() for each in values_and_gradients(product, tensors)]
    exact = [tensor.detach().double().cpu().requires_grad_() for tensor in tensors]
    names = ("P V", "dV", "d decay", "d theta", "d free lags")
    expected = values_and_gradients(functools.partial(loops, weight), exact)
    errors = {name: relative_error(*pair) for name, *pair in zip(names, found, expected, strict=True)}
    assert max(errors.values()) < (1e-4 if backend == "triton" else 1e-9), errors
    P = rem_matrix(KINDS, *exact[1:3], DILATION, query_length=T, key_length=S, causal=causal, free_lags=exact[3])
    assert relative_error(torch.where(visible, P, 0) @ exact[0], expected[0]) < 1e-9
    for name, broken in BROKEN.items():
        with torch.no_grad():
            wrong = loops(broken, *exact)
        assert relative_error(found[0], wrong) > 1e-2, name


def test_one_token_gives_gradients_of_zero(backend):
    value, decay, theta, lags = draw(1, torch.float32)
    rem_product(value, KINDS, decay, theta, DILATION, free_lags=lags).sum().backward()
    assert all(each.grad is not None and not each.grad.any() for each in (decay, theta, lags))
