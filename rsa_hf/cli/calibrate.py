"""`rsa-hf calibrate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from rsa_hf.cli.common import UserError, install_hooks, load_checkpoint, user_input
from rsa_hf.cli.patch import require_new, save_tokenizer

__all__ = ["calibrate"]

ROWS_PER_BATCH = 4


def calibrate(
    base: Annotated[
        str, typer.Argument(help="A language model's name on the Hub, its folder, or package:NAME/FOLDER.")
    ],
    out: Annotated[Path, typer.Argument(help="Folder for the patched checkpoint; new or empty.")],
    text: Annotated[Path, typer.Option(help="A text file of the kind that the model is for.")],
    rows: Annotated[int, typer.Option(help="Number of rows of the text that are read.")] = 16,
    length: Annotated[int, typer.Option(help="Tokens of a row.")] = 256,
    seed: Annotated[int, typer.Option(help="Of the rows that are drawn, and of the choice.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Write into OUT even if it holds files.")] = False,
) -> None:
    """Put RSA heads where they help a pretrained language model on a text, and save it if they do.

    Nothing is trained but the gates. OUT gets the patched model, its tokenizer, a model card, and what was found:
    calibration.json and, with matplotlib, calibration.png. Nothing is written if no gain can be shown on rows that the
    choice has not seen.

    Example: rsa-hf calibrate openai-community/gpt2 outputs/gpt2-calibrated --text corpus.txt
    """
    require_new(out, overwrite)
    install_hooks()
    from rsa_hf.calibration import run_calibration
    from rsa_hf.hub.card import CardFacts, write_card
    from rsa_hf.patching import patch_model
    from rsa_hf.utils.files import storage_errors

    model = load_checkpoint(base)
    with user_input(TypeError):
        batches = _batches(base, text, rows, length, seed)
        found = run_calibration(model, batches, max_rows=rows, seed=seed)
    print(found)
    if not found.heads:
        print(f"nothing is written to {out}")
        return
    patch_model(model, found.config)
    with user_input(), storage_errors(out):
        model.save_pretrained(out)
        save_tokenizer(base, out)
        (out / "calibration.json").write_text(json.dumps(found.to_dict(), indent=2), encoding="utf-8")
        scores = {"calibration": {"loss, plain": found.loss, "loss": found.loss - found.gain}}
        write_card(model, out, CardFacts(base_model=base, scores=scores, seeds=(seed,)))
    try:
        found.plot(out / "calibration.png")
    except ImportError as error:
        print(f"no heatmap: {error}")
    print(f"written: {out}")


def _batches(base: str, text: Path, rows: int, length: int, seed: int) -> list[dict[str, object]]:
    """Random rows of a text, as a causal language model takes them."""
    import torch
    from transformers import AutoTokenizer

    from rsa_hf.utils.locate import locate

    tokenizer = AutoTokenizer.from_pretrained(locate(base))
    ids = tokenizer(text.read_text(encoding="utf-8"), return_tensors="pt", verbose=False).input_ids[0]
    whole = len(ids) // length
    if whole < rows:
        raise UserError(f"{text} has {len(ids):,} tokens: too few for --rows {rows} of --length {length}.")
    drawn = torch.randperm(whole, generator=torch.Generator().manual_seed(seed))[:rows]
    blocks = ids[: whole * length].view(whole, length)[drawn]
    return [{"input_ids": block, "labels": block} for block in blocks.split(ROWS_PER_BATCH)]
