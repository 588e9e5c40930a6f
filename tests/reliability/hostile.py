"""Hostile input from a random generator: values, plans, run configs and lines of data."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from random import Random
from typing import Any

from rsa_hf import RSAConfig

PLAN_FIELDS = [field.name for field in fields(RSAConfig)]
NAMES = ["../x", "__class__", "h.0.attn.__class__", "h[0]", "", ".", "h..0", "h.0.attn\n", "h.0", "ø"]
NAMES += ["h." * 400, "x" * 10**5]
NUMBERS = [0, 1, 2, -1, 7, 2**31, 2**63, -(2**64), 10**400, 0.5, -0.0, 1e308, -1e308, 1e-320, 1e-40]
NUMBERS += [math.inf, -math.inf, math.nan]
WORDS = ["", "inf", "-inf", "nan", "1e999", "true", "no", "\ud800", "\0", "!!python/object:os.system", *NAMES[:3]]
WORDS += ["x" * 10**4]


def value(random: Random, depth: int = 0) -> Any:
    """Any JSON value, of the wrong type, size, sign or depth."""
    kind = random.randrange(8 if depth < 4 else 5)
    if kind < 2:
        return random.choice(NUMBERS)
    if kind == 2:
        return random.choice(WORDS)
    if kind == 3:
        return random.choice([None, True, False])
    if kind == 4:
        return random.randrange(-3, 9)
    if kind < 7:
        return [value(random, depth + 1) for _ in range(random.randrange(5))]
    return {random.choice(WORDS): value(random, depth + 1) for _ in range(random.randrange(3))}


def plan(random: Random) -> Any:
    """A plan: sometimes a valid one, mostly with a few fields of any value."""
    if random.random() < 0.02:
        return value(random)
    fields: dict[str, Any] = {}
    for name in random.sample(PLAN_FIELDS, random.randrange(5)):
        fields[name] = nearly_right(random, name) if random.random() < 0.7 else value(random)
    if random.random() < 0.03:
        fields[random.choice(WORDS)] = value(random)
    return fields


def nearly_right(random: Random, name: str) -> Any:
    if name == "gate_per_head":
        return random.random() < 0.5
    if name == "causal":
        return random.choice([True, False, [True, False], [False]])
    if name == "layers":
        return [random.randrange(-1, 3) for _ in range(random.randrange(3))] or None
    if name == "gate_init":
        return random.choice([0.0, -3, "-inf", random.choice(NUMBERS)])
    if name == "parameter_scale":
        return random.choice([1, 20, 1e6, 1e-6, random.choice(NUMBERS)])
    one = random.choice([0, 1, 1, 2, 3, 10**6])
    return random.choice([one, one, [one, 1], [1, 2, 3]] if name == "dilation" else [one, one, one, [one, 1]])


def spelled(random: Random, content: Any) -> str:
    """A value as JSON, sometimes with changed characters. It is read as YAML."""
    text = json.dumps(content)
    if random.random() < 0.3:
        characters = list(text)
        for _ in range(random.randrange(1, 4)):
            place = random.randrange(len(characters))
            characters[place] = random.choice("{}[]:,&*!?|>'\"%@`#-~ \n\t\0x9." + chr(random.randrange(32, 0x2FFF)))
        text = "".join(characters)
    return text


_LAUGHS = [
    f"{name}: &{name} [{', '.join(['*' + before] * 9)}]" for before, name in zip("abcdefghi", "bcdefghij", strict=True)
]
ODD_YAML = ["a: &a [*a]", "\n".join(["a: &a [1,1,1,1,1,1,1,1,1]", *_LAUGHS]), "[" * 5000, "{a: " * 5000, "9" * 5000]
ODD_YAML += ["!!bool maybe", "!!int x", "!!timestamp 2020-99-99", "!!python/object/apply:os.system ['false']"]
ODD_YAML += ["? [a]\n: 1", "<<: 1", "{" + ", ".join(f"k{i}: 1" for i in range(3000)) + "}", "\0"]


def run_config(random: Random) -> str:
    """The YAML file of a run."""
    if random.random() < 0.05:
        return random.choice(ODD_YAML)
    if random.random() < 0.05:
        return "rsa:\n  " + random.choice(ODD_YAML).replace("\n", "\n  ")
    sections = {
        "model": {"name_or_path": "gpt2"},
        "rsa": plan(random),
        "data": {random.choice(["source", "max_length", "seed", "min_characters", "defect_kinds"]): value(random)},
        "training": {random.choice(["learning_rate", "epochs", "max_steps", "seed", "output_dir"]): value(random)},
    }
    for name in list(sections):
        if random.random() < 0.1:
            sections[name] = value(random)
        elif random.random() < 0.5 and name != "model":
            del sections[name]
    return spelled(random, sections)


def data_line(random: Random) -> bytes:
    """A line of the defect data, which is JSON lines."""
    kind = random.random()
    if kind < 0.02:
        return random.choice([b"[" * 50_000, b'{"func":' * 20_000, b"\xff\xfe", b"9" * 5000, b"nan", b"{}", b"\x00"])
    row = {"func": "int f() {}", "target": random.choice([0, 1, True])}
    if kind < 0.6:
        row[random.choice(["func", "target"])] = value(random)
    if kind < 0.1:
        del row[random.choice(["func", "target"])]
    line = bytearray(json.dumps(value(random) if kind < 0.15 else row).encode())
    if random.random() < 0.3:
        for _ in range(random.randrange(1, 4)):
            line[random.randrange(len(line))] = random.randrange(256)
    return bytes(line).replace(b"\n", b" ")
