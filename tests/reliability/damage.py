"""Checkpoints that something has happened to, and what their files say, read by their format alone.

A checkpoint is a dictionary of its files: name → bytes. Each of `KINDS` and `ADAPTER_KINDS` changes such a dictionary.
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

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


# --- the format of safetensors: a length, a header of JSON, a body --------------------------------------------------


def split(content: bytes) -> tuple[dict[str, Any], bytes]:
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def joined(header: dict[str, Any] | str, body: bytes) -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text)) + text + body


def tensors_of(content: bytes) -> dict[str, Tensor]:
    header, body = split(content)
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            flat = torch.frombuffer(bytearray(body[start:end]), dtype=DTYPES[entry["dtype"]]) if end > start else None
            found[name] = torch.empty(entry["shape"]) if flat is None else flat.reshape(entry["shape"])
    return found


def parts_of(content: bytes) -> dict[str, tuple[dict[str, Any], bytes]]:
    """What the header says of each tensor, and its bytes."""
    header, body = split(content)
    return {
        key: (entry, body[slice(*entry["data_offsets"])]) for key, entry in header.items() if key != "__metadata__"
    }


def packed(parts: dict[str, tuple[dict[str, Any], bytes]]) -> bytes:
    """A file with these tensors, one behind the other."""
    header, body = {}, b""
    for key, (entry, content) in parts.items():
        header[key] = {**entry, "data_offsets": [len(body), len(body) + len(content)]}
        body += content
    return joined({"__metadata__": {"format": "pt"}, **header}, body)


def tensors(files: Files) -> dict[str, Tensor]:
    """All tensors of a checkpoint; of shards in the order of their names, as transformers reads them."""
    if WEIGHTS in files:
        return tensors_of(files[WEIGHTS])
    found = {}
    for name in sorted(set(json.loads(files[INDEX])["weight_map"].values())):
        found |= tensors_of(files[name])
    return found


# --- what may happen to any file ------------------------------------------------------------------------------------


def flipped(random: Random, content: bytes, start: int, end: int) -> bytes:
    """One to three bits changed."""
    changed = bytearray(content)
    for _ in range(random.randrange(1, 4)):
        changed[random.randrange(start, end)] ^= 1 << random.randrange(8)
    return bytes(changed)


def _weights(random: Random, files: Files) -> str:
    return random.choice([name for name in files if name.endswith(".safetensors")])


def header_bit(random: Random, files: Files) -> None:
    name = _weights(random, files)
    (size,) = struct.unpack("<Q", files[name][:8])
    files[name] = flipped(random, files[name], 0 if random.random() < 0.1 else 8, 8 + size)


def body_bit(random: Random, files: Files) -> None:
    """In an RSA tensor as often as in any other."""
    name = _weights(random, files)
    header, body = split(files[name])
    start = len(files[name]) - len(body)
    rsa = [entry for key, entry in header.items() if ".rsa." in key]
    if rsa and random.random() < 0.5:
        first, last = random.choice(rsa)["data_offsets"]
        files[name] = flipped(random, files[name], start + first, start + last)
    else:
        files[name] = flipped(random, files[name], start, len(files[name]))


def truncated(random: Random, files: Files) -> None:
    name = random.choice(list(files))
    files[name] = files[name][: random.choice([0, random.randrange(len(files[name])), len(files[name]) - 1])]


def length(random: Random, files: Files) -> None:
    name = _weights(random, files)
    size = random.choice([0, 1, 2, 99, 10**9, 2**63, 2**64 - 1])
    files[name] = struct.pack("<Q", size) + files[name][8:]


def other_content(random: Random, files: Files) -> None:
    name = random.choice(list(files))
    files[name] = random.choice(
        [b"", b"\0" * 100, b"<html>404</html>", b"\x80\x04K\x01.", b"[]", b"null", b'"x"', b"9" * 5000, b"[" * 200_000]
    )


def gone(random: Random, files: Files) -> None:
    del files[random.choice(list(files))]


# --- what may happen to tensors -------------------------------------------------------------------------------------


def in_header(change: Callable[[Random, dict[str, Any], str, str], None]) -> Callable[[Random, Files], None]:
    """A change of the header, which is given an RSA tensor's name and any tensor's."""

    def happen(random: Random, files: Files) -> None:
        name = random.choice([n for n in files if n.endswith(".safetensors") and b".rsa." in files[n]])
        header, body = split(files[name])
        names = [key for key in header if key != "__metadata__"]
        change(random, header, random.choice([key for key in names if ".rsa." in key]), random.choice(names))
        files[name] = joined(header, body)

    return happen


def _swap(random: Random, header: dict[str, Any], one: str, other: str) -> None:
    header[one], header[other] = header[other], header[one]


def _retype(random: Random, header: dict[str, Any], one: str, other: str) -> None:
    header[one]["dtype"] = random.choice(
        ["I32", "U32", "F16", "BF16", "F64", "BOOL", "F8_E4M3", "C64", "X9", "", 3, None]
    )


def _reshape(random: Random, header: dict[str, Any], one: str, other: str) -> None:
    shape = header[one]["shape"]
    header[one]["shape"] = random.choice(
        [[], [0], [-1], [2**40], [2**63, 2], [1, 1], [1, *shape], [*shape, 1], "x", None, [0.5]]
    )


def _move(random: Random, header: dict[str, Any], one: str, other: str) -> None:
    start, end = header[one]["data_offsets"]
    header[one]["data_offsets"] = random.choice(
        [
            [end, start],
            [start, end + 4],
            [start - 4, end],
            [0, 2**62],
            [-1, end],
            [start],
            header[other]["data_offsets"],
        ]
    )


def in_parts(change: Callable[[Random, dict[str, Any], str, str], None]) -> Callable[[Random, Files], None]:
    """A change of the tensors, as of the header, after which the file is sound."""

    def happen(random: Random, files: Files) -> None:
        name = random.choice([n for n in files if n.endswith(".safetensors") and b".rsa." in files[n]])
        parts = parts_of(files[name])
        change(random, parts, random.choice([key for key in parts if ".rsa." in key]), random.choice(list(parts)))
        files[name] = packed(parts)

    return happen


def _drop(random: Random, parts: dict[str, Any], one: str, other: str) -> None:
    del parts[random.choice([one, other])]


def _add(random: Random, parts: dict[str, Any], one: str, other: str) -> None:
    which = random.choice([one, other])
    parts[which.replace("0", str(random.randrange(9))) + random.choice(["", "", "x", ".rsa.mu"])] = parts[which]


def _rename(random: Random, header: dict[str, Any], one: str, other: str) -> None:
    header[random.choice(hostile.NAMES) or "x"] = header.pop(random.choice([one, other]))


def number(random: Random, files: Files) -> None:
    """One entry of an RSA tensor, or all, is no number or far too large."""
    name = random.choice([n for n in files if n.endswith(".safetensors") and b".rsa." in files[n]])
    header, body = split(files[name])
    start, end = header[random.choice([key for key in header if ".rsa." in key])]["data_offsets"]
    size = random.choice([1, (end - start) // 4])
    value = random.choice([math.nan, math.inf, -math.inf, 1e38, -1e38, 1e13, 3.0, -0.0])
    body = body[:start] + struct.pack("<f", value) * size + body[start + 4 * size :]
    files[name] = joined(header, body)


def _retype_whole(random: Random, parts: dict[str, Any], one: str, other: str) -> None:
    """An RSA tensor has its values in another type: the values are those of the file."""
    entry, content = parts[one]
    dtype = random.choice(["F64", "F16", "BF16", "I64", "U8"])
    values = torch.frombuffer(bytearray(content), dtype=torch.float32).to(DTYPES[dtype])
    parts[one] = {**entry, "dtype": dtype}, values.view(torch.uint8).numpy().tobytes()


def same_key_twice(random: Random, files: Files) -> None:
    """A tensor stands twice in a header."""
    name = _weights(random, files)
    header, body = split(files[name])
    key = random.choice([key for key in header if key != "__metadata__"])
    text = json.dumps(header)
    files[name] = joined(f"{text[:-1]}, {json.dumps(key)}: {json.dumps(random.choice(list(header.values())))}}}", body)


# --- what may happen to the plan ------------------------------------------------------------------------------------


def in_config(change: Callable[[Random, dict[str, Any]], None]) -> Callable[[Random, Files], None]:
    def happen(random: Random, files: Files) -> None:
        content = json.loads(files[CONFIG])
        change(random, content)
        files[CONFIG] = json.dumps(content).encode()

    return happen


def config_bit(random: Random, files: Files) -> None:
    _letter_bit(random, files, 0, len(files[CONFIG]))


def plan_bit(random: Random, files: Files) -> None:
    start = files[CONFIG].index(b'"rsa"')
    _letter_bit(random, files, start, files[CONFIG].index(b"}", start))


def _letter_bit(random: Random, files: Files, start: int, end: int) -> None:
    """One bit, mostly of a letter or a digit: in most other places it is no JSON any longer."""
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
    """Another plan, with the same shapes of tensors."""
    plan = content["rsa"]["plan"]
    plan.update(
        random.choice(
            [
                {"dilation": random.choice([1, 2, 5, 65_536, 65_537, [1, 2, 3], [4, 4]])},
                {"gate_init": random.choice([0, -3, "-inf", "inf", [-1, 1]])},
                {"num_regular": plan["num_dilated_regular"], "num_dilated_regular": plan["num_regular"]},
                {"causal": random.choice([True, False, None])},
                {"parameter_scale": random.choice([1, 20, 1e6, 1e-6])},
                {"layers": random.choice([[0], [0, 1], [1, 2, 3], [10**9], [0, 4096], None])},
            ]
        )
    )


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


def other_module(names: list[str]) -> Callable[[Random, Files], None]:
    """The RSA heads of one module are another's, which exists; or one that does not."""

    def happen(random: Random, files: Files) -> None:
        move_heads(files, random.choice(json.loads(files[CONFIG])["rsa"]["modules"]), random.choice(names))

    return happen


