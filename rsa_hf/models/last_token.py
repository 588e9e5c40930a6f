"""Where a row's last token is, for models that classify by it."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["at_last_token", "mask_until_last_token"]


def mask_until_last_token(
    attention_mask: Tensor | None, input_ids: Tensor | None, pad_token_id: int | None
) -> Tensor | None:
    """The attention mask; where there is none, 1 up to each row's last token that is not `pad_token_id`.

    Padding is at the end then: a `pad_token_id` before the last token counts as a token.

    Args:
        attention_mask: shape [B, L], or None.
        input_ids: shape [B, T], or None.
        pad_token_id: of padding, or None.

    Returns:
        Shape [B, L] or [B, T]; None where nothing tells of padding.
    """
    if attention_mask is not None or input_ids is None or pad_token_id is None:
        return attention_mask
    return (input_ids != pad_token_id).long().flip(1).cummax(1).values.flip(1)


def at_last_token(hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The hidden states of each row's last token that is not padding: [B, n].

    Args:
        hidden: of a segment, shape [B, T, n].
        attention_mask: shape [B, L], 0 for padding; its last T columns are the segment. None: there is no padding.
    """
    if attention_mask is None:
        return hidden[:, -1]
    B, T, _ = hidden.shape
    last = (attention_mask[:, -T:].bool() * torch.arange(T, device=hidden.device)).argmax(dim=1)
    return hidden[torch.arange(B, device=hidden.device), last]
