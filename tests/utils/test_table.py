"""Tables on a terminal."""

from families import FULL_PLAN, build
from rsa_hf import RSAConfig, patch_model, rsa_report
from rsa_hf.utils.text import format_table


def test_columns_and_the_rule_below_the_head():
    assert format_table([["a", "figure"], ["long name", "1"]]) == "a          figure\n---------  ------\nlong name  1"


def test_the_report_is_one():
    head, rule, first, *_ = str(rsa_report(patch_model(build("gpt2"), RSAConfig(**FULL_PLAN)))).splitlines()
    assert head == "module    head  REM      d  gate    decay    theta    half-life"
    assert rule == "--------  ----  -------  -  ------  -------  -------  ---------"
    assert first.startswith("h.0.attn  0     regular  1  0.6225  ")
