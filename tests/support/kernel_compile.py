"""Compiles every Triton kernel for GPUs, which need not be present, and reads the assembler's results.

Run by test_kernels.py in its own process, without TRITON_INTERPRET: prints one JSON object of `Figures`, by kernel and
architecture or variant, and whether importing the files with kernels imported triton.
"""

from __future__ import annotations

import bisect
import itertools
import json
import re
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from hf_zero.arithmetic import stochastic, sums
from hf_zero.kernels import adamw, adamw_in_blocks, flat_steps, lion, sgd, statistics
from hf_zero.kernels import stochastic as stochastic_kernels
from hf_zero.kernels.base import Kernel
from hf_zero.wire import quantize
from hf_zero.wire.block_kernels import LARGEST_CODE, quantize_kernel, sum_kernel
from hf_zero.wire.quantize import BlockFormat

ARCHITECTURES = (80, 90)
RANKS = (8, 128, 256)
OPTIONAL = ("multiplier", "found_inf", "residual", "inverse_scale", "momentum_buffer")


@dataclass(frozen=True, kw_only=True)
class Promise:
    """Upper limits of a kernel's resources, and the exact number of its global memory accesses by width (bits per thread)."""

    registers: int
    shared_bytes: int = 0
    loads: Mapping[str, int]
    stores: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel with its launch arguments.

    Attributes:
        types: Triton's types of the runtime arguments; pointers and integers known to be divisible by 16.
        constants: all other arguments.
        architectures: the ones with the kernel's instructions.
    """

    kernel: Kernel
    types: Mapping[str, str]
    promise: Promise
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    architectures: tuple[int, ...] = ARCHITECTURES


@dataclass(frozen=True)
class Compiled:
    cubin: bytes
    shared_bytes: int


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Figures from the machine code of one kernel. Instruction counts are static."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    loads: dict[str, int]
    stores: dict[str, int]


CASES = {
    f"sum_parts {dtype}": Case(
        kernel=statistics._sum_parts,
        types={"flat": f"*{dtype}", "squares": "*fp32", "counts": "*i32", "numel": "i64"},
        constants={"PART": sums.PART_NUMEL, "BLOCK": statistics.BLOCK_NUMEL},
        num_warps=8,
        promise=Promise(registers=64, shared_bytes=32, loads={"128": loads}, stores={"32": 2}),
    )
    for dtype, loads in (("fp32", 4), ("bf16", 2), ("fp16", 2))
}
CASES["sum_of_parts"] = Case(
    kernel=statistics._sum_of_parts,
    types={"squares": "*fp32", "counts": "*i32", "out": "*fp64", "parts": "i32"},
    constants={"STEPS": 2, "BLOCK": statistics.PARTS_A_STEP},
    promise=Promise(registers=40, shared_bytes=32, loads={"128": 8}, stores={"64": 2}),
)
CASES["scalars"] = Case(
    kernel=statistics._scalars,
    types={"statistics": "*fp64", "inverse_scale": "*fp32", "out": "*fp32", "max_norm": "fp32"},
    num_warps=1,
    promise=Promise(registers=32, loads={"64": 2, "32": 1}, stores={"32": 4}),
)


def step_case(
    kernel: Kernel, dtypes: Mapping[str, str], numbers: Sequence[str], constants: Mapping[str, Any], registers: int
) -> Case:
    """An optimizer's kernel with multiplier and found_inf, which are its two narrow loads.

    Each tensor of `dtypes` is read, except the copy, and written, except the gradient, four elements per thread at a time.
    """
    scalars = {"multiplier": "*fp32", "found_inf": "*fp32"}
    widths = {name: "128" if dtype == "fp32" else "64" for name, dtype in dtypes.items()}
    loads = Counter(width for name, width in widths.items() if name != "copy") + Counter({"32": len(scalars)})
    return Case(
        kernel=kernel,
        types={k: f"*{v}" for k, v in dtypes.items()} | scalars | {"numel": "i64"} | dict.fromkeys(numbers, "fp32"),
        constants={"BLOCK": flat_steps.STEP_BLOCK_NUMEL, "INTERPRETED": False, **constants},
        num_warps=flat_steps.NUM_WARPS,
        promise=Promise(
            registers=registers,
            loads=loads,
            stores=Counter(width for name, width in widths.items() if name != "gradient"),
        ),
    )


ADAMW_NUMBERS = ("decay", "one_minus_beta1", "beta2", "one_minus_beta2", "step_size", "inverse_bias2_sqrt", "eps")
LION_NUMBERS = ("decay", "beta1", "one_minus_beta1", "beta2", "one_minus_beta2", "lr")
SGD_NUMBERS = ("weight_decay", "kept", "added", "momentum", "lr")
MASTER = {"weights": "fp32", "gradient": "bf16", "copy": "bf16"}
PLAIN = {"weights": "fp32", "gradient": "fp32"}

for title, dtypes in (("bf16 copy", MASTER), ("fp32", PLAIN), ("bf16", {"weights": "bf16", "gradient": "bf16"})):
    none = {} if "copy" in dtypes else {"copy": None}
    moments = {"exp_avg": "fp32", "exp_avg_sq": "fp32"}
    CASES[f"adamw {title}"] = step_case(adamw._adamw, dtypes | moments, ADAMW_NUMBERS, none, registers=40)
    CASES[f"lion {title}"] = step_case(lion._lion, dtypes | {"exp_avg": "fp32"}, LION_NUMBERS, none, registers=32)
    CASES[f"sgd {title}"] = step_case(
        sgd._sgd, dtypes | {"momentum_buffer": "fp32"}, SGD_NUMBERS, {"NESTEROV": True, **none}, registers=32
    )


MOMENTS_IN_BLOCKS = {
    "exp_avg": "*u8",
    "exp_avg_scales": "*fp32",
    "exp_avg_sq": "*u8",
    "exp_avg_sq_scales": "*fp32",
    "values": "*fp32",
    "first": "*u8",
    "thresholds": "*fp32",
}
CASES |= {
    f"adamw in blocks {title}": Case(
        kernel=adamw_in_blocks._adamw_in_blocks,
        types={name: f"*{dtype}" for name, dtype in dtypes.items()}
        | MOMENTS_IN_BLOCKS
        | {"multiplier": "*fp32", "found_inf": "*fp32", "numel": "i64"}
        | dict.fromkeys(ADAMW_NUMBERS, "fp32"),
        constants={
            "SMALLEST": adamw_in_blocks.SMALLEST_NORMAL,
            "BLOCK": adamw_in_blocks.BLOCK_NUMEL,
            "INTERPRETED": False,
            **({} if "copy" in dtypes else {"copy": None}),
        },
        num_warps=adamw_in_blocks._WARPS_IN_BLOCKS,
        # Eight elements per thread. Each look-up is a narrow load: for both moments' elements a first code (8 bits), a value and
        # a threshold; then two scales, multiplier and found_inf.
        promise=Promise(
            registers=80,
            loads={"128": wide, "64": 2, "8": 16, "32": 36},
            stores={"128": 2 + ("copy" in dtypes), "64": 2, "32": 2},
        ),
    )
    for title, dtypes, wide in (("bf16 copy", MASTER, 3), ("fp32", PLAIN, 4))
}


def block_case(kernel: Kernel, types: Mapping[str, str], constants: Mapping[str, Any], promise: Promise) -> Case:
    """A kernel on blocks of 256."""
    rows, warps = quantize._launch(BlockFormat())
    return Case(
        kernel=kernel,
        types={"codes": "*u8", "scales": "*fp32", "numel": "i64", "blocks": "i64", **types},
        constants={"ROWS": rows, "SIZE": 256, **constants},
        num_warps=warps,
        promise=promise,
        architectures=ARCHITECTURES,
    )


QUANTIZE_CONSTANTS = {"LARGEST": float(LARGEST_CODE), "SMALLEST": quantize.SMALLEST_NORMAL, "INTERPRETED": False}
BF16_WITH_RESIDUAL = {"values": "*bf16", "residual": "*fp32"}
SUM_TYPES = {"ranks": "i32"}
SUM_CONSTANTS = {"INTERPRETED": False}
CASES["quantize int8"] = block_case(
    quantize_kernel,
    BF16_WITH_RESIDUAL,
    QUANTIZE_CONSTANTS,
    Promise(registers=40, shared_bytes=64, loads={"64": 1, "128": 1}, stores={"32": 2, "128": 1}),
)
CASES["sum of int8"] = block_case(
    sum_kernel,
    {"out": "*fp32", **SUM_TYPES},
    SUM_CONSTANTS,
    # Four ranks at a time, and then the remaining ranks.
    Promise(registers=40, loads={"32": 24}, stores={"128": 1}),
)
CASES["stochastic rounding"] = Case(
    kernel=stochastic_kernels._round,
    types={"source": "*fp32", "out": "*bf16", "numel": "i64", "seed": "i64", "offset": "i64"},
    constants={
        "LANES": stochastic.LANES,
        "REGIONS": stochastic_kernels._REGIONS_A_PROGRAM,
        "QUIET_NAN": stochastic.QUIET_NAN,
    },
    # Each thread makes one random number, and passes it to the thread which reads four elements.
    promise=Promise(registers=64, shared_bytes=2048, loads={"128": 8}, stores={"64": 8}),
)


def compile_case(case: Case, architecture: int) -> Compiled:
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
    return Compiled(compiled.asm["cubin"], compiled.metadata.shared)


def with_one_element(case: Case) -> Case:
    """Integers of 1, which Triton treats as constants at a launch."""
    whole = [name for name, kind in case.types.items() if kind in ("i32", "i64")]
    types = {name: kind for name, kind in case.types.items() if name not in whole}
    return replace(case, types=types, constants={**case.constants, **dict.fromkeys(whole, 1)})


def without_options(case: Case) -> Case:
    """None for the optional tensors."""
    left_out = [name for name in case.types if name in OPTIONAL]
    types = {name: kind for name, kind in case.types.items() if name not in left_out}
    return replace(case, types=types, constants={**case.constants, **dict.fromkeys(left_out)})


def as_launched(ranks: int) -> Case:
    """The sum over so many ranks, with the launch's numbers as constants."""
    usual, format, numel = CASES["sum of int8"], BlockFormat(), 4096
    launched: dict[str, Any] = {}

    class Launch:
        def __getitem__(self, _grid: tuple[int, ...]) -> Any:
            return lambda *_arguments, **constants: launched.update(constants)

    sum_kernel.__dict__["jit"] = Launch()
    try:
        codes = torch.zeros(ranks, format.code_bytes(numel), dtype=torch.uint8)
        scales = torch.zeros(ranks, format.blocks(numel))
        quantize.dequantize_sum_triton(codes, scales, torch.zeros(numel), format)
    finally:
        del sum_kernel.__dict__["jit"]
    names = sum_kernel.jit.arg_names
    constants = {name: value for name, value in launched.items() if name in names}
    return replace(usual, constants=constants, num_warps=launched["num_warps"])


