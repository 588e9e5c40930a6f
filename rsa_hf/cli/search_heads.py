"""`rsa-hf search-heads`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rsa_hf.cli.errors import UserError
from rsa_hf.cli.models import arm
from rsa_hf.cli.train import Config

__all__ = ["search_heads"]


def search_heads(
    context: typer.Context,
    config: Config,
    trials: Annotated[int, typer.Option(min=1, help="How many plans in all, those of the file included.")] = 30,
    dilations: Annotated[
        str, typer.Option(help="The factors d that dilated heads may have; '' for no dilated heads.")
    ] = "2,4,8",
    storage: Annotated[
        Path | None,
        typer.Option(help="The file that keeps what was tried; a search goes on from it. [OUTPUT_DIR/head_plans.log]"),
    ] = None,
) -> None:
    """Search the head plan of a language model: which heads become RSA heads, and of which kinds.

    CONFIG is the file of a run of `rsa-hf train lm`; what follows, as --key value, overrides it. Each plan is trained
    as it says and scored on the validation text. The best one is printed as the section `rsa` of such a file.

    Example: rsa-hf search-heads configs/lm_bytes_embedded.yaml --trials 20 --max_steps 100 --output_dir outputs/search
    """
    arm()
    from rsa_hf.tasks.search_language_model import main
    from rsa_hf.training.run import script_errors

    try:
        factors = [int(word) for word in dilations.replace(",", " ").split()]
    except ValueError as error:
        raise UserError(f"--dilations {dilations!r}: whole numbers are needed, with commas between them.") from error
    try:
        with script_errors():
            main([config, *context.args], trials, factors, storage)
    except ImportError as error:
        raise UserError(str(error)) from error
