"""Compiles every Triton kernel for GPUs that need not be there, and reads what came out of the assembler.

Run by tests/test_kernels.py in a process of its own, without TRITON_INTERPRET: prints one JSON object, by kernel and
architecture, of `Figures`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hf_zero.kernels import statistics
from hf_zero.kernels.lazy import Kernel

ARCHITECTURES = (80, 90)


@dataclass(frozen=True, kw_only=True)
class Promise:
    """The most that a kernel may use, and the narrowest access to global memory (bits a thread) that it may have."""

    registers: int
    shared_bytes: int = 0
    load_bits: int
    store_bits: int


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel as it is launched.

    Attributes:
        types: of the runtime arguments, as Triton writes them; pointers and whole numbers known to be divisible by 16.
        constants: the other arguments.
    """

    kernel: Kernel
    types: Mapping[str, str]
    promise: Promise
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Read from the machine code of one kernel; instruction counts are static."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    barriers: int
    loads: dict[str, int]
    stores: dict[str, int]


CASES = {
    f"sum_parts {dtype}": Case(
        kernel=statistics._sum_parts,
        types={"flat": f"*{dtype}", "squares": "*fp32", "counts": "*i32", "numel": "i64"},
        constants={"PART": statistics.PART_NUMEL, "BLOCK": statistics.BLOCK_NUMEL},
        num_warps=8,
        promise=Promise(registers=64, shared_bytes=32, load_bits=128, store_bits=32),
    )
    for dtype in ("fp32", "bf16", "fp16")
}
CASES["sum_of_parts"] = Case(
    kernel=statistics._sum_of_parts,
    types={"squares": "*fp32", "counts": "*i32", "out": "*fp64", "parts": "i32"},
    constants={"STEPS": 2, "BLOCK": statistics.PARTS_A_STEP},
    promise=Promise(registers=40, shared_bytes=32, load_bits=128, store_bits=64),
)
CASES["scalars"] = Case(
    kernel=statistics._scalars,
    types={"statistics": "*fp64", "inverse_scale": "*fp32", "out": "*fp32", "max_norm": "fp32"},
    num_warps=1,
    promise=Promise(registers=32, load_bits=32, store_bits=32),
)


def compile_case(case: Case, architecture: int) -> Figures:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    jit = case.kernel.jit
    signature = {name: case.types.get(name, "constexpr") for name in jit.arg_names}
    divisible = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(jit.arg_names)
        if signature[name][0] == "*" or signature[name][0] == "i"
    }
    constants = {(jit.arg_names.index(name),): value for name, value in case.constants.items()}
    source = ASTSource(jit, signature, constants, divisible)
    options = {"num_warps": case.num_warps, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    return read_figures(compiled.asm["cubin"], compiled.metadata.shared)


def read_figures(cubin: bytes, shared_bytes: int) -> Figures:
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run(
            [tools / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        )
        code = subprocess.run([tools / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
    numbers = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage.stdout + usage.stderr))
    instructions = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", code, re.MULTILINE)
    return Figures(
        registers=int(numbers["REG"]),
        spilled_bytes=int(numbers["STACK"]) + int(numbers["LOCAL"]),
        shared_bytes=shared_bytes,
        barriers=sum(name.startswith("BAR.") for name in instructions),
        loads=count_by_width(instructions, "LDG"),
        stores=count_by_width(instructions, "STG"),
    )


def count_by_width(instructions: list[str], opcode: str) -> dict[str, int]:
    """How many of an opcode's instructions move 8, 16, 32, 64 or 128 bits a thread."""
    counts: dict[str, int] = {}
    for name in instructions:
        if name.split(".")[0] == opcode:
            width = next((part for part in name.split(".") if part in ("U8", "S8", "U16", "64", "128")), "32")
            width = {"U8": "8", "S8": "8", "U16": "16"}.get(width, width)
            counts[width] = counts.get(width, 0) + 1
    return counts


def main() -> None:
    json.dump(
        {
            name: {str(architecture): asdict(compile_case(case, architecture)) for architecture in ARCHITECTURES}
            for name, case in CASES.items()
        },
        sys.stdout,
        indent=1,
    )


if __name__ == "__main__":
    main()
