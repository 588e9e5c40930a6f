"""Locks in config.json, which keep a transformers without rsa_hf from loading a patched checkpoint as a plain model.

Two values that transformers does not know, an attention implementation and a fusion type, make it raise an error with
the advice in `LOCK`. They are written to the file, and removed when it is read.
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
            content["attn_implementation"] = LOCK
            content["fusion_config"] = {**(content.get("fusion_config") or {}), LOCK: True}
            temporary.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    return to_json_file


def wrap_dict_from_json_file(original: Callable[..., Any]) -> Callable[..., Any]:
    """Remove the locks when a config with a plan is read. A damaged one, with locks but no plan, stays locked."""

    def _dict_from_json_file(cls: type[PreTrainedConfig], json_file: Any) -> Any:
        content = original(cls, json_file)
        parts = (content, *content.values()) if isinstance(content, dict) else ()
        if not any(isinstance(part, dict) and part.get("rsa") is not None for part in parts):
            return content
        if str(content.get("attn_implementation", "")).startswith("rsa_hf"):
            del content["attn_implementation"]
        if isinstance(fusions := content.get("fusion_config"), dict):
            content["fusion_config"] = {name: x for name, x in fusions.items() if not name.startswith("rsa_hf")}
            if not content["fusion_config"]:
                del content["fusion_config"]
        return content

    return _dict_from_json_file
