"""Hooks into config.json: locks that keep a transformers without `rsa_hf` from loading a patched checkpoint as plain.

`PreTrainedConfig.to_json_file` puts them on in the file, `_dict_from_json_file` takes them off in memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from transformers.configuration_utils import PreTrainedConfig

from rsa_hf.saved_plan import read_plan, saved_plans

__all__ = ["LOCK", "wrap_dict_from_json_file", "wrap_to_json_file"]

# What a transformers without rsa_hf prints when it meets the lock, so it has to tell what to do.
LOCK = "rsa_hf (this checkpoint has RSA heads: pip install rsa_hf, then import rsa_hf before loading it)"


def wrap_to_json_file(original: Callable[..., Any]) -> Callable[..., Any]:
    """Lock the config of a patched model."""

    def to_json_file(self: PreTrainedConfig, json_file_path: Any, *args: Any, **keywords: Any) -> None:
        if not saved_plans(self):
            original(self, json_file_path, *args, **keywords)
            return
        # Written beside and renamed: at no moment is there a config.json without its locks.
        beside = f"{os.fspath(json_file_path)}.{os.getpid()}.tmp"
        try:
            original(self, beside, *args, **keywords)
            with open(beside, encoding="utf-8") as file:
                content = json.load(file)
            content["attn_implementation"] = LOCK
            content["fusion_config"] = {**(content.get("fusion_config") or {}), LOCK: True}
            with open(beside, "w", encoding="utf-8") as file:
                file.write(json.dumps(content, indent=2, sort_keys=True) + "\n")
            os.replace(beside, json_file_path)
        except BaseException:
            if os.path.exists(beside):
                os.remove(beside)
            raise

    return to_json_file


def wrap_dict_from_json_file(original: Callable[..., Any]) -> Callable[..., Any]:
    """Take the locks off."""

    def _dict_from_json_file(cls: type[PreTrainedConfig], json_file: Any) -> Any:
        content = original(cls, json_file)
        if isinstance(content, dict):
            # Before anything is built: a plan from a file may ask for any amount of memory.
            plans = [
                part["rsa"]
                for part in (content, *content.values())
                if isinstance(part, dict) and part.get("rsa") is not None
            ]
            for plan in plans:
                read_plan(plan)
            if plans:
                _require_unique_keys(json_file)
            if _take_off_locks(content) and not plans:
                raise ValueError(
                    f"{json_file} says that its checkpoint has RSA heads, but holds no plan for them (rsa). The file "
                    "is damaged: get it again, or save the model again."
                )
        return content

    return _dict_from_json_file


def _require_unique_keys(json_file: Any) -> None:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(
                f"{json_file} has {twice!r:.200} more than once in one mapping: which one holds is not clear."
            )
        return content

    with open(json_file, encoding="utf-8") as file:
        json.load(file, object_pairs_hook=unique)


def _take_off_locks(content: dict[str, Any]) -> bool:
    """Take the locks off a config; whether there were any."""
    before = len(content)
    if str(content.get("attn_implementation", "")).startswith("rsa_hf"):
        del content["attn_implementation"]
    fusions = content.get("fusion_config")
    if not isinstance(fusions, dict):
        return len(content) < before
    kept = {name: value for name, value in fusions.items() if not name.startswith("rsa_hf")}
    if kept:
        content["fusion_config"] = kept
    elif fusions:
        del content["fusion_config"]
    return len(content) < before or len(kept) < len(fusions)
