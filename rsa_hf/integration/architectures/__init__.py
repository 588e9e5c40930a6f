"""Attention modules that do not use transformers' attention interface: the table of them, and how each is run."""
