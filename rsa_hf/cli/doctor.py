"""`rsa-hf doctor`: does rsa_hf work here, and if not, why. It runs even if the rest of rsa_hf cannot be imported."""

import platform
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata, util
from typing import TYPE_CHECKING, Annotated

import typer
from packaging.requirements import Requirement
from packaging.version import Version

from rsa_hf.cli.common import install_hooks, load_checkpoint
from rsa_hf.utils.locate import expanded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OPTIONAL = {
    "triton": "kernels for NVIDIA GPUs: pip install 'rsa_hf[gpu]'",
    "matplotlib": "pictures: pip install 'rsa_hf[plot]'",
    "onnx": "ONNX export: pip install 'rsa_hf[onnx]'",
    "onnxruntime": "ONNX export: pip install 'rsa_hf[onnx]'",
}
TOLERANCE = 1e-5


# A line of the report: "ok", "note" or "FAIL", what was checked, and the result.
Finding = tuple[str, str, str]


def _guarded(subject: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """The findings of a check; an exception that ends the check is the last finding."""
    try:
        yield from check()
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        yield "FAIL", subject, f"{type(error).__name__}: {first}"


def doctor(
    model: Annotated[
        str | None, typer.Option(help="Also check this model: a name on the Hub, a folder, or package:NAME/FOLDER.")
    ] = None,
) -> None:
    """Show versions, backends, hooks and devices, and check a small model. Exits with 1 if a check fails.

    --model also checks your model, patched or not: shut gates do not change a bit, later tokens do not change earlier
    outputs, a cache and padding change nothing, and a saved model loads unchanged. The model's files are only read. A
    temporary folder needs room for one copy.

    Example: rsa-hf doctor --model openai-community/gpt2
    """
    checks = {"versions": _versions, "backends": _backends, "hooks": _hooks, "self check": _self_check}
    if model is not None:
        install_hooks()
        loaded = load_checkpoint(expanded(model))
        checks["model"] = lambda: _model(model, loaded)
    failed = False
    for name, check in checks.items():
        for verdict, subject, text in _guarded(name, check):
            failed |= verdict == "FAIL"
            print(f"{verdict:5} {subject:20} {text}", flush=True)
    print("\nsomething is wrong: see FAIL above" if failed else "\nall is well")
    if failed:
        raise typer.Exit(1)


def _model(name: str, model: "PreTrainedModel") -> Iterator[Finding]:
    from rsa_hf.checks import examine
    from rsa_hf.patching import is_patched

    state = "has RSA heads" if is_patched(model) else "is plain, and gets RSA heads for these checks"
    yield "ok", "model", f"{name}: {type(model).__name__} {state}"
    yield from examine(model)


def _versions() -> Iterator[Finding]:
    yield "ok", "python", f"{platform.python_version()} on {platform.platform()}"
    try:
        yield "ok", "rsa_hf", metadata.version("rsa_hf")
    except metadata.PackageNotFoundError:
        yield "note", "rsa_hf", "is not installed, only on the path: versions are not checked"
        return
    for requirement in map(Requirement, metadata.requires("rsa_hf") or ()):
        if requirement.marker is not None:  # of an extra
            continue
        name, needed = requirement.name, requirement.specifier
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield "FAIL", name, f"is missing: pip install '{requirement}'"
            continue
        fits = Version(version).base_version in needed
        text = f"{version} (needed: {needed})" if fits else f"{version} does not fit: pip install '{requirement}'"
        yield "ok" if fits else "FAIL", name, text


def _backends() -> Iterator[Finding]:
    import torch

    from rsa_hf.ops.cpp.build import library

    for name, use in OPTIONAL.items():
        missing = util.find_spec(name) is None
        yield "note" if missing else "ok", name, f"not installed; {use}" if missing else "installed"
    compiled = library()
    has_cpp = not isinstance(compiled, str)
    text = "P V in C++" if has_cpp else f"P V in plain PyTorch, which is slower than C++: {compiled}"
    yield "ok" if has_cpp else "note", "cpu", f"{torch.get_num_threads()} threads; {text}"
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(i)
            text = f"{device.name}, {device.total_memory / 2**30:.0f} GB, capability {device.major}.{device.minor}"
            yield "ok", f"cuda:{i}", text
    else:
        yield "note", "cuda", "no GPU that this torch can use"


def _hooks() -> Iterator[Finding]:
    from rsa_hf.integration import install, what_fits

    install()
    from rsa_hf.integration.hook_table import HOOKS
    from rsa_hf.integration.hooks import is_installed

    yield "ok", "transformers", what_fits()
    yield from (("ok" if is_installed(hook) else "FAIL", "hook", str(hook)) for hook in HOOKS)


def _self_check() -> Iterator[Finding]:
    """Check a tiny GPT-2, and P V against the explicit P."""
    import torch
    from transformers import GPT2Config, GPT2Model

    from rsa_hf.checks import CHECKS, Failed, Subject
    from rsa_hf.config import RSAConfig
    from rsa_hf.ops import rem_product
    from rsa_hf.patching import patch_model
    from rsa_hf.rem import rem_matrix

    for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            config = GPT2Config(n_layer=2, n_head=4, n_embd=32, vocab_size=64, bos_token_id=0, eos_token_id=0)
            model = GPT2Model(config).eval().to(device)
            patch_model(model, RSAConfig(num_regular=1, num_cyclical_pairs=1))
            subject = Subject(model, {"input_ids": torch.randint(0, 64, (2, 33), device="cpu").to(device)})
            found = [CHECKS[name](subject) for name in ("identity", "effect")]
            value = torch.randn(2, 3, 33, 8, device=device)
            heads = (["regular", "cos", "sin"], [-0.9, 0.95, 0.8], 0.7, [1, 2, 3])
            P = rem_matrix(*heads, query_length=33).to(value)
            error = float((rem_product(value, *heads) - P @ value).abs().max())
        if not error < TOLERANCE:
            raise Failed(f"P V is off by {error:.1g} from the explicit P")
        yield "ok", f"self-check, {device}", f"{'; '.join(found)}; P V agrees with the explicit P"
