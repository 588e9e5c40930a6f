"""Plain-text tables."""

from families import FULL_PLAN, build
from rsa_hf import patch_model, rsa_report
from rsa_hf.utils.text import format_table


def test_columns_are_aligned_below_a_head_with_a_rule():
    assert format_table([["a", "figure"], ["long name", "1"]]) == "a          figure\n---------  ------\nlong name  1"


def test_the_report_is_such_a_table():
    head, rule, first, *_ = str(rsa_report(patch_model(build("gpt2"), FULL_PLAN))).splitlines()
    assert head == "module    head  REM      d  gate    decay    theta    half-life"
    assert rule == "--------  ----  -------  -  ------  -------  -------  ---------"
    assert first.startswith("h.0.attn  0     regular  1  0.6225  ")
