"""Damage to checkpoints, and their content read by the file format alone.

A checkpoint is a dictionary of its files: name → bytes. Each of `KINDS` changes such a dictionary.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor

from reliability import hostile

Files = dict[str, bytes]
Change = Callable[[Random, Files], None]

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES |= {"I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool}


# --- the format of safetensors: a length, a JSON header, a body -----------------------------------------------------


def split(content: bytes) -> tuple[dict[str, Any], bytes]:
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def joined(header: dict[str, Any] | str, body: bytes) -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text)) + text + body


def parts_of(content: bytes) -> dict[str, tuple[dict[str, Any], bytes]]:
    """The entry of each tensor in the header, and its bytes."""
    header, body = split(content)
    header.pop("__metadata__", None)
    return {key: (entry, body[slice(*entry["data_offsets"])]) for key, entry in header.items()}


def packed(parts: dict[str, tuple[dict[str, Any], bytes]]) -> bytes:
    """The content of a file with these tensors."""
    header, body = {"__metadata__": {"format": "pt"}}, b""
    for key, (entry, content) in parts.items():
        header[key] = {**entry, "data_offsets": [len(body), len(body) + len(content)]}
        body += content
    return joined(header, body)


def tensors(files: Files) -> dict[str, Tensor]:
    """All tensors of a checkpoint. Shards are read in the order of their names, as by transformers."""
    names = [WEIGHTS] if WEIGHTS in files else sorted(set(json.loads(files[INDEX])["weight_map"].values()))
    return {key: tensor for name in names for key, tensor in tensors_of(files[name]).items()}


def tensors_of(content: bytes) -> dict[str, Tensor]:
    return {
        key: torch.frombuffer(bytearray(values), dtype=DTYPES[entry["dtype"]]).reshape(entry["shape"])
        if values
        else torch.empty(entry["shape"])
        for key, (entry, values) in parts_of(content).items()
    }


# --- damage to any file ---------------------------------------------------------------------------------------------


def flipped(random: Random, content: bytes, start: int, end: int) -> bytes:
    """Change one to three bits."""
    changed = bytearray(content)
    for _ in range(random.randrange(1, 4)):
        changed[random.randrange(start, end)] ^= 1 << random.randrange(8)
    return bytes(changed)


def _weights(random: Random, files: Files, holding: bytes = b"") -> str:
    return random.choice([name for name in files if name.endswith(".safetensors") and holding in files[name]])


def header_bit(random: Random, files: Files) -> None:
    name = _weights(random, files)
    (size,) = struct.unpack("<Q", files[name][:8])
    files[name] = flipped(random, files[name], 0 if random.random() < 0.1 else 8, 8 + size)


def body_bit(random: Random, files: Files) -> None:
    """Change bits of an RSA tensor in half the cases, otherwise of any tensor."""
    name = _weights(random, files)
    header, body = split(files[name])
    start = len(files[name]) - len(body)
    rsa = [entry["data_offsets"] for key, entry in header.items() if ".rsa." in key]
    first, last = random.choice(rsa) if rsa and random.random() < 0.5 else (0, len(body))
    files[name] = flipped(random, files[name], start + first, start + last)


def truncated(random: Random, files: Files) -> None:
    name = random.choice(list(files))
    files[name] = files[name][: random.choice([0, random.randrange(len(files[name])), len(files[name]) - 1])]


def length(random: Random, files: Files) -> None:
    name = _weights(random, files)
    files[name] = struct.pack("<Q", random.choice([0, 1, 2, 99, 10**9, 2**63, 2**64 - 1])) + files[name][8:]


_OTHERS = [b"", b"\0" * 100, b"<html>404</html>", b"\x80\x04K\x01.", b"[]", b"null", b'"x"', b"9" * 5000]
_OTHERS += [b"[" * 200_000]


def other_content(random: Random, files: Files) -> None:
    files[random.choice(list(files))] = random.choice(_OTHERS)


def gone(random: Random, files: Files) -> None:
    del files[random.choice(list(files))]


# --- damage to tensors ----------------------------------------------------------------------------------------------

# Takes the header or the tensors by key, the key of an RSA tensor, and the key of any tensor.
Edit = Callable[[Random, dict[str, Any], str, str], None]


def in_header(edit: Edit) -> Change:
    def change(random: Random, files: Files) -> None:
        name = _weights(random, files, b".rsa.")
        header, body = split(files[name])
        names = [key for key in header if key != "__metadata__"]
        edit(random, header, random.choice([key for key in names if ".rsa." in key]), random.choice(names))
        files[name] = joined(header, body)

    return change


def in_parts(edit: Edit) -> Change:
    """Edit the tensors and write a valid file."""

    def change(random: Random, files: Files) -> None:
        name = _weights(random, files, b".rsa.")
        parts = parts_of(files[name])
        edit(random, parts, random.choice([key for key in parts if ".rsa." in key]), random.choice(list(parts)))
        files[name] = packed(parts)

    return change


def _swap(random: Random, header: dict[str, Any], one: str, other: str) -> None:
    header[one], header[other] = header[other], header[one]


def _retype(random: Random, header: dict[str, Any], one: str, other: str) -> None:
    types = ["I32", "U32", "F16", "BF16", "F64", "BOOL", "F8_E4M3", "C64", "X9", "", 3, None]
    header[one]["dtype"] = random.choice(types)


def _reshape(random: Random, header: dict[str, Any], one: str, other: str) -> None:
    shape = header[one]["shape"]
    shapes = [[], [0], [-1], [2**40], [2**63, 2], [1, 1], [1, *shape], [*shape, 1], "x", None, [0.5]]
    header[one]["shape"] = random.choice(shapes)


def _move(random: Random, header: dict[str, Any], one: str, other: str) -> None:
    start, end = header[one]["data_offsets"]
    places = [[end, start], [start, end + 4], [start - 4, end], [0, 2**62], [-1, end], [start]]
    header[one]["data_offsets"] = random.choice([*places, header[other]["data_offsets"]])


def _drop(random: Random, parts: dict[str, Any], one: str, other: str) -> None:
    del parts[random.choice([one, other])]


def _add(random: Random, parts: dict[str, Any], one: str, other: str) -> None:
    which = random.choice([one, other])
    parts[which.replace("0", str(random.randrange(9))) + random.choice(["", "", "x", ".rsa.mu"])] = parts[which]


def _rename(random: Random, parts: dict[str, Any], one: str, other: str) -> None:
    parts[random.choice(hostile.NAMES) or "x"] = parts.pop(random.choice([one, other]))


def _renumber(random: Random, parts: dict[str, Any], one: str, other: str) -> None:
    """Set one entry of an RSA tensor, or all, to NaN, infinity, or a number that may be far too large."""
    entry, content = parts[one]
    size = random.choice([1, len(content) // 4])
    value = random.choice([math.nan, math.inf, -math.inf, 1e38, -1e38, 1e13, 3.0, -0.0])
    parts[one] = entry, struct.pack("<f", value) * size + content[4 * size :]


def _retype_whole(random: Random, parts: dict[str, Any], one: str, other: str) -> None:
    """Store the values of an RSA tensor in another type."""
    entry, content = parts[one]
    dtype = random.choice(["F64", "F16", "BF16", "I64", "U8"])
    values = torch.frombuffer(bytearray(content), dtype=torch.float32).to(DTYPES[dtype])
    parts[one] = {**entry, "dtype": dtype}, values.view(torch.uint8).numpy().tobytes()


def tensor_twice(random: Random, files: Files) -> None:
    """Name a tensor twice in one header."""
    name = _weights(random, files)
    header, body = split(files[name])
    key = random.choice([key for key in header if key != "__metadata__"])
    text, entry = json.dumps(header), random.choice(list(header.values()))
    files[name] = joined(f"{text[:-1]}, {json.dumps(key)}: {json.dumps(entry)}}}", body)


# --- damage to the plan ---------------------------------------------------------------------------------------------


def edit_json(files: Files, name: str, edit: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(files[name])
    edit(content)
    files[name] = json.dumps(content).encode()


def in_config(edit: Callable[[Random, dict[str, Any]], None]) -> Change:
    return lambda random, files: edit_json(files, CONFIG, lambda content: edit(random, content))


def config_bit(random: Random, files: Files) -> None:
    _letter_bit(random, files, 0, len(files[CONFIG]))


def plan_bit(random: Random, files: Files) -> None:
    start = files[CONFIG].index(b'"rsa"')
    _letter_bit(random, files, start, files[CONFIG].index(b"}", start))


def _letter_bit(random: Random, files: Files, start: int, end: int) -> None:
    """Change one bit, mostly of a letter or a digit: elsewhere the file is mostly no JSON any more."""
    content = bytearray(files[CONFIG])
    places = [place for place in range(start, end) if chr(content[place]).isalnum()]
    if random.random() < 0.8:
        content[random.choice(places)] ^= 1 << random.randrange(4)
        files[CONFIG] = bytes(content)
    else:
        files[CONFIG] = flipped(random, files[CONFIG], start, end)


def _plan(random: Random, content: dict[str, Any]) -> None:
    plan = content["rsa"]["plan"]
    for name in random.sample(hostile.PLAN_FIELDS, random.randrange(1, 3)):
        plan[name] = hostile.nearly_right(random, name) if random.random() < 0.6 else hostile.value(random)


def _plan_that_fits(random: Random, content: dict[str, Any]) -> None:
    """Change the plan, but keep the shapes of its tensors."""
    plan = content["rsa"]["plan"]
    values = {
        "dilation": [1, 2, 5, 65_536, 65_537, [1, 2, 3], [4, 4]],
        "gate_init": [0, -3, "-inf", "inf", [-1, 1]],
        "causal": [True, False, None],
        "parameter_scale": [1, 20, 1e6, 1e-6],
        "layers": [[0], [0, 1], [1, 2, 3], [10**9], [0, 4096], None],
        "num_regular": [plan["num_dilated_regular"]],
    }
    name = random.choice(list(values))
    if name == "num_regular":
        plan["num_dilated_regular"] = plan[name]
    plan[name] = random.choice(values[name])


def _plan_section(random: Random, content: dict[str, Any]) -> None:
    rsa = content["rsa"]
    name = random.choice(["format_version", "modules", "plan", "x" * 10**5])
    if random.random() < 0.2:
        content["rsa"] = hostile.value(random)
    elif random.random() < 0.3:
        rsa.pop(name, None)
    else:
        rsa[name] = hostile.value(random)


def _modules(random: Random, content: dict[str, Any]) -> None:
    modules = content["rsa"]["modules"]
    name = random.choice([*hostile.NAMES, None, 3, modules[0], modules[0] + ".x", "h.0.mlp", "h.0", "wte", "h"])
    if random.random() < 0.5:
        modules.append(name)
    else:
        modules[random.randrange(len(modules))] = name


def move_heads(files: Files, old: str, new: str) -> None:
    """Move the RSA heads of one module to another, in plan, index and tensors."""

    def named(keys: dict[str, Any]) -> dict[str, Any]:
        return {key.replace(f"{old}.rsa.", f"{new}.rsa."): value for key, value in keys.items()}

    for name in [name for name in files if name.endswith(".safetensors")]:
        header, body = split(files[name])
        files[name] = joined(named(header), body)
    if INDEX in files:
        edit_json(files, INDEX, lambda content: content.update(weight_map=named(content["weight_map"])))
    modules = [new if module == old else module for module in json.loads(files[CONFIG])["rsa"]["modules"]]
    edit_json(files, CONFIG, lambda content: content["rsa"].update(modules=modules))


# --- damage to shards -----------------------------------------------------------------------------------------------


def shards(random: Random, files: Files) -> None:
    """Make the index name a missing file or one outside the folder, or make it invalid."""
    index = json.loads(files[INDEX])
    weights = index["weight_map"]
    key = random.choice(list(weights))
    kind = random.randrange(5)
    if kind == 0:
        weights[key] = random.choice(["absent.safetensors", "", ".", 3, None, "x" * 300, "a\0b", "config.json"])
    elif kind == 1:
        place = random.choice(["../outside.safetensors", "/etc/passwd", "sub/../../outside.safetensors", "//x"])
        weights.update(dict.fromkeys(weights if random.random() < 0.5 else [key], place))
    elif kind == 2:
        index[random.choice(["weight_map", "metadata"])] = hostile.value(random)
    elif kind == 3:
        index.pop(random.choice(["weight_map", "metadata"]))
    else:
        files["copy.safetensors"] = files[_weights(random, files)]
        weights[key] = "copy.safetensors"
    files[INDEX] = json.dumps(index).encode()


KINDS: dict[str, Change] = {
    "config bit": config_bit,
    "plan bit": plan_bit,
    "header bit": header_bit,
    "body bit": body_bit,
    "truncated": truncated,
    "length": length,
    "other content": other_content,
    "gone": gone,
    "swapped": in_header(_swap),
    "missing": in_parts(_drop),
    "extra": in_parts(_add),
    "dtype": in_header(_retype),
    "dtype and values": in_parts(_retype_whole),
    "shape": in_header(_reshape),
    "place": in_header(_move),
    "name": in_parts(_rename),
    "number": in_parts(_renumber),
    "tensor twice": tensor_twice,
    "plan": in_config(_plan),
    "plan that fits": in_config(_plan_that_fits),
    "section": in_config(_plan_section),
    "modules": in_config(_modules),
    "shards": shards,
}
