"""Compile every kind of kernel for an H200 (sm_90), which takes no GPU, and print what each takes of the chip.

    python tests/ops/compile_for_hopper.py [name …]

Triton's interpreter takes Python that its compiler refuses, so a test runs this in a process of its own. Prints a line
of JSON for each variant: registers and spilled bytes a thread, shared memory, whether matrix products are on tensor
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
from rsa_hf.ops.triton.tuning import Tuning, candidates

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
FLOATS = ("value", "attention", "output", "grad", "dvalue", "dattention", "x")
INTEGERS = {"columns": "*i32", "heads": "*i32", "starts": "*i32", "segment_ids": "*i64", "key_mask": "*u8"}
BARE = {"CAUSAL": True, "MIXED": True, "MASKED": False, "PACKED": False, "SPLITS": 1}


def variants():
    """Name, kernel, dtype, tuning, head size and flags."""
    for dtype in TYPES:
        for kernel in ("forward", "backward"):
            for number, tuning in enumerate(candidates(kernel, 64, 8 * dtype.itemsize)):
                name = f"{kernel}_{TYPES[dtype]}_{number}"
                yield name, kernel, dtype, tuning, 64, BARE
    for kernel in ("forward", "backward", "splits"):
        tuning = candidates(kernel, 64, 16)[0]
        flags = {"bidirectional": {"CAUSAL": False}, "masked": {"MASKED": True}, "alone": {"MIXED": False}}
        flags |= {"packed": {"PACKED": True}, "segmented": {"SPLITS": 8}}
        flags |= {"everything": {"CAUSAL": False, "MASKED": True, "PACKED": True, "SPLITS": 8}}
        for name, changed in flags.items():
            yield f"{kernel}_{name}", kernel, torch.bfloat16, tuning, 64, BARE | changed
    for head_size, block in ((80, 32), (256, 64), (16, 16), (20, 32)):
        yield f"forward_head_{head_size}", "forward", torch.bfloat16, Tuning(64, block, 4, 2), head_size, BARE
        yield f"backward_head_{head_size}", "backward", torch.bfloat16, Tuning(64, block, 4, 2), head_size, BARE
    yield "powers", "powers", torch.float32, Tuning(64, 64, 1, 1), 64, {"SPLITS": 1}
    yield "rates", "rates", torch.float32, Tuning(64, 256, 1, 1), 64, {"MIXED": True}


def compiled(kernel, dtype, tuning, head_size, flags):
    function = getattr(launch, f"{kernel}_kernel")
    constants = {
        "D": head_size,
        "BLOCK": tuning.block,
        "BLOCKS": -(-head_size // tuning.block),
        "CHUNK": tuning.chunk,
        "POWERS": triton.next_power_of_2(tuning.chunk + 1 + flags.get("SPLITS", 1)),
        "STAGES": tuning.stages,
        "SPLIT": dtype.itemsize == 2,
        "SLOPES": True,
        "REVERSED": True,
        **flags,
    }
    signature, constexprs, aligned = {}, {}, {}
    for place, parameter in enumerate(function.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name], constexprs[name] = "constexpr", constants[name]
            continue
        if name in FLOATS:
            signature[name] = f"*{TYPES[dtype]}"
        elif name in INTEGERS:
            signature[name] = INTEGERS[name]
        elif name.endswith(("_b", "_h", "_t", "_s", "_stride")) or name in SCALARS:
            signature[name] = "i32"
        else:
            signature[name] = "*fp32"
        if signature[name].startswith("*") or re.search(r"_[bhts]$", name):
            aligned[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=function, signature=signature, constexprs=constexprs, attrs=aligned)
    return triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": tuning.warps})


SCALARS = (
    "rows",
    "num_columns",
    "num_heads",
    "length",
    "offset",
    "queries",
    "heads_per_value",
    "slots",
    "shift",
    "count",
    "parts",
)


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
