"""The survey of every model type in transformers: tiny models, checks, and broken RSA that the checks must catch."""
