"""Helpers that several rooms need and no library provides."""
