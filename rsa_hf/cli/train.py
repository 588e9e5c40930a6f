"""`rsa-hf train`: defect, lm."""

from __future__ import annotations

from typing import Annotated

import typer

from rsa_hf.cli.common import WITH_SETTINGS, Config, help_with_keys, install_hooks, user_input

__all__ = ["train"]

train = typer.Typer(no_args_is_help=True, help="Train a model, patched or plain, as a YAML file says.")


def _run(task: str, arguments: list[str]) -> None:
    install_hooks()
    from rsa_hf.training.steps import TrainingDivergedError

    with user_input(TrainingDivergedError):
        if task == "lm":
            from rsa_hf.tasks.language_modeling import main
        else:
            from rsa_hf.tasks.defect_detection import main
        main(arguments)


@train.command(**WITH_SETTINGS)
def defect(
    context: typer.Context,
    config: Config,
    _: Annotated[bool, help_with_keys(lambda: _run("defect", ["--help"]))] = False,
) -> None:
    """Train a defect detector. --key value after CONFIG overrides a key.

    On several processes: accelerate launch scripts/train_defect_detection.py CONFIG.

    Example: rsa-hf train defect configs/defect_minilm_embedded.yaml --max_steps 100 --output_dir outputs/defect
    """
    _run("defect", [config, *context.args])


@train.command(**WITH_SETTINGS)
def lm(
    context: typer.Context,
    config: Config,
    _: Annotated[bool, help_with_keys(lambda: _run("lm", ["--help"]))] = False,
) -> None:
    """Train a causal language model. --key value after CONFIG overrides a key.

    On several processes: accelerate launch scripts/train_language_model.py CONFIG.

    Example: rsa-hf train lm configs/lm_bytes_embedded.yaml --max_steps 100 --rsa null
    """
    _run("lm", [config, *context.args])
