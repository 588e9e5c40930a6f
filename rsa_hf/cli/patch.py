"""`rsa-hf patch`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rsa_hf.cli.common import install_hooks, load_checkpoint, writable
from rsa_hf.utils.locate import expanded

if TYPE_CHECKING:
    from rsa_hf.config import RSAConfig


def patch(
    base: Annotated[str, typer.Argument(help="A model's name on the Hub, its folder, or package:NAME/FOLDER.")],
    out: Annotated[str, typer.Argument(help="Folder for the patched checkpoint; new or empty.")],
    plan: Annotated[
        str | None,
        typer.Option(
            help="Settings of RSAConfig: a YAML or JSON file (a run's file too), or the settings themselves."
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Write into OUT even if it holds files.")] = False,
) -> None:
    """Add RSA heads to a pretrained model and save it with its tokenizer and a model card.

    Example: rsa-hf patch openai-community/gpt2 outputs/gpt2-rsa --plan "{num_cyclical_pairs: 2, gate_init: -3}"
    """
    base, folder = expanded(base), new_folder(out, overwrite)
    install_hooks()
    from rsa_hf.patching import is_patched, patch_model
    from rsa_hf.report import rsa_report

    config = _config_of(plan or "{}")
    model = load_checkpoint(base)
    if is_patched(model):
        raise ValueError(f"{base} already has RSA heads. Name a plain model.")
    patch_model(model, config)
    model.save_pretrained(folder)
    tokenizer = save_tokenizer(base, folder)
    report = rsa_report(model)
    print(f"{len(report.layers)} layers patched, {report.num_parameters} RSA parameters; written: {folder}")
    if not tokenizer:
        print(f"{base} has no tokenizer to save.")


def new_folder(name: str, overwrite: bool) -> Path:
    """The folder that a checkpoint is written into; it must be new or empty, and in a place that can be written to."""
    out = writable(name)
    if out.exists() and not (out.is_dir() and (overwrite or not any(out.iterdir()))):
        raise ValueError(f"{out} exists and is not an empty folder. Choose another one, or give --overwrite.")
    return out


def _config_of(plan: str) -> "RSAConfig":
    """The config that settings give, directly or in a file."""
    from rsa_hf.training.arguments import RSAArguments
    from rsa_hf.utils.yaml import read_yaml

    is_text = plan.lstrip().startswith(("{", "[")) or ": " in plan
    try:
        content = read_yaml(plan if is_text else Path(expanded(plan)).read_text(encoding="utf-8"))
        config = RSAArguments(content["rsa"] if isinstance(content, dict) and "rsa" in content else content).config
    except ValueError as error:
        raise ValueError(f"--plan {plan:.200}: {error}") from error
    if config is None:
        raise ValueError(f"--plan {plan:.200}: it has no settings of RSAConfig, which say which heads to add.")
    return config


def save_tokenizer(base: str, out: Path) -> bool:
    """Save the tokenizer of a model into a folder; False if it has none."""
    from rsa_hf.training.model_setup import load_tokenizer

    try:
        tokenizer = load_tokenizer(base)
    except (OSError, ValueError, KeyError):  # transformers raises one of them, depending on the model type
        return False
    tokenizer.save_pretrained(out)
    return True
