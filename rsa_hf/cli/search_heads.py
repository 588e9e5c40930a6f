"""`rsa-hf search-heads`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rsa_hf.cli.common import Config, UserError, help_with_keys, install_hooks, user_input

__all__ = ["search_heads"]


def _print_keys() -> None:
    from rsa_hf.tasks.search_language_model import main

    main(["--help"], 1, ())


def search_heads(
    context: typer.Context,
    config: Config,
    trials: Annotated[int, typer.Option(min=1, help="Number of plans, with those in --storage.")] = 30,
    dilations: Annotated[
        str, typer.Option(help="Factors d that dilated heads may have; '' for no dilated heads.")
    ] = "2,4,8",
    storage: Annotated[
        Path | None,
        typer.Option(help="File that keeps the trials; a search continues from it. [OUTPUT_DIR/head_plans.log]"),
    ] = None,
    _: Annotated[bool, help_with_keys(_print_keys)] = False,
) -> None:
    """Search the head plan of a language model: which heads become RSA heads, and of which kinds.

    CONFIG is the file of a run of `rsa-hf train lm`; --key value after it overrides a key. Each plan is trained as the
    file says and scored on the validation text. The best one is printed as a section `rsa`.

    Example: rsa-hf search-heads configs/lm_bytes_embedded.yaml --trials 20 --max_steps 100 --output_dir outputs/search
    """
    install_hooks()
    from rsa_hf.tasks.search_language_model import main

    try:
        factors = [int(word) for word in dilations.replace(",", " ").split()]
    except ValueError as error:
        raise UserError(f"--dilations {dilations!r}: whole numbers with commas between them are needed.") from error
    with user_input():
        main([config, *context.args], trials, factors, storage)
