"""P V, the product of the recurrence encoding matrices with the values, without building P where that is possible."""

from rsa_hf.ops.rem_product import rem_product

__all__ = ["rem_product"]