def move_heads(files: Files, old: str, new: str) -> None:
    """Give the RSA heads of one module to another, in plan, index and tensors."""

    def named(keys: dict[str, Any]) -> dict[str, Any]:
        return {key.replace(f"{old}.rsa.", f"{new}.rsa."): value for key, value in keys.items()}

    for name in files:
        if name.endswith(".safetensors"):
            header, body = split(files[name])
            files[name] = joined(named(header), body)
            continue
        content = json.loads(files[name])
        if name == CONFIG:
            content["rsa"]["modules"] = [new if module == old else module for module in content["rsa"]["modules"]]
        else:
            content["weight_map"] = named(content["weight_map"])
        files[name] = json.dumps(content).encode()


def plan_twice(random: Random, files: Files) -> None:
    """A key of config.json stands twice, now and then inside of the plan."""
    text = files[CONFIG].decode()
    content = json.loads(text)
    if random.random() < 0.5:
        other = json.loads(json.dumps(content["rsa"]))
        other["plan"]["dilation"] = 7
        added = f'"rsa": {json.dumps(random.choice([other, None, 3]))}, '
        files[CONFIG] = text.replace("{", "{" + added, 1).encode()
    else:
        place = text.index('"plan"')
        files[CONFIG] = (text[:place] + text[place:].replace("{", '{"dilation": 7, ', 1)).encode()


