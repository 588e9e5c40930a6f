"""Compile every variant of the kernels for an H200 (sm_90), without a GPU, and print the resources of each.

    python tests/ops/compile_for_hopper.py [name …]

Triton's interpreter accepts Python that its compiler refuses, so a test runs this in a process of its own. It prints a
line of JSON per variant: registers and spilled bytes per thread, shared memory, whether matrix products use tensor
cores, and whether values are read 16 bytes at a time.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rsa_hf.ops.triton import launch
from rsa_hf.ops.triton.tables import Shape
from rsa_hf.ops.triton.tuning import Tuning, candidates

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
STRIDED = ("value", "attention", "output", "grad", "dvalue", "dattention", "x")  # (pointer, three strides)
LEARNED = ("learned", "dlearned")  # five pointers
INTEGERS = {"columns": "*i32", "heads": "*i32", "starts": "*i32", "position": "*i64"}
MASKS = {"document_ids": "*i64", "key_mask": "*u8"}  # (pointer, stride)
SIZES = {"forward": 9, "backward": 9, "splits": 7, "step": 2, "learned": 6}
BARE = {"causal": True, "mixed": True, "masked": False, "packed": False, "windowed": False}
BARE |= {"lags": 0, "splits": 1, "scale": 20.0}


def variants():
    """Yield name, kernel, dtype, tuning, head size and flags."""
    for dtype in TYPES:
        for kernel in ("forward", "backward"):
            for number, tuning in enumerate(candidates(kernel, 64, 8 * dtype.itemsize)):
                name = f"{kernel}_{TYPES[dtype]}_{number}"
                yield name, kernel, dtype, tuning, 64, BARE
    for kernel in ("forward", "backward", "splits"):
        tuning = candidates(kernel, 64, 16)[0]
        everything = {"causal": False, "masked": True, "packed": True, "windowed": True, "splits": 8, "lags": 3}
        flags = {"bidirectional": {"causal": False}, "masked": {"masked": True}, "alone": {"mixed": False}}
        flags |= {"packed": {"packed": True}, "windowed": {"windowed": True}, "free_lags": {"lags": 3}}
        flags |= {"documented": {"splits": 8}, "everything": everything}
        for name, changed in flags.items():
            yield f"{kernel}_{name}", kernel, torch.bfloat16, tuning, 64, BARE | changed
    for head_size, block in ((80, 32), (256, 64), (16, 16), (20, 32)):
        yield f"forward_head_{head_size}", "forward", torch.bfloat16, Tuning(64, block, 4, 2), head_size, BARE
        yield f"backward_head_{head_size}", "backward", torch.bfloat16, Tuning(64, block, 4, 2), head_size, BARE
    yield "powers", "powers", torch.float32, Tuning(64, 64, 1, 1), 64, BARE | {"lags": 3}
    for lags in (0, 3):
        tuning = Tuning(64, 256, 1, 1)
        yield f"learned_{lags}", "learned", torch.float32, tuning, 64, BARE | {"lags": lags}

    for known in (True, False):
        tuning, flags = Tuning(64, 64, 4, 1), BARE | {"lags": 3, "masked": not known}
        yield f"step_{'slice' if known else 'row'}", "step", torch.bfloat16, tuning, 64, flags


def compiled(kernel, dtype, tuning, head_size, flags):
    function = getattr(launch, f"{kernel}_kernel")
    shape = Shape(
        head_size=head_size,
        block=tuning.block,
        blocks=-(-head_size // tuning.block),
        chunk=tuning.chunk,
        powers=triton.next_power_of_2(tuning.chunk + 1 + flags["splits"] + flags["windowed"]),
        stages=tuning.stages,
        halves=dtype.itemsize == 2,
        **flags,
    )
    constants = {"SHAPE": shape, "BACKWARD": not shape.masked, "HEADS": 16, "KNOWN": not shape.masked, "BLOCK": 32}
    signature, constexprs, attributes = {}, {}, {}
    aligned = [["tt.divisibility", 16]]
    for place, parameter in enumerate(function.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name], constexprs[name] = "constexpr", constants[name]
        elif name in STRIDED:
            signature[name] = (f"*{TYPES[dtype]}", "i32", "i32", "i32")
            attributes |= {(place, i): aligned for i in range(4)}
        elif name in LEARNED:
            signature[name] = ("*fp32",) * 5
        elif name == "shared":
            signature[name] = (("*u8", "i32"), ("*i64", "i32"), "*i32", "*i32", "*fp32")
            attributes |= {(place, 0, 0): aligned, (place, 1, 0): aligned} | {(place, i): aligned for i in (2, 3, 4)}
        elif name in MASKS:
            signature[name] = (MASKS[name], "i32")
            attributes[place, 0] = aligned
        elif name == "sizes":
            signature[name] = ("i32",) * SIZES[kernel]
        elif name == "counts":
            signature[name] = ("i32",) * 3
        elif name in ("length", "num_heads", "parts", "longest", "place", "farthest"):
            signature[name] = "i32"
        else:
            signature[name] = INTEGERS.get(name, "*fp32")
            attributes[(place,)] = aligned
    source = ASTSource(fn=function, signature=signature, constexprs=constexprs, attrs=attributes)
    return triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": tuning.warps})


def resources(kernel):
    """Registers, spilled bytes and shared memory, as the assembler reports them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", report))
    return {"registers": int(found["REG"]), "stack": int(found["STACK"]), "shared": kernel.metadata.shared}


def main():
    for name, *variant in variants():
        if sys.argv[1:] and not any(wanted in name for wanted in sys.argv[1:]):
            continue
        kernel = compiled(*variant)
        code = kernel.asm["ptx"]
        found = {"name": name, **resources(kernel)}
        found["tensor_cores"] = "wgmma.mma_async" in code or "mma.sync" in code
        found["wide_loads"] = bool(re.search(r"cp\.async\.cg\.shared\.global.*0x10|ld\.global.*v4", code))
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
