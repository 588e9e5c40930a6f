"""`rsa-hf train`: defect, lm."""

from typing import Annotated

import typer

from rsa_hf.cli.common import WITH_SETTINGS, list_keys, task_module

train = typer.Typer(no_args_is_help=True, help="Train a model, patched or plain, with transformers' Trainer.")


@train.command(**WITH_SETTINGS)
def defect(context: typer.Context, _: Annotated[bool, list_keys("defect")] = False) -> None:
    """Train a defect detector: rsa-hf train defect [CONFIG] [--key value …].

    CONFIG is a YAML file of keys; configs/ has commented ones. --key value overrides it. The same command again
    continues the run from its newest checkpoint. On several processes: torchrun --nproc-per-node 2 --no-python
    rsa-hf train defect CONFIG.

    Example: rsa-hf train defect configs/defect_minilm_embedded.yaml --max_steps 100 --output_dir outputs/defect
    """
    task_module("defect").main(context.args)


@train.command(**WITH_SETTINGS)
def lm(context: typer.Context, _: Annotated[bool, list_keys("lm")] = False) -> None:
    """Train a causal language model: rsa-hf train lm [CONFIG] [--key value …].

    CONFIG is a YAML file of keys; configs/ has commented ones. --key value overrides it. The same command again
    continues the run from its newest checkpoint. On several processes: torchrun --nproc-per-node 2 --no-python
    rsa-hf train lm CONFIG.

    Example: rsa-hf train lm configs/lm_bytes_embedded.yaml --max_steps 100 --rsa none
    """
    task_module("lm").main(context.args)