# --- what may happen to shards --------------------------------------------------------------------------------------


def shards(random: Random, files: Files) -> None:
    """The index names a file that is not there, one outside of the folder, or is none."""
    index = json.loads(files[INDEX])
    weights = index["weight_map"]
    key = random.choice(list(weights))
    kind = random.randrange(5)
    if kind == 0:
        weights[key] = random.choice(["absent.safetensors", "", ".", 3, None, "x" * 300, "a\0b", "config.json"])
    elif kind == 1:
        place = random.choice(["../outside.safetensors", "/etc/passwd", "sub/../../outside.safetensors", "//x"])
        for name in weights if random.random() < 0.5 else [key]:
            weights[name] = place
    elif kind == 2:
        index[random.choice(["weight_map", "metadata"])] = hostile.value(random)
    elif kind == 3:
        index.pop(random.choice(["weight_map", "metadata"]))
    else:
        copy = random.choice([name for name in files if name.endswith(".safetensors")])
        files["copy.safetensors"] = files[copy]
        weights[key] = "copy.safetensors"
    files[INDEX] = json.dumps(index).encode()


KINDS: dict[str, Callable[[Random, Files], None]] = {
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
    "number": number,
    "tensor twice": same_key_twice,
    "plan": in_config(_plan),
    "plan that fits": in_config(_plan_that_fits),
    "section": in_config(_plan_section),
    "modules": in_config(_modules),
    "key twice": plan_twice,
}
