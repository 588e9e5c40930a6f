"""Models that transformers lacks, as transformers models, one folder each. Importing this registers Auto classes."""

from rsa_hf.models import recurrent

__all__ = ["recurrent"]
