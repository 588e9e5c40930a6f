"""Hostile input from a random generator: JSON values, plans, and damaged checkpoints.

Each of `DAMAGES` changes the files of a checkpoint's folder.
"""

import functools
import json
import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from file_edits import edit_json, edit_tensors
from rsa_hf import RSAConfig

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PLAN_FIELDS = [field.name for field in fields(RSAConfig)]
NAMES = ["../x", "__class__", "h.0.attn.__class__", "h[0]", "", ".", "h..0", "h.0.attn\n", "h.0", "ø"]
NAMES += ["h." * 400, "x" * 10**5]
NUMBERS = [0, 1, 2, -1, 7, 2**31, 2**63, -(2**64), 10**400, 0.5, -0.0, 1e308, -1e308, 1e-320, 1e-40]
NUMBERS += [math.inf, -math.inf, math.nan]
WORDS = ["", "inf", "-inf", "nan", "1e999", "true", "no", "\ud800", "\0", *NAMES[:3], "x" * 10**4]


# --- values and plans ------------------------------------------------------------------------------------------------


def value(random: Random, depth: int = 0) -> Any:
    """Any JSON value, of the wrong type, size, sign or depth."""
    kind = random.randrange(8 if depth < 4 else 5)
    if kind < 5:
        return random.choice([*NUMBERS, *WORDS, None, True, False, random.randrange(-3, 9)])
    if kind < 7:
        return [value(random, depth + 1) for _ in range(random.randrange(5))]
    return {random.choice(WORDS): value(random, depth + 1) for _ in range(random.randrange(3))}


def field(random: Random, name: str) -> Any:
    """The value of a field of a plan, mostly one that is nearly right."""
    if random.random() < 0.3:
        return value(random)
    if name == "causal":
        return random.choice([True, False, [True, False], [False]])
    if name == "layers":
        return [random.randrange(-1, 3) for _ in range(random.randrange(3))] or None
    if name.startswith("gate"):
        return random.choice([0.0, -3, True, "-inf", [-1, 1], [random.choice(NUMBERS), 0]])
    one = random.choice([0, 1, 1, 2, 3, 20, 10**6, 1e-6])
    return random.choice([one, one, [one, 1], [1, 2, 3]])


def plan(random: Random) -> Any:
    """A plan: sometimes a valid one, mostly with a few fields of any value."""
    if random.random() < 0.02:
        return value(random)
    content = {name: field(random, name) for name in random.sample(PLAN_FIELDS, random.randrange(5))}
    return content | ({random.choice(WORDS): value(random)} if random.random() < 0.03 else {})


# --- files ---------------------------------------------------------------------------------------------------------


def tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint. Shards are read in the order of their names, as by transformers."""
    whole, index = folder / WEIGHTS, folder / INDEX
    names = [WEIGHTS] if whole.exists() else sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    return {key: tensor for name in names for key, tensor in load_file(folder / name).items()}


def move_heads(folder: Path, old: str, new: str) -> None:
    """Move the RSA heads of one module to another, in plan, index and tensors."""

    def rename(keys: dict[str, Any]) -> None:
        for key in [key for key in keys if f"{old}.rsa." in key]:
            keys[key.replace(f"{old}.rsa.", f"{new}.rsa.")] = keys.pop(key)

    def change_plan(content: dict[str, Any]) -> None:
        modules = content["rsa"]["modules"]
        modules[modules.index(old)] = new

    for file in folder.glob("*.safetensors"):
        edit_tensors(file, rename)
    if (folder / INDEX).exists():
        edit_json(folder / INDEX, lambda content: rename(content["weight_map"]))
    edit_json(folder / CONFIG, change_plan)


def _config_bit(random: Random, folder: Path) -> None:
    """Change bits of letters and digits, half of the time of the plan: elsewhere the file is mostly no JSON any more."""
    changed = bytearray((folder / CONFIG).read_bytes())
    start = changed.index(b'"rsa"') if random.random() < 0.5 else 0
    end = changed.index(b"}", start) if start else len(changed)
    places = [i for i in range(start, end) if chr(changed[i]).isalnum()]
    for _ in range(random.randrange(1, 4)):
        changed[random.choice(places)] ^= 1 << random.randrange(4)
    (folder / CONFIG).write_bytes(changed)


# --- tensors: each edit takes the key of an RSA tensor, and of any tensor -------------------------------------------


def _shape(random: Random, content: dict[str, Tensor], one: str, other: str) -> None:
    size = len(content[one])
    content[one] = torch.zeros(random.choice([[0], [size + 1], [1, size], [size, 1], []]))


def _extra(random: Random, content: dict[str, Tensor], one: str, other: str) -> None:
    which = random.choice([one, other])
    name = which.replace("0", str(random.randrange(9))) + random.choice(["", "", "x", ".rsa.mu"])
    content[name] = content[which].clone()


IN_TENSORS: dict[str, Callable[[Random, dict[str, Tensor], str, str], object]] = {
    "swapped": lambda random, content, a, b: content.update({a: content[b].clone(), b: content[a].clone()}),
    "shape": _shape,
    "missing": lambda random, content, *keys: content.pop(random.choice(keys)),
    "extra": _extra,
    "dtype": lambda random, content, a, b: content.update({a: content[a].half()}),
    "name": lambda random, content, *keys: content.update(
        {random.choice(NAMES) or "x": content.pop(random.choice(keys))}
    ),
}


def _in_tensors(name: str, random: Random, folder: Path) -> None:
    def edit(content: dict[str, Tensor]) -> None:
        keys = sorted(content)
        IN_TENSORS[name](random, content, random.choice([key for key in keys if ".rsa." in key]), random.choice(keys))

    files = [file for file in sorted(folder.glob("*.safetensors")) if b".rsa." in file.read_bytes()]
    edit_tensors(random.choice(files), edit)


# --- config.rsa ----------------------------------------------------------------------------------------------------


def _plan(random: Random, rsa: dict[str, Any]) -> None:
    rsa["plan"].update({name: field(random, name) for name in random.sample(PLAN_FIELDS, random.randrange(1, 3))})


def _plan_that_fits(random: Random, rsa: dict[str, Any]) -> None:
    """Change the plan, but keep the shapes of its tensors."""
    fitting = {
        "dilation": [1, 2, 5, 65_536, 65_537, [1, 2, 3], [4, 4]],
        "gate_init": [0, -3, "-inf", "inf", [-1, 1]],
        "causal": [True, False, None],
        "parameter_scale": [1, 20, 1e6, 1e-6],
        "layers": [[0], [0, 1], [1, 2, 3], [10**9], [0, 4096], None],
    }
    name = random.choice(list(fitting))
    rsa["plan"][name] = random.choice(fitting[name])


def _section(random: Random, rsa: dict[str, Any]) -> None:
    name = random.choice(["format_version", "modules", "plan", "x" * 10**5])
    if random.random() < 0.3:
        rsa.pop(name, None)
    else:
        rsa[name] = value(random)


def _modules(random: Random, rsa: dict[str, Any]) -> None:
    modules = rsa["modules"]
    name = random.choice([*NAMES, None, 3, modules[0], modules[0] + ".x", "h.0.mlp", "h.0", "wte", "h"])
    modules[random.choice([0, len(modules)]) :] = [name]


IN_PLAN = {"plan": _plan, "plan that fits": _plan_that_fits, "section": _section, "modules": _modules}


def _in_plan(name: str, random: Random, folder: Path) -> None:
    edit_json(folder / CONFIG, lambda content: IN_PLAN[name](random, content["rsa"]))


DAMAGES: dict[str, Callable[[Random, Path], object]] = {
    "config bit": _config_bit,
    "gone": lambda random, folder: random.choice(sorted(folder.iterdir())).unlink(),
    "no section": lambda random, folder: edit_json(folder / CONFIG, lambda content: content.update(rsa=value(random))),
    **{name: functools.partial(_in_tensors, name) for name in IN_TENSORS},
    **{name: functools.partial(_in_plan, name) for name in IN_PLAN},
}
