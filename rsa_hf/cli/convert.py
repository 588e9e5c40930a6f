"""`rsa-hf convert-transformer-xl`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from rsa_hf.cli.common import install_hooks, user_input

__all__ = ["convert_transformer_xl"]


def convert_transformer_xl(
    source: Annotated[Path, typer.Argument(help="A .pt file of NVIDIA's or the original Transformer-XL.")],
    output: Annotated[Path, typer.Argument(help="Folder to write.")],
    config: Annotated[Path | None, typer.Option(help="A config.json, for a file without the architecture.")] = None,
) -> None:
    """Convert a Transformer-XL checkpoint to a folder that AutoModelForCausalLM loads.

    Example: rsa-hf convert-transformer-xl checkpoint_best.pt outputs/xl
    """
    install_hooks()
    from rsa_hf.models.transformer_xl import TransformerXLConfig
    from rsa_hf.models.transformer_xl.convert_transformer_xl_checkpoint import convert_checkpoint

    with user_input():
        # Not from_pretrained, which takes a config without `zero_memory` for one of transformers 4.
        fields = None if config is None else json.loads(config.read_text(encoding="utf-8"))
        model = convert_checkpoint(source, output, None if fields is None else TransformerXLConfig(**fields))
    print(f"written: {output} ({model.num_parameters():,} parameters)")
