"""What is particular to the C++: threads, precision, memory layouts, and machines that cannot compile it."""

import ctypes
import subprocess
import sys
import time
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.agreement import DILATION, record_calls
from ops.agreement import KINDS as SIX_KINDS
from ops.mixed_product import KINDS, SUMS, agreement, assert_agrees, differentiate, draw, mixed_product
from references import relative_error
from rsa_hf import rem_product
from rsa_hf.ops import autograd, cpp
from rsa_hf.ops.cpp import build, launch
from rsa_hf.ops.mask import AttentionMask
from rsa_hf.ops.reference import dense_rem_product
from rsa_hf.rem import Rems

needs_compiler = pytest.mark.skipif(isinstance(build.library(), str), reason=str(build.library()))


@pytest.fixture(autouse=True)
def chosen(monkeypatch):
    monkeypatch.setenv("RSA_HF_BACKEND", "cpp")


def values_with_threads(threads, tensors, mask):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        weights = torch.ones_like(tensors[3])
        return differentiate(
            lambda *t: mixed_product(t, SIX_KINDS, DILATION, 2, mask, tuple(range(6))), tensors, weights
        )
    finally:
        torch.set_num_threads(before)


@needs_compiler
@pytest.mark.parametrize("causal", [True, False])
def test_the_number_of_threads_changes_no_bit(monkeypatch, causal):
    monkeypatch.setattr(launch, "WORTH_A_THREAD", 1)
    tensors = draw(45, B=3, heads=6, groups=2)
    mask = AttentionMask(45, 45, 0, causal)
    one, *others = (values_with_threads(threads, tensors, mask) for threads in (1, 2, 5, 64))
    assert all(torch.equal(a, b) for other in others for a, b in zip(one, other, strict=True))


@needs_compiler
@settings(max_examples=60)
@given(
    T=st.integers(1, 80),
    before=st.integers(0, 80),
    behind=st.integers(0, 5),
    causal=st.booleans(),
    heads=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 40)), min_size=1, max_size=4),
    groups=st.integers(1, 3),
    cuts=st.sets(st.integers(1, 160), max_size=4),
    hidden=st.sets(st.integers(0, 160), max_size=4),
    window=st.none() | st.integers(1, 50),
    D=st.integers(1, 40),
    seed=st.integers(0, 10_000),
)
def test_random_shapes_and_masks_agree_with_dense_p(
    T, before, behind, causal, heads, groups, cuts, hidden, window, D, seed
):
    torch.manual_seed(seed)
    S = T + before + behind
    if T <= 16 < S or T == S == 0:
        T, before = S - behind, 0  # few queries take another path
    kinds, dilation = zip(*heads, strict=True)
    tensors = draw(T, S, B=2, D=D, heads=len(kinds), groups=groups)
    tensors[1].data.uniform_(-1, 1)
    tensors[2].data.uniform_(-3, 3)
    documents = torch.zeros(2, S, dtype=torch.long)
    for cut in cuts:
        documents[:, cut:] += 1
    key_mask = torch.ones(1, S, dtype=torch.bool)
    key_mask[0, [place for place in hidden if place < S]] = False
    masks = (key_mask if hidden else None, documents if cuts else None, window)
    errors = agreement(tensors, kinds, dilation, groups, before, causal, *masks)
    # The relative error of a sum that is nearly zero is large.
    assert_agrees({name: error for name, error in errors.items() if name not in SUMS})
    assert all(error < 1e-3 for error in errors.values()), errors


def long_lags():
    """A pulse in float32 and what has become of it after 8,000 steps, exactly."""
    value = torch.zeros(1, 1, 8001, 2)
    value[:, :, 0] = 1
    decay, theta = torch.tensor([0.99987], dtype=torch.float64), torch.tensor([0.001], dtype=torch.float64)
    return value, decay, theta, decay**8000 * torch.cos(8000 * theta)


@needs_compiler
def test_long_lags_lose_no_digits():
    value, decay, theta, expected = long_lags()
    found = rem_product(value, "cos", decay, theta)[0, 0, -1]
    assert relative_error(found, expected.expand(2)) < 1e-5


