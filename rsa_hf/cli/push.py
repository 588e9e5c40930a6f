"""`rsa-hf push`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rsa_hf.cli.common import UserError, install_hooks, user_input

__all__ = ["push"]


def push(
    folder: Annotated[Path, typer.Argument(help="Folder of a patched checkpoint.")],
    repo: Annotated[str, typer.Argument(help="USER/NAME on the Hub, created if needed.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch; default main.")] = None,
) -> None:
    """Upload a patched checkpoint to the Hub: weights in safetensors, config, tokenizer, model card and picture.

    Log in with `hf auth login`, or set HF_TOKEN.

    Example: rsa-hf push outputs/defect_minilm/best someone/codebert-rsa --private
    """
    install_hooks()
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]

    from rsa_hf.hub.push import push_folder
    from rsa_hf.utils.text import without_credentials

    with user_input():
        try:
            print(f"pushed: {push_folder(folder, repo, private=private or None, revision=revision)}")
        except HfHubHTTPError as error:
            login = " Log in with `hf auth login`, or set HF_TOKEN to a token that may write."
            status = error.response.status_code if error.response is not None else None
            raise UserError(f"{without_credentials(str(error))}{login if status in (401, 403) else ''}") from error
        except HTTPError as error:
            raise UserError(f"the Hub cannot be reached: {without_credentials(str(error))}") from error
