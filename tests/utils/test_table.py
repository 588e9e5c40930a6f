"""Plain-text tables."""

from rsa_hf.utils.text import format_table


def test_columns_are_aligned_below_a_head_with_a_rule():
    assert format_table([["a", "figure"], ["long name", "1"]]) == "a          figure\n---------  ------\nlong name  1"
