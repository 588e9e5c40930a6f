"""Upload a saved checkpoint to the Hub, and nothing beside it."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from huggingface_hub import HfApi, constants
from transformers import AutoConfig

from rsa_hf.saved_plan import saved_plans
from rsa_hf.utils.credentials import holds_credentials

__all__ = ["push_folder"]

# What a checkpoint is made of. Not optimiser states and arguments of a Trainer, which are pickled, logs, checkpoints.
TEXTS = ["*.json", "*.txt", "*.jinja", "additional_chat_templates/*.jinja", "README.md"]
UPLOADED = [*TEXTS, "*.safetensors", "*.model", "rsa.png"]


def push_folder(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    message: str | None = None,
) -> str:
    """Upload the folder of a patched checkpoint: weights in safetensors, config, tokenizer, card and picture.

    The token is the one of `hf auth login`, or of the environment variable `HF_TOKEN`. One that stands anywhere else,
    in an address or in a file of the folder, is refused: it would be shown in messages, or to everybody.

    Args:
        folder: where a patched model was saved.
        repo_id: "user/name"; made where it does not exist.
        private: whether a repository that is made is private; None: as the user has set it on the Hub.
        revision: the branch; None: main.
        message: of the commit.

    Returns:
        The address of the commit.

    Raises:
        OSError: the folder, or the Hub, cannot be reached, or the Hub says no.
        ValueError: the folder holds no patched checkpoint with weights in safetensors; or there is a token or a
            password in an argument, in the Hub's address or in a file.
    """
    given = {"repo_id": repo_id, "revision": revision, "message": message, "HF_ENDPOINT": constants.ENDPOINT}
    for name, value in given.items():
        if value is not None and holds_credentials(value):
            raise ValueError(
                f"there is a token or a password in {name}, where messages would show it. Leave it out: log in with "
                "`hf auth login`, or set HF_TOKEN. Where others may have seen it, make a new one."
            )
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: there is no such folder. Name the folder of a checkpoint.")
    if not (folder / "config.json").is_file() or not saved_plans(AutoConfig.from_pretrained(folder)):
        raise ValueError(f"{folder} holds no checkpoint with RSA heads: save a patched model there.")
    if not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"{folder} has no weights in safetensors, without which rsa_hf does not load what is downloaded. Save the "
            "model again with save_pretrained."
        )
    for path in _matching(folder, TEXTS):
        if holds_credentials(path.read_text(encoding="utf-8", errors="replace")):
            raise ValueError(f"there is a token or a password in {path}, which would be uploaded. Take it out first.")
    api = HfApi()
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    commit = api.upload_folder(
        repo_id=repo_id,
        folder_path=folder,
        # By name: to the Hub's client a * reaches into folders too, such as those of a Trainer's checkpoints.
        allow_patterns=[glob.escape(path.relative_to(folder).as_posix()) for path in _matching(folder, UPLOADED)],
        revision=revision,
        commit_message=message or "Upload a model with RSA heads",
    )
    return str(commit.commit_url)


def _matching(folder: Path, patterns: list[str]) -> list[Path]:
    return [path for pattern in patterns for path in folder.glob(pattern)]
