"""`rsa-hf train defect` and `rsa-hf train lm`."""

from __future__ import annotations

from typing import Annotated

import typer

from rsa_hf.cli.models import arm

__all__ = ["train"]

train = typer.Typer(no_args_is_help=True, help="Train a model, patched or plain, as a YAML file says.")

Config = Annotated[
    str, typer.Argument(metavar="CONFIG", help="The YAML file of the run; those in configs/ explain all.")
]
ListKeys = Annotated[bool, typer.Option("--list-keys", help="List the keys that --key value can set.", is_eager=True)]
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


@train.command(context_settings=PASSED_ON)
def defect(context: typer.Context, config: Config = "", list_keys: ListKeys = False) -> None:
    """Train a defect detector; what follows CONFIG, as --key value, overrides it.

    On several processes: accelerate launch scripts/train_defect_detection.py CONFIG.

    Example: rsa-hf train defect configs/defect_minilm_embedded.yaml --max_steps 100 --output_dir outputs/defect
    """
    arm()
    from rsa_hf.tasks.train_defect_detection import main
    from rsa_hf.training.run import script_errors

    with script_errors():
        main(["--help"] if list_keys else [*filter(None, [config]), *context.args])


@train.command(context_settings=PASSED_ON)
def lm(context: typer.Context, config: Config = "", list_keys: ListKeys = False) -> None:
    """Train a causal language model; what follows CONFIG, as --key value, overrides it.

    On several processes: accelerate launch scripts/train_language_model.py CONFIG.

    Example: rsa-hf train lm configs/lm_bytes_embedded.yaml --max_steps 100 --rsa null
    """
    arm()
    from rsa_hf.tasks.train_language_model import main
    from rsa_hf.training.run import script_errors

    with script_errors():
        main(["--help"] if list_keys else [*filter(None, [config]), *context.args])
