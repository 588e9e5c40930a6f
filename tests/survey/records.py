"""What a survey has found, kept in a JSON file type by type, so that it can be run in parts."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch
import transformers

import rsa_hf

__all__ = ["Records"]


def _versions() -> dict[str, str]:
    return {
        "rsa_hf": rsa_hf.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0],
        "python": platform.python_version(),
    }


class Records(dict[str, dict[str, Any]]):
    """A record (`survey_type`) for each type that was tried, written to the file as soon as it is set.

    Args:
        path: of the file; what it holds is read, unless it was found with other versions.
        fresh: begin with nothing.
    """

    def __init__(self, path: Path, fresh: bool = False) -> None:
        super().__init__()
        self.path = path
        self.versions = _versions()
        if path.exists() and not fresh:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["versions"] == self.versions:
                self.update(content["types"])

    def __setitem__(self, model_type: str, record: dict[str, Any]) -> None:
        super().__setitem__(model_type, record)
        content = {"versions": self.versions, "types": dict(sorted(self.items()))}
        beside = self.path.with_suffix(".tmp")
        beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(beside, self.path)
