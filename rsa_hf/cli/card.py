"""`rsa-hf card`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from rsa_hf.cli.common import UserError, install_hooks, load_patched, user_input

__all__ = ["card"]


def card(
    folder: Annotated[Path, typer.Argument(help="Folder of a patched checkpoint.")],
    base_model: Annotated[str | None, typer.Option(help="Name on the Hub of the model that was patched.")] = None,
    dataset: Annotated[list[str] | None, typer.Option(help="Data set it was trained on. May be repeated.")] = None,
    metric: Annotated[list[str] | None, typer.Option(help="Name of a metric. May be repeated.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Seed of a training run. May be repeated.")] = None,
) -> None:
    """Write or update the model card (README.md) and the picture (rsa.png) of a checkpoint.

    Seed, data set and base model come from the results.json of a run, beside the folder. The scores in it belong to
    the run's `best` and are used for that folder only.

    Example: rsa-hf card outputs/defect_minilm/best --base-model microsoft/codebert-base --seed 0
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder. Name the folder of a checkpoint.")
    install_hooks()
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
        raise UserError(f"{folder / 'README.md'} is not a model card and was left as it is. Move it away first.")
    print(f"written: {path}")
