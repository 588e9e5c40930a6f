"""What is particular to the Triton kernels, interpreted, or on a GPU if there is one."""

import pytest
import torch

import ops.kernels_under_test  # noqa: F401  (skips without Triton)
from ops.mixed_product import KINDS, agreement, assert_agrees, device, draw
from references import relative_error
from rsa_hf import rem_product
from rsa_hf.ops.reference import dense_rem_product
from rsa_hf.ops.triton import launch

pytestmark = [pytest.mark.usefixtures("backend"), pytest.mark.parametrize("backend", ["triton"], indirect=True)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_documents_agree_with_dense_p(monkeypatch, causal, packed):
    S, T = 60, 50
    monkeypatch.setattr(launch, "_splits", lambda *sizes: 4)
    documents = None
    if packed:
        documents = torch.zeros(1, S, dtype=torch.long)
        documents[:, 40:] = 1
    assert_agrees(agreement(draw(T, S, heads=2, plain=0), KINDS[1:], (1, 2), causal=causal, documents=documents))
    if packed:
        return
    # The control: without the states passed between documents, values and gradients are wrong.
    monkeypatch.setattr(
        launch._Launch, "_written", lambda self, *x, **y: torch.zeros(self.programs, 2, 4, 32, device=device())
    )
    broken = agreement(draw(T, S, heads=1, plain=0), KINDS[1:2], (1,), causal=causal)
    assert min(broken[name] for name in ("output", "dvalue", "ddecay", "dgate")) > 1e-4, broken


# Shorter and longer than a chunk of 16 steps, for one dilation or for both; some with packed documents.
WINDOWS = [(1, False), (9, True), (21, False), (37, True), (39, False)]
FAST = [(True, 39, False), (False, 9, True)]  # the others take ten seconds each


@pytest.mark.parametrize(
    ("causal", "window", "packed"),
    [
        pytest.param(causal, *window, marks=[] if (causal, *window) in FAST else pytest.mark.slow)
        for causal in (True, False)
        for window in WINDOWS
    ],
)
def test_windows_agree_with_dense_p(monkeypatch, causal, window, packed):
    S, T = 67, 60
    monkeypatch.setattr(launch, "_splits", lambda *sizes: 4)
    documents, key_mask = None, torch.ones(1, S, dtype=torch.bool)
    if packed:
        documents = (torch.arange(S)[:, None] >= torch.tensor([3, 20])).sum(1)[None]
        key_mask[0, [1, 25, 26]] = False
    where = {"causal": causal, "documents": documents, "key_mask": key_mask, "offset": 7 if causal else 5}
    tensors = draw(T, S, heads=2, plain=0)
    assert_agrees(agreement(tensors, KINDS[1:], (1, 2), window=window, **where))
    if packed:
        return
    # The control: a window of one step more gives other values and gradients.
    farthest = launch._farthest
    monkeypatch.setattr(launch, "_farthest", lambda mask: farthest(mask) + 1)
    broken = agreement(tensors, KINDS[1:], (1, 2), window=window, **where)
    assert min(broken[name] for name in ("output", "dvalue", "ddecay", "dgate")) > 1e-4, broken


def test_half_precision_loses_no_digits_of_the_weights():
    # The kernels keep a weight as the sum of two 16-bit numbers.
    value, decay, theta, *_ = draw(33, dtype=torch.bfloat16)
    found = rem_product(value, KINDS, decay, theta)
    exact_value, exact_decay, exact_theta = (tensor.double().cpu() for tensor in (value, decay, theta))
    exact = dense_rem_product(exact_value, KINDS, exact_decay, exact_theta, (1, 1, 1))
    assert found.dtype == torch.float32
    assert relative_error(found.cpu(), exact) < 2e-5