@needs_compiler
def test_a_scan_that_keeps_the_rounding_of_z_is_caught(monkeypatch, tmp_path):
    source = tmp_path / "scan.cpp"
    text = build.SOURCE.read_text(encoding="utf-8")
    source.write_text(text.replace("double(steps) * lost", "0.0 * double(steps) * lost"), encoding="utf-8")
    assert source.read_text(encoding="utf-8") != text
    monkeypatch.setattr(build, "SOURCE", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    broken = build.library.__wrapped__()
    assert isinstance(broken, ctypes.CDLL), broken
    monkeypatch.setattr(launch, "compiled_function", lambda name, dtype: broken.forward_float32)
    value, decay, theta, expected = long_lags()
    found = rem_product(value, "cos", decay, theta)[0, 0, -1]
    assert relative_error(found, expected.expand(2)) > 1e-4


@needs_compiler
def test_decays_that_end_in_subnormal_numbers_take_no_longer():
    heads = Rems(("regular",) * 8, torch.linspace(0.3, 0.9, 8), torch.zeros(8), (1,) * 8, 1, tuple(range(8)))
    mask = AttentionMask(4096, 4096, 0, True)
    noise, pulse = torch.randn(1, 8, 4096, 64), torch.zeros(1, 8, 4096, 64)
    pulse[:, :, ::500] = 1

    def seconds(value):
        times = []
        for _ in range(5):
            began = time.perf_counter()
            launch.cpp_forward(value, heads, mask, None, None)
            times.append(time.perf_counter() - began)
        return min(times)

    seconds(noise)
    assert seconds(pulse) < 3 * seconds(noise)


@needs_compiler
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 1, 0, 3), (3, 2, 1, 0)])
def test_gradients_keep_the_memory_order_of_the_values(order):
    value = torch.randn(*(torch.tensor([2, 3, 20, 16])[list(order)].tolist()), dtype=torch.float64)
    value = value.permute(*torch.tensor(order).argsort().tolist())
    rates = torch.tensor([0.9, 0.8, 0.7], dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    tensors = [value.detach().requires_grad_(), *rates]
    (found,) = torch.autograd.grad(rem_product(tensors[0], KINDS, *rates).square().sum(), tensors[:1])
    exact = value.clone().requires_grad_()
    (expected,) = torch.autograd.grad(dense_rem_product(exact, KINDS, *rates, (1, 1, 1)).square().sum(), [exact])
    assert relative_error(found, expected) < 1e-12
    assert value.stride(3) != 1 or found.stride() == value.stride()


# --- where it cannot run --------------------------------------------------------------------------------------------


@pytest.fixture
def freshly_compiled(monkeypatch, tmp_path):
    """Compile anew, into an empty cache, by `build.library()`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    build.library.cache_clear()
    yield tmp_path / "rsa_hf"
    build.library.cache_clear()


def no_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "")


def a_failing_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "false")


def a_missing_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/g++")


def another_system(monkeypatch):
    monkeypatch.setattr(build.sys, "platform", "win32")


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        (no_compiler, "there is no C.. compiler; install g.., or set CXX"),
        (a_failing_compiler, "false fails: exit code 1"),
        (a_missing_compiler, "it cannot be compiled and loaded: .*No such file or directory: '/nowhere/g"),
        (another_system, "on Linux and macOS alone, and this is win32"),
    ],
)
def test_without_it_plain_pytorch_computes_the_same(monkeypatch, freshly_compiled, cause, reason):
    cause(monkeypatch)
    value, decay, theta, *_ = draw(20)
    with pytest.raises(RuntimeError, match=f"RSA_HF_BACKEND=cpp cannot run: .*{reason}.*choose pytorch"):
        rem_product(value, KINDS, decay, theta)
    monkeypatch.delenv("RSA_HF_BACKEND")
    used = record_calls(monkeypatch, autograd, "product_in_pytorch", "cpp_forward")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rem_product(value, KINDS, decay, theta)
    assert used == ["product_in_pytorch"]


@pytest.mark.parametrize("kind", ["meta", "a subclass"])
def test_tensors_without_memory_of_their_own_are_left_to_pytorch(kind):
    class Wrapped(torch.Tensor):
        pass

    value = torch.randn(1, 1, 3, 2)
    value = value.to("meta") if kind == "meta" else value.as_subclass(Wrapped)
    assert cpp.obstacle(value) is not None
    assert cpp.obstacle(torch.nn.Parameter(torch.randn(1, 1, 3, 2))) == (
        build.library() if isinstance(build.library(), str) else None
    )


@needs_compiler
def test_it_is_compiled_once_and_kept(monkeypatch, freshly_compiled):
    runs = record_calls(monkeypatch, build.subprocess, "run")
    for _ in range(2):
        assert isinstance(build.library(), ctypes.CDLL)
        build.library.cache_clear()
    assert runs == ["run"]
    assert [path.suffix for path in freshly_compiled.iterdir()] == [".so"]


@needs_compiler
def test_it_works_where_nothing_can_be_kept(monkeypatch, freshly_compiled):
    freshly_compiled.write_text("a file where the folder would be")
    assert isinstance(build.library(), ctypes.CDLL)


@pytest.mark.slow  # starts interpreters
@needs_compiler
def test_processes_that_compile_at_the_same_time_do_not_meet(freshly_compiled):
    code = "import ctypes; from rsa_hf.ops.cpp.build import library; assert isinstance(library(), ctypes.CDLL)"
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert len(list(freshly_compiled.iterdir())) == 1


def test_visible_masks_use_plain_pytorch(monkeypatch):
    used = record_calls(monkeypatch, autograd, "cpp_forward")
    value, decay, theta, *_ = draw(20)
    rem_product(value, KINDS, decay, theta, visible=torch.ones(1, 1, 20, 20).bool().tril())
    assert used == []
