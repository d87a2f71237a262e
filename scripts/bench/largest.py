"""The largest GPT that one rank trains with everything that lasts in host memory: a search over its layers.

Each try is a process of its own, which ends itself when it holds more host memory than it may.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from memory import status_bytes
from ranks import RankFailedError, RanksTimedOutError, run_alone
from transformers import GPT2LMHeadModel
from workload import Workload, adamw_arguments

from hf_zero.device import peak_bytes, wait_for_device
from hf_zero.engine.engine import ZeroEngine

HOST_BYTES_A_PARAMETER = 18
"""A bfloat16 parameter with its fp32 master, reduced gradient and two moments of AdamW: 2 + 4 + 4 + 8."""

SETTINGS = {
    "stage": 3,
    # Copies of state for early steps would take host memory that layers can use.
    "offload": {"params": "cpu", "optimizer": "cpu", "activations": "cpu", "speculate_bytes": 0},
}

OVER_THE_LIMIT = 78
_LOOK_EVERY_S = 0.02
_RESOLUTION = 32
"""The search ends when it is known to one part in so many of the first depth."""

# Pinned by the driver, memory is in no figure of the process; registered with it, it is in the resident set.
_ALLOCATOR = "pinned_use_cuda_host_register:True"


class OutOfTime(Exception):
    """No further try can end before the deadline."""


@dataclass
class Found:
    """The greatest that fits and the least that does not, as far as a search has come; None where it has met none."""

    fits: int | None = None
    fails: int | None = None


def search(fits: Callable[[int], bool], first: int, resolution: int) -> Found:
    """Narrows down the greatest whole number from 1 that fits: in growing strides from `first`, then by halves.

    Ends when `fails` is at most `resolution` above `fits`, or 1 does not fit, or with what is known when `fits` raises
    `OutOfTime`.
    """
    found, number, stride = Found(), max(1, first), max(1, resolution)
    try:
        while True:
            if fits(number):
                found.fits = number
            else:
                found.fails = number
            if found.fails == 1:
                return found
            if found.fits is not None and found.fails is not None:
                if found.fails - found.fits <= resolution:
                    return found
                number = (found.fits + found.fails) // 2
                continue
            number = max(1, number + (stride if found.fails is None else -stride))
            stride *= 2
    except OutOfTime:
        return found


def make_deep(workload: Workload, depth: int) -> GPT2LMHeadModel:
    """In bfloat16 in host memory, with `depth` layers that start as copies of the first: drawing weights takes minutes."""
    model = replace(workload, n_layer=1).make_model().to(torch.bfloat16)
    [layer] = model.transformer.h
    for index in range(1, depth):
        model.transformer.h.append(copy.deepcopy(layer))
        model.transformer.h[index].attn.layer_idx = index
    model.config.n_layer = depth
    return model


def train_deep(workload: Workload, depth: int, host_bytes: int, steps: int) -> dict[str, Any]:
    """Figures of one depth, in this process, which ends with `OVER_THE_LIMIT` when it holds more than `host_bytes`."""
    threading.Thread(target=_end_above, args=(host_bytes,), daemon=True).start()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = make_deep(replace(workload, recomputes=True), depth)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), **adamw_arguments(fused=True))
    engine = ZeroEngine(model, [optimizer], SETTINGS, device=device)
    losses, step_ms = [], []
    for number in range(steps + 1):
        input_ids = workload.make_batch(0, number).to(device)
        began = time.perf_counter()
        loss = model(input_ids=input_ids, labels=input_ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        wait_for_device(device)
        # The first step makes the state.
        if number:
            step_ms.append(1000 * (time.perf_counter() - began))
    figures = {
        "layers": depth,
        "parameters": parameters,
        "step_ms": median(step_ms),
        "losses": losses,
        "host_peak_bytes": peak_bytes(torch.device("cpu")),
        "device_peak_bytes": peak_bytes(device) if device.type != "cpu" else None,
    }
    engine.close()
    return figures


def find_largest(workload: Workload, *, host_bytes: int, steps: int, deadline_s: float) -> dict[str, Any]:
    """{"largest": figures or None, "is_narrowed_down": bool, "tries": [...]}.

    Args:
        workload: its width, vocabulary and batches; the depth is searched.
        host_bytes: that the process may hold in all, torch and the model included.
        deadline_s: of `time.monotonic`; no try is begun that would probably end later.
    """
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = _ALLOCATOR
    tries: list[dict[str, Any]] = []
    longest_s = 0.0

    def fits(depth: int) -> bool:
        nonlocal longest_s
        began_s = time.monotonic()
        if began_s + longest_s >= deadline_s:
            raise OutOfTime
        arguments = {"workload": workload, "depth": depth, "host_bytes": host_bytes, "steps": steps}
        try:
            tried = run_alone(train_deep, time_limit_s=deadline_s - began_s, keyword_arguments=arguments)
        except RanksTimedOutError:
            raise OutOfTime from None
        except RankFailedError as error:
            tried = {"layers": depth, "failed": _reason(str(error))}
        longest_s = max(longest_s, time.monotonic() - began_s)
        tries.append(tried)
        print(tried, flush=True)
        return "failed" not in tried

    first = _first_depth(workload, host_bytes)
    found = search(fits, first, max(1, first // _RESOLUTION))
    largest = next((tried for tried in tries if tried["layers"] == found.fits), None)
    is_narrowed_down = found.fits is not None and found.fails is not None
    return {"host_bytes": host_bytes, "largest": largest, "is_narrowed_down": is_narrowed_down, "tries": tries}


def _first_depth(workload: Workload, host_bytes: int) -> int:
    """What should fit by the bytes of a parameter beside what this process, which has no model, holds."""
    with torch.device("meta"):
        one, two = (
            sum(p.numel() for p in replace(workload, n_layer=layers).make_model().parameters()) for layers in (1, 2)
        )
    layer_numel = two - one
    room = (host_bytes - status_bytes("VmRSS")) // HOST_BYTES_A_PARAMETER
    return max(1, (room - (one - layer_numel)) // layer_numel)


def _reason(message: str) -> str:
    """Why a try failed, in a line.

    Raises:
        RankFailedError: for any other reason than memory.
    """
    if f"exit code {OVER_THE_LIMIT}" in message:
        return "more host memory than allowed"
    if "exit code -9" in message:
        return "killed by the system, which has no more host memory"
    last = message.strip().splitlines()[-1]
    if "OutOfMemoryError" in last or "MemoryError" in last or "cannot be pinned" in last:
        return last
    raise RankFailedError(message)


def _end_above(host_bytes: int) -> None:
    while status_bytes("VmRSS") <= host_bytes:
        time.sleep(_LOOK_EVERY_S)
    os._exit(OVER_THE_LIMIT)
