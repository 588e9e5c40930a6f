"""Share a patched model on the Hub: its model card. `hf upload` and `push_to_hub` upload it with the model."""

from rsa_hf.hub.card import write_card

__all__ = ["write_card"]
