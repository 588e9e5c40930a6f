"""Locks in config.json, which keep a transformers without rsa_hf from loading a patched checkpoint as a plain model.

Two values that transformers does not know, an attention implementation and a fusion type, make it raise an error with
the advice in `LOCK`. They are written to the file, and removed when a config is built from it.
"""

import json
from collections.abc import Callable
from typing import Any

from transformers.configuration_utils import PreTrainedConfig

from rsa_hf.saved_plan import lock_of, saved_plans
from rsa_hf.utils.files import atomic_write

LOCK = lock_of("checkpoint")


def wrap_to_json_file(original: Callable[..., Any]) -> Callable[..., Any]:
    """Write the config of a patched model with its locks."""

    def to_json_file(self: PreTrainedConfig, json_file_path: Any, *args: Any, **keywords: Any) -> None:
        if not saved_plans(self):
            original(self, json_file_path, *args, **keywords)
            return
        # Written in one step, so that there is never a config.json without its locks.
        with atomic_write(json_file_path) as temporary:
            original(self, temporary, *args, **keywords)
            content = json.loads(temporary.read_text(encoding="utf-8"))
            _lock(content)
            temporary.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    return to_json_file


def _lock(content: dict[str, Any]) -> None:
    """Add the locks to the JSON of a config and of the configs in it: a part of a model can be loaded alone."""
    content["attn_implementation"] = LOCK
    content["fusion_config"] = {**(content.get("fusion_config") or {}), LOCK: True}
    for part in content.values():
        if isinstance(part, dict) and "model_type" in part:
            _lock(part)


def wrap_config_post_init(original: Callable[..., Any]) -> Callable[..., Any]:
    """Remove the locks when a config is built, whoever read its file."""

    def post_init(self: PreTrainedConfig, **kwargs: Any) -> None:
        if str(kwargs.get("attn_implementation", "")).startswith("rsa_hf"):
            del kwargs["attn_implementation"]
        if isinstance(fusions := kwargs.get("fusion_config"), dict):
            kwargs["fusion_config"] = {name: x for name, x in fusions.items() if not name.startswith("rsa_hf")}
            if not kwargs["fusion_config"]:
                del kwargs["fusion_config"]
        original(self, **kwargs)

    return post_init
