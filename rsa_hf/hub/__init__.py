"""Sharing a patched model on the Hub: its model card, and pushing a folder."""
