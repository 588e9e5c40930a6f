"""The backend of P V: chosen by the user or automatically, and the messages where Triton cannot be used."""

from types import SimpleNamespace

import pytest
import torch

from rsa_hf import rem_product
from rsa_hf.ops import autograd, triton
from rsa_hf.ops.cpp.build import library
from rsa_hf.ops.mask import AttentionMask
from rsa_hf.ops.problem import from_rems
from rsa_hf.rem import Rems

HEADS = ("regular", "cos")


@pytest.fixture(autouse=True)
def fresh_choice(monkeypatch):
    """Start without a chosen backend, and with empty caches."""
    monkeypatch.setattr("rsa_hf.ops.autograd.REQUESTED", "")
    remembered = (triton._obstacle_of_device, autograd._warn_once)
    for function in remembered:
        function.cache_clear()
    yield
    for function in remembered:
        function.cache_clear()


def problem(value=None, *mixed):
    value = torch.randn(1, 2, 20, 16) if value is None else value
    rems = Rems(HEADS, torch.tensor([0.9, 0.8]), torch.ones(2), (1, 1), 1, (0, 1))
    return from_rems(value, rems, AttentionMask(20, 20, 0, True), *mixed)


@pytest.mark.filterwarnings("error")
def test_a_cpu_uses_cpp_if_it_can_without_a_warning():
    assert autograd.choose_backend(problem()) == ("pytorch" if isinstance(library(), str) else "cpp")


def test_an_unknown_backend_is_an_error(monkeypatch):
    monkeypatch.setattr("rsa_hf.ops.autograd.REQUESTED", "cuda")
    with pytest.raises(ValueError, match="='cuda': choose from pytorch, cpp, triton"):
        rem_product(problem().value, HEADS, 0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v, a, g: (v.double(), a, g), "value is float64, and its kernels take float32, bfloat16, float16"),
        (lambda v, a, g: (v, a.double(), g), "attention is float64"),
        (lambda v, a, g: (v, a.to("meta"), g), "value is on cpu and attention on meta"),
    ],
)
def test_choosing_triton_for_unsupported_tensors_is_an_error(monkeypatch, change, message):
    pytest.importorskip("triton")
    monkeypatch.setattr("rsa_hf.ops.autograd.REQUESTED", "triton")
    refused = problem(*change(problem().value, torch.randn(1, 20, 2, 16), torch.ones(2)))
    with pytest.raises(RuntimeError, match=message):
        autograd.choose_backend(refused)


def test_the_automatic_fallback_warns_once(monkeypatch):
    pytest.importorskip("triton")
    # A GPU as torch describes it. No tensor is put there; `value` has all that is read of V.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    value = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.float32, is_cpu=False, is_cuda=True)
    reason = "Tesla T4 has compute capability 7.5, and 8.0 is needed"
    with pytest.warns(match=f"plain PyTorch, not in Triton: {reason}") as said:
        assert [autograd.choose_backend(problem(value)) for _ in range(3)] == ["pytorch"] * 3
    assert len(said) == 1
