"""Models and the outputs that each gives alone. As a script it writes those of plain models, without rsa_hf."""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import PreTrainedModel

from architectures import build_adapted
from families import VOCAB, build_language_model

FAMILIES = ("gpt2", "llama", "bloom")
PLANS: tuple[dict[str, Any], ...] = (
    {"num_regular": 2, "num_cyclical_pairs": 1, "gate_init": 0.5},
    {"num_dilated_cyclical_pairs": 2, "dilation": [2, 3, 2, 5], "gate_init": 1.0, "layers": [1]},
)


def build(family: str) -> PreTrainedModel:
    """Build a plain model, with the same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build_adapted(family, language_model=True) if family == "bloom" else build_language_model(family)


@torch.no_grad()
def outputs(model: PreTrainedModel) -> list[torch.Tensor]:
    """Logits of a padded batch, and of the next two steps with a cache."""
    ids, found = torch.randint(3, VOCAB, (2, 11), generator=torch.Generator().manual_seed(1)), []
    mask, cache = torch.ones_like(ids).index_fill(1, torch.arange(2), 0), None
    for _ in range(3):
        output = model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
        found.append(output.logits)
        ids, cache = torch.full((2, 1), 5), output.past_key_values
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    written = {family: outputs(build(family)) for family in FAMILIES}
    assert "rsa_hf" not in sys.modules
    torch.save(written, sys.argv[1])
