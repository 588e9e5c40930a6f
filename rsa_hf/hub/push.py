"""Upload the folder of a patched checkpoint to the Hub."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from huggingface_hub import HfApi, constants
from transformers import AutoConfig

from rsa_hf.saved_plan import saved_plans
from rsa_hf.utils.text import holds_credentials

__all__ = ["push_folder"]

# The files of a checkpoint. Not uploaded: logs, nested checkpoints and a Trainer's pickled optimiser and arguments.
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

    The token is the one of `hf auth login`, or the environment variable `HF_TOKEN`. A token found anywhere else, in
    an argument, an address or a file of the folder, is refused, because messages or the Hub would show it.

    Args:
        folder: where a patched model was saved.
        repo_id: the repository, "user/name". It is created if it does not exist.
        private: whether a new repository is private; None: as the user has set it on the Hub.
        revision: the branch; None: main.
        message: the commit message.

    Returns:
        The address of the commit.

    Raises:
        OSError: the folder does not exist, or the Hub cannot be reached or refuses the upload.
        ValueError: the folder holds no patched checkpoint with weights in safetensors; or an argument, the Hub's
            address or a file holds a token or a password.
    """
    given = {"repo_id": repo_id, "revision": revision, "message": message, "HF_ENDPOINT": constants.ENDPOINT}
    for name, value in given.items():
        if value is not None and holds_credentials(value):
            raise ValueError(
                f"there is a token or a password in {name}, where messages would show it. Leave it out: log in with "
                "`hf auth login`, or set HF_TOKEN. If others may have seen it, make a new one."
            )
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: there is no such folder. Name the folder of a checkpoint.")
    if not (folder / "config.json").is_file() or not saved_plans(AutoConfig.from_pretrained(folder)):
        raise ValueError(f"{folder} holds no checkpoint with RSA heads. Save a patched model there.")
    if not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"{folder} has no weights in safetensors, and rsa_hf does not load other weights from the Hub. Save the "
            "model again with save_pretrained."
        )
    for path in _matching(folder, TEXTS):
        if holds_credentials(path.read_text(encoding="utf-8", errors="replace")):
            raise ValueError(f"there is a token or a password in {path}, which would be uploaded. Remove it first.")
    api = HfApi()
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    commit = api.upload_folder(
        repo_id=repo_id,
        folder_path=folder,
        # Escaped paths, not patterns: the Hub's client lets * match subfolders, such as a Trainer's checkpoints.
        allow_patterns=[glob.escape(path.relative_to(folder).as_posix()) for path in _matching(folder, UPLOADED)],
        revision=revision,
        commit_message=message or "Upload a model with RSA heads",
    )
    return str(commit.commit_url)


def _matching(folder: Path, patterns: list[str]) -> list[Path]:
    return [path for pattern in patterns for path in folder.glob(pattern)]
