"""`rsa-hf card`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from rsa_hf.cli.errors import UserError, user_input
from rsa_hf.cli.models import arm, load_patched

__all__ = ["card"]


def card(
    folder: Annotated[Path, typer.Argument(help="Folder of a patched checkpoint.")],
    base_model: Annotated[str | None, typer.Option(help="What was patched, by its name on the Hub.")] = None,
    dataset: Annotated[list[str] | None, typer.Option(help="What it was trained on; may be given again.")] = None,
    metric: Annotated[list[str] | None, typer.Option(help="Name of a metric; may be given again.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Of a training run; may be given again.")] = None,
) -> None:
    """Write the model card of a checkpoint (README.md) and its picture (rsa.png), or bring them up to date.

    Seed, data set and base model are taken from the results.json that a run has left beside the folder, and for its
    `best` the scores, which are of that model alone.

    Example: rsa-hf card outputs/defect_minilm/best --base-model microsoft/codebert-base --seed 0
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder. Name the folder of a checkpoint.")
    arm()
    from rsa_hf.hub.card import CardFacts, write_card
    from rsa_hf.training.run import card_facts

    model = load_patched(str(folder))
    with user_input():
        results = folder.resolve().parent / "results.json"
        facts = card_facts(results) if results.is_file() else CardFacts()
        if folder.resolve().name != "best":
            facts = replace(facts, scores=None)
        given = CardFacts(base_model, tuple(dataset or ()), tuple(metric) if metric else None, tuple(seed or ()))
        path = write_card(model, folder, facts.updated(given), plot=True)
    if path is None:
        raise UserError(f"{folder / 'README.md'} is no model card, and was left alone. Move it away first.")
    print(f"written: {path}")
