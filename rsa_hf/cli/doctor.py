"""`rsa-hf doctor`: does it work here, and if not, why. It starts where nothing else of rsa_hf can be imported."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import metadata, util
from typing import Annotated

import typer
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from rsa_hf.cli.findings import Finding, guarded
from rsa_hf.cli.models import arm, load_checkpoint

__all__ = ["doctor"]

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "evaluate", "huggingface_hub", "peft", "safetensors")
OPTIONAL = {
    "triton": "kernels for NVIDIA GPUs: pip install 'rsa_hf[gpu]'",
    "matplotlib": "pictures: pip install 'rsa_hf[plot]'",
    "onnx": "ONNX export: pip install 'rsa_hf[onnx]'",
    "onnxruntime": "ONNX export: pip install 'rsa_hf[onnx]'",
}
TOLERANCE = 1e-5


def doctor(
    model: Annotated[
        str | None,
        typer.Option(help="Also try this model: a name on the Hub, a folder, or package:NAME/FOLDER; patched or not."),
    ] = None,
) -> None:
    """Show versions, backends, hooks and devices, and check one small model; the exit code is 1 if anything fails.

    With --model, RSA's promises are tried on that model too: shut gates change no bit, later tokens leave earlier
    outputs as they are, a cache and padding change nothing, and what is saved comes back. Its files are only read;
    saving is tried in a temporary folder, which needs room for the model once more.

    Example: rsa-hf doctor --model openai-community/gpt2
    """
    failed = False
    for check in (_versions, _backends, _hooks, _self_check):
        failed |= _print(guarded(check.__name__.strip("_").replace("_", " "), check))
    if model is not None and failed:
        print(f"{'note':5} {'model':20} {model} was not tried: first mend what failed")
    elif model is not None:
        failed |= _print(_model(model))
    print("\nsomething is wrong: see FAIL above" if failed else "\nall is well")
    if failed:
        raise typer.Exit(1)


def _print(findings: Iterator[Finding]) -> bool:
    """Print findings as they come; whether any is a failure."""
    failed = False
    for finding in findings:
        failed |= finding.verdict == "FAIL"
        print(finding, flush=True)
    return failed


def _model(name: str) -> Iterator[Finding]:
    arm()
    from rsa_hf.cli.doctor_model import examine
    from rsa_hf.patching import is_patched

    model = load_checkpoint(name)
    had = "has RSA heads" if is_patched(model) else "is plain, and gets RSA heads for as long as it is tried"
    yield Finding("ok", "model", f"{name}: {type(model).__name__} {had}")
    yield from guarded("model", lambda: examine(model))


def _versions() -> Iterator[Finding]:
    yield Finding("ok", "python", f"{platform.python_version()} on {platform.platform()}")
    try:
        needed = dict(_requirements())
        yield Finding("ok", "rsa_hf", metadata.version("rsa_hf"))
    except metadata.PackageNotFoundError:
        needed = dict[str, SpecifierSet]()
        yield Finding("note", "rsa_hf", "is not installed, but found by its path: pip install it to have its versions")
    from packaging.version import Version

    for name in PACKAGES:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Finding("FAIL", name, f"is missing: pip install '{name}{needed.get(canonicalize_name(name), '')}'")
            continue
        specifier = needed.get(canonicalize_name(name))
        if specifier is None or Version(version).base_version in specifier or version in specifier:
            yield Finding("ok", name, f"{version}{f' (needed: {specifier})' if specifier else ''}")
        else:
            yield Finding("FAIL", name, f"{version} does not fit: pip install '{name}{specifier}'")


def _requirements() -> Iterator[tuple[str, SpecifierSet]]:
    """By their canonical names: installed metadata may spell huggingface_hub with a dash."""
    from packaging.requirements import Requirement

    for text in metadata.requires("rsa_hf") or ():
        requirement = Requirement(text)
        if requirement.marker is None:
            yield canonicalize_name(requirement.name), requirement.specifier


def _backends() -> Iterator[Finding]:
    import torch

    # By the module: onnxruntime also comes in a package onnxruntime-gpu, and triton in one of another name.
    packages = metadata.packages_distributions()
    for name, use in OPTIONAL.items():
        if util.find_spec(name) is None:
            yield Finding("note", name, f"not installed; {use}")
        else:
            found = dict.fromkeys(packages.get(name, ()))
            yield Finding("ok", name, ", ".join(map(metadata.version, found)) or "found, of no installed package")
    yield Finding("ok", "cpu", f"{torch.get_num_threads()} threads")
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(i)
            words = f"{device.name}, {device.total_memory / 2**30:.0f} GB, capability {device.major}.{device.minor}"
            yield Finding("ok", f"cuda:{i}", words)
    else:
        yield Finding("note", "cuda", "no GPU that this torch can use")


def _hooks() -> Iterator[Finding]:
    from rsa_hf.utils.versions import require_transformers

    yield Finding("ok", "transformers", require_transformers())
    from rsa_hf.integration import install, installed

    install()
    for name, is_on in installed().items():
        yield Finding("ok" if is_on else "FAIL", "hook", name)


def _self_check() -> Iterator[Finding]:
    """A tiny GPT-2: a shut gate changes no bit, an open one does what the explicit P says."""
    import torch
    from transformers import GPT2Config, GPT2Model

    from rsa_hf.config import RSAConfig
    from rsa_hf.ops import rem_product
    from rsa_hf.patching import patch_model
    from rsa_hf.rem import rem_matrix

    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    for device in devices:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            model = GPT2Model(GPT2Config(n_layer=2, n_head=4, n_embd=32, vocab_size=64)).eval().to(device)
            ids = torch.randint(0, 64, (2, 33)).to(device)
            plain = model(ids)[0]
            patch_model(model, RSAConfig(num_regular=1, num_cyclical_pairs=1, gate_init=float("-inf")))
            shut = model(ids)[0]
            for block in model.h:
                block.attn.rsa.mu.zero_()
            opened = model(ids)[0]
            value = torch.randn(2, 3, 33, 8, device=device)
            heads = (["regular", "cos", "sin"], [-0.9, 0.95, 0.8], 0.7, [1, 2, 3])
            P = rem_matrix(*heads, query_length=33).to(value)
            error = float((rem_product(value, *heads) - P @ value).abs().max())
        changed = float((opened - plain).abs().max())
        right = torch.equal(shut, plain) and changed > 100 * TOLERANCE and error < TOLERANCE
        words = (
            f"shut gate {'changes no bit' if torch.equal(shut, plain) else 'CHANGES THE OUTPUT'}, open gate changes "
            f"it by {changed:.2g}, P V agrees with the explicit P to {error:.1g}"
        )
        yield Finding("ok" if right else "FAIL", f"self-check, {device}", words)
