"""Models that transformers lacks, as transformers models, one folder each. Importing this registers Auto classes."""

from rsa_hf.models import recurrent, transformer_xl

__all__ = ["recurrent", "transformer_xl"]
