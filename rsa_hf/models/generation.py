"""`generate()` for models that hand something from one segment of a text to the next, in place of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor
from transformers.generation.utils import GenerationMixin

__all__ = ["MemoryGenerationMixin", "StateGenerationMixin"]


class _SegmentGenerationMixin(GenerationMixin):
    """What is handed on consists of tensors with rows on dim 0, and `carried` is the name of the argument."""

    carried: ClassVar[str]

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _expand_inputs_for_generation(self, expand_size: int = 1, **keywords: Any) -> Any:  # type: ignore[override]
        """For several sequences a row, and beams. transformers repeats tensors, but no tuples of them."""
        parts = keywords.get(self.carried)
        if parts is not None:
            keywords[self.carried] = tuple(part.repeat_interleave(expand_size, dim=0) for part in parts)
        return super()._expand_inputs_for_generation(expand_size=expand_size, **keywords)  # type: ignore[misc]

    def _reorder_cache(self, parts: Sequence[Tensor] | None, beams: Tensor) -> tuple[Tensor, ...] | None:
        return None if parts is None else tuple(part.index_select(0, beams.to(part.device)) for part in parts)


class MemoryGenerationMixin(_SegmentGenerationMixin):
    """For models whose argument and output is `mems`; a cache to `generate`."""

    carried = "mems"

    def prepare_inputs_for_generation(  # type: ignore[override]
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: Sequence[Tensor] | None = None,
        attention_mask: Tensor | None = None,
        mems: Sequence[Tensor] | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool = False,
        use_cache: bool | None = None,
        **keywords: Any,
    ) -> dict[str, Any]:
        """The next segment: all tokens, or those behind the memory, which `generate` calls `past_key_values`."""
        if past_key_values is not None and next_sequence_length is not None:
            input_ids, mems = input_ids[:, -next_sequence_length:], past_key_values
        inputs = {"inputs_embeds": inputs_embeds} if is_first_iteration and inputs_embeds is not None else {}
        return {
            **(inputs or {"input_ids": input_ids}),
            "attention_mask": attention_mask,
            "mems": mems,
            "use_cache": use_cache,
            **{name: value for name, value in keywords.items() if name != "labels"},
        }


class StateGenerationMixin(_SegmentGenerationMixin):
    """For models whose argument and output is `state`."""

    carried = "state"

    def prepare_inputs_for_generation(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        state: Sequence[Tensor] | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool = False,
        use_cache: bool | None = None,
        **keywords: Any,
    ) -> dict[str, Any]:
        """The next segment: all tokens, or the last one behind the state that the tokens before it left."""
        inputs: dict[str, Any] = {"input_ids": input_ids}
        if is_first_iteration and inputs_embeds is not None:
            inputs = {"inputs_embeds": inputs_embeds}
        elif not is_first_iteration and use_cache and state is not None:
            inputs = {"input_ids": input_ids[:, -1:]}
        for name in ("output_hidden_states", "output_attentions"):
            if name in keywords:
                inputs[name] = keywords[name]
        return {**inputs, "attention_mask": attention_mask, "state": state, "use_cache": use_cache}
