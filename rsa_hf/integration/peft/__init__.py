"""PEFT adapters on models with RSA heads."""
