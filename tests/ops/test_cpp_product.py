"""What is particular to the C++: threads, precision, memory layouts, and machines that cannot compile it."""

import ctypes
import warnings

import pytest
import torch

from ops.agreement import DILATION, record_calls
from ops.agreement import KINDS as SIX_KINDS
from ops.mixed_product import KINDS, differentiate, draw, mixed_product
from references import relative_error
from rsa_hf import rem_product
from rsa_hf.ops import autograd, cpp
from rsa_hf.ops.cpp import build
from rsa_hf.ops.mask import AttentionMask
from rsa_hf.ops.problem import from_rems
from rsa_hf.rem import Rems

needs_compiler = pytest.mark.skipif(isinstance(build.library(), str), reason=str(build.library()))


def problem(value):
    rems = Rems(("cos",), torch.tensor([0.9]), torch.ones(1), (1,), 1, (0,))
    return from_rems(value, rems, AttentionMask(3, 3, 0, True))


@pytest.fixture(autouse=True)
def chosen(monkeypatch):
    monkeypatch.setattr("rsa_hf.ops.autograd.REQUESTED", "cpp")


@needs_compiler
@pytest.mark.parametrize("causal", [True, False])
def test_the_number_of_threads_changes_no_bit(causal):
    # Enough numbers for five threads.
    tensors, mask = draw(613, B=3, heads=6, groups=2), AttentionMask(613, 613, 0, causal)
    before = torch.get_num_threads()

    def product(*tensors):
        return mixed_product(tensors, SIX_KINDS, DILATION, 2, mask, tuple(range(6)))

    found = []
    try:
        for threads in (1, 2, 5, 64):
            torch.set_num_threads(threads)
            found.append(differentiate(product, tensors, torch.ones_like(tensors[3])))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@needs_compiler
def test_long_lags_lose_no_digits():
    """Two pulses in float32, and what has become of them after 8,000 steps."""
    value, pulses = torch.zeros(1, 1, 8001, 2), torch.tensor([1.0, 2.0**-110])
    value[:, :, 0] = pulses
    decay, theta = torch.tensor([0.99987], dtype=torch.float64), torch.tensor([0.001], dtype=torch.float64)
    expected = decay**8000 * torch.cos(8000 * theta)
    found = rem_product(value, "cos", decay, theta)[0, 0, -1]
    assert relative_error(found / pulses, expected.expand(2)) < 1e-5


# --- where it cannot run --------------------------------------------------------------------------------------------


@pytest.fixture
def freshly_compiled(monkeypatch, tmp_path):
    """Compile anew, into an empty cache, by `build.library()`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    build.library.cache_clear()
    yield tmp_path / "rsa_hf"
    build.library.cache_clear()


@pytest.mark.parametrize(
    ("variable", "setting", "reason"),
    [
        ("PATH", "", "there is no C.. compiler; install g.., or set CXX"),
        ("CXX", "false", "false fails: exit code 1"),
        ("CXX", "/nowhere/g++", "it cannot be compiled and loaded: .*No such file or directory: '/nowhere/g"),
    ],
)
def test_without_it_plain_pytorch_computes_the_same(monkeypatch, freshly_compiled, variable, setting, reason):
    monkeypatch.setenv(variable, setting)
    value, decay, theta, *_ = draw(20)
    with pytest.raises(RuntimeError, match=f"RSA_HF_BACKEND=cpp cannot run: .*{reason}.*choose pytorch"):
        rem_product(value, KINDS, decay, theta)
    monkeypatch.setattr("rsa_hf.ops.autograd.REQUESTED", "")
    used = record_calls(monkeypatch, autograd, "product_in_pytorch")
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
    assert cpp.obstacle(problem(value)) is not None
    assert cpp.obstacle(problem(torch.nn.Parameter(torch.randn(1, 1, 3, 2)))) == (
        build.library() if isinstance(build.library(), str) else None
    )


@needs_compiler
def test_it_is_compiled_once_and_kept(monkeypatch, freshly_compiled, tmp_path):
    sources = tmp_path / "one.cpp", tmp_path / "other.cpp"  # short ones: ours take half a minute beside other tests
    for source in sources:
        source.write_text(f"int {source.stem}() {{ return 1; }}\n")
    monkeypatch.setattr(build, "SOURCES", dict.fromkeys(sources, "-O0"))
    runs = record_calls(monkeypatch, build.subprocess, "run")
    for _ in range(2):
        assert isinstance(build.library(), ctypes.CDLL)
        build.library.cache_clear()
    assert runs == ["run"] * 3  # each source, and both together
    assert [path.suffix for path in freshly_compiled.iterdir()] == [".so"]