def sums_by_ranks(architecture: int) -> dict[str, dict[str, float]]:
    """Returns, by number of ranks, the assembler's figures and the CPU seconds of compiling."""
    import triton

    found = {}
    for ranks in RANKS:
        with triton.knobs.compilation.scope():
            triton.knobs.compilation.always_compile = True
            began_s = time.process_time()
            compiled = compile_case(as_launched(ranks), architecture)
        found[str(ranks)] = {"seconds": round(time.process_time() - began_s, 3), **resources(compiled.cubin)}
    return found


def tool(name: str) -> Path:
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name


def resources(cubin: bytes) -> dict[str, int]:
    """Returns registers per thread, and spilled bytes."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool("cuobjdump"), "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True)
    numbers = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage.stdout + usage.stderr))
    return {"registers": int(numbers["REG"]), "spilled_bytes": int(numbers["STACK"]) + int(numbers["LOCAL"])}


def machine_code(cubin: bytes) -> bytes:
    """Returns the section of an ELF file with its only kernel's instructions."""
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, start + size * index) for index in range(count)]
    names_start = sections[names][4]
    [code] = [s for s in sections if cubin.startswith(b".text.", names_start + s[0])]
    return cubin[code[4] : code[4] + code[5]]


def disassembled(kernels: Sequence[bytes], architecture: int) -> list[list[str]]:
    """Returns the names of each kernel's instructions. Disassembles all at once, because a start takes half a second."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(kernels))
        file.flush()
        command = [tool("nvdisasm"), "--binary", f"SM{architecture}", file.name]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^\s+/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", code, re.MULTILINE)
    ends = list(itertools.accumulate(map(len, kernels)))
    names: list[list[str]] = [[] for _ in kernels]
    for address, name in found:
        names[bisect.bisect_right(ends, int(address, 16))].append(name)
    return names


def figures(compiled: Mapping[str, Compiled], architecture: int) -> dict[str, Figures]:
    """Returns the figures of kernels by name."""
    instructions = disassembled([machine_code(kernel.cubin) for kernel in compiled.values()], architecture)
    return {
        name: Figures(
            **resources(kernel.cubin),
            shared_bytes=kernel.shared_bytes,
            loads=count_by_width(found, "LDG"),
            stores=count_by_width(found, "STG"),
        )
        for (name, kernel), found in zip(compiled.items(), instructions)
    }


def count_by_width(instructions: list[str], opcode: str) -> dict[str, int]:
    """Counts an opcode's instructions by width: 8, 16, 32, 64 or 128 bits per thread."""
    counts: Counter[str] = Counter()
    for name in instructions:
        if name.split(".")[0] == opcode:
            width = next((part for part in name.split(".") if part in ("U8", "S8", "U16", "64", "128")), "32")
            width = {"U8": "8", "S8": "8", "U16": "16"}.get(width, width)
            counts[width] += 1
    return counts


def main() -> None:
    """Compiles for the architecture in the first argument; for the newest, also other forms of a launch."""
    architecture = int(sys.argv[1])
    for path in Path(statistics.__file__).parent.glob("*.py"):
        import_module(f"hf_zero.kernels.{path.stem}")
    triton_is_imported = "triton" in sys.modules
    cases = {name: case for name, case in CASES.items() if architecture in case.architectures}
    compiled = {name: compile_case(case, architecture) for name, case in cases.items()}
    found = {name: {str(architecture): vars(usual)} for name, usual in figures(compiled, architecture).items()}
    for name, case in cases.items() if architecture == ARCHITECTURES[-1] else ():
        for variant in (with_one_element, without_options):
            other = variant(case)
            kernel = compiled[name] if other == case else compile_case(other, architecture)
            found[name][variant.__name__] = resources(kernel.cubin)
    if architecture == ARCHITECTURES[-1]:
        found["sum of int8"]["by ranks"] = sums_by_ranks(architecture)
    json.dump(found | {"triton is imported with the kernels": triton_is_imported}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
