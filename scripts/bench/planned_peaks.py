"""The planner's forecast of a rank's peak memory next to the measured peak, with the error.

    python scripts/bench/planned_peaks.py                                  # all models, stages and batches: about ten minutes
    python scripts/bench/planned_peaks.py --models gpt2 --set-ups ddp 2    # some of them
    python scripts/bench/planned_peaks.py --json results/planned_peaks.json         # where the figures go
    python scripts/bench/planned_peaks.py --parts                          # GPT-2's own vocabulary, by what needs less memory
    python scripts/bench/planned_peaks.py --device cuda --ranks 1          # on one GPU

Measured as in compare.py: the highest resident set of three steps minus the resident set before there was a model, each cell
in fresh ranks whose malloc returns freed blocks. On a GPU: the peak of torch's allocator, minus its bytes before.
The state is measured as well, from the engine's own tensors after the last step.

A loss in chunks takes minutes of CPU time: torch cuts it into chunks of a few tokens. A cell that does not end within
`--time-limit-s` is reported and left out. No cell has Liger's loss, since its kernels need a GPU.

Exits with status 1 if a cell has not ended, or if an error is larger than 5 % of the state, or 15 % of the peak.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from accelerate.utils import send_to_device
from compare import PEAK_STEPS
from engines import WORKLOADS
from harness import (
    MIB,
    RESULTS,
    describe_run,
    held_before,
    most_held,
    on_ranks,
    print_table,
    read_options,
    write_record,
)
from harness import cells as texts_of
from ranks import RanksTimedOutError

from hf_zero.config import AUTO, ZeroConfig
from hf_zero.engine.engine import ZeroEngine
from hf_zero.forecast.fit import FORECAST_ERROR
from hf_zero.planner.batches import batch_of
from hf_zero.planner.layouts import Job
from hf_zero.planner.meta_models import checkpoint
from hf_zero.planner.trace import trace

HAS_TRL = find_spec("trl") is not None
if HAS_TRL:
    # Import here, so that the package's own memory is not part of a peak.
    from trl.trainer.utils import add_fused_lm_head

MOST_STATE_ERROR, MOST_PEAK_ERROR = 0.05, FORECAST_ERROR


def gpt2(**more: Any) -> transformers.PreTrainedModel:
    size = {"n_embd": 512, "n_layer": 8, "n_head": 8, "vocab_size": 8192, "bos_token_id": 0, "eos_token_id": 0} | more
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, use_cache=False))


def _recomputing() -> transformers.PreTrainedModel:
    model = gpt2()
    checkpoint(model)
    return model


def bert(**more: Any) -> transformers.PreTrainedModel:
    size = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 2048}
    return transformers.BertForMaskedLM(transformers.BertConfig(**{"vocab_size": 12000, **size, **more}))


def llama(**more: Any) -> transformers.PreTrainedModel:
    size = {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 1408}
    size |= {"vocab_size": 8192}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{"vocab_size": 8192, "num_key_value_heads": 4, **size, **more})
    )


def _t5() -> transformers.PreTrainedModel:
    size = {"d_model": 384, "d_ff": 1024, "num_layers": 5, "num_heads": 6, "d_kv": 64}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=8192, decoder_start_token_id=0, **size)
    )


MODELS: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "gpt2": gpt2,
    "gpt2, eager attention": lambda: gpt2(attn_implementation="eager"),
    "gpt2, checkpointing": _recomputing,
    "bert": bert,
    "llama": llama,
    "t5": _t5,
}


def _words(*, in_chunks: bool = False, recomputes: bool = False) -> transformers.PreTrainedModel:
    workload = WORKLOADS["30m-words-chunks" if in_chunks else "30m-words"]
    return replace(workload, recomputes=recomputes).make_model()


def _trls() -> transformers.PreTrainedModel:
    model = _words()
    # SFTTrainer does the same.
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    return model


PARTS: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "whole logits": _words,
    "logits of half the tokens": _words,
    "loss in chunks, torch's": partial(_words, in_chunks=True),
    "loss in chunks, TRL's": _trls,
    "checkpointing": partial(_words, recomputes=True),
    "checkpointing, loss in chunks": partial(_words, in_chunks=True, recomputes=True),
}
"""A GPT-2 of 30 M parameters with its own vocabulary, and other packages' replacements with lower memory use."""

MODELS_AND_PARTS = MODELS | PARTS


def batch(model: str, made: transformers.PreTrainedModel, rows: int, length: int) -> dict[str, Any]:
    """Makes the keyword arguments of a forward."""
    given = batch_of(made, rows, length)
    if model == "loss in chunks, TRL's":
        given["fused_lm_head"] = True
    if model == "logits of half the tokens":
        given |= {"logits_to_keep": length // 2, "labels": given["labels"][:, : length // 2]}
    return given


SET_UPS: dict[str, dict[str, Any] | None] = {
    "ddp": None,
    **{str(stage): {"stage": stage} for stage in range(4)},
    "2, cpu": {"stage": 2, "offload": {"optimizer": "cpu"}},
    "2, nvme": {"stage": 2, "offload": {"optimizer": "nvme"}},
    "3, bf16": {"stage": 3, "param_dtype": "bfloat16"},
}


def settings_of(set_up: str, folder: str) -> dict[str, Any] | None:
    settings = SET_UPS[set_up]
    if settings is not None and "nvme" in settings.get("offload", {}).values():
        return settings | {"offload": settings["offload"] | {"nvme_path": folder}}
    return settings


def job_of(model: str, rows: int, length: int, ranks: int, param_dtype: str = AUTO, device: str = "cpu") -> Job:
    """Makes the planner's input: a model without memory."""
    with torch.device("meta"):
        shaped = MODELS_AND_PARTS[model]()
    given = {"shape": f"{rows} x {length}", "tokens": rows * length, "param_dtype": param_dtype}
    given["on_host"] = device == "cpu"
    activations = trace(shaped, lambda: batch(model, shaped, rows, length), **given)
    optimizers = [torch.optim.AdamW(shaped.parameters(), fused=True)]
    ways = {"device": torch.device(device), "world_size": ranks, "ranks_a_node": ranks}
    return Job(model=shaped, optimizers=optimizers, activations=activations, **ways)


def planned(model: str, set_up: str, rows: int, length: int, ranks: int, device: str = "cpu") -> Any:
    settings = settings_of(set_up, "/tmp")
    if settings is None:
        return job_of(model, rows, length, ranks, device=device).forecast_ddp()
    config = ZeroConfig.from_dict(settings)
    return job_of(model, rows, length, ranks, config.param_dtype, device).forecast(set_up, settings, config)


def _held_on(device: str) -> int:
    """Returns the bytes of this rank, and counts its peak from now on."""
    if device == "cpu":
        return held_before()
    # cuBLAS allocates a workspace for each thread at its first product. Backward has its own thread.
    square = torch.ones(8, 8, device=device, requires_grad=True)
    (square @ square).sum().backward()
    del square
    torch.accelerator.reset_peak_memory_stats()
    return torch.accelerator.memory_allocated()


def peak_of_rank(
    rank: int, world_size: int, *, model: str, set_up: str, rows: int, length: int, folder: str, device: str
) -> dict[str, int]:
    """Returns peak bytes and bytes of state of a rank after a few steps."""
    before_bytes = _held_on(device)
    torch.manual_seed(0)
    made, settings = MODELS_AND_PARTS[model]().train().to(device), settings_of(set_up, folder)
    optimizer = torch.optim.AdamW(made.parameters(), fused=True)
    engine = None if settings is None else ZeroEngine(made, [optimizer], settings)
    trained = torch.nn.parallel.DistributedDataParallel(made) if engine is None else made
    for _ in range(PEAK_STEPS):
        trained(**send_to_device(batch(model, made, rows, length), device)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    state = _ddp_state(made, optimizer)
    if engine is not None:
        engine.finish_parameters()
        passing = ("window, during the step", "gathered parameters, at most")
        state = sum(row.bytes for row in engine.memory_report().rows if row.kind not in passing)
    peak = (most_held() if device == "cpu" else torch.accelerator.max_memory_allocated()) - before_bytes
    if engine is not None:
        engine.close()
    return {"peak": peak, "state": state}


def _ddp_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Returns the bytes of parameters, buffers, gradients, DDP's buckets, and the optimizer's state."""
    parameters = sum(p.nbytes for p in model.parameters())
    kept = sum(v.nbytes for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v) and v.dim())
    return 3 * parameters + sum(b.nbytes for b in model.buffers()) + kept


def measure(
    cells: list[tuple[str, str, int, int]], ranks: int, time_limit_s: float, device: str = "cpu"
) -> list[dict[str, Any]]:
    """Measures each combination of model, set-up, samples and length: planned and measured bytes of the larger rank, and errors.

    A cell that does not end in time is left out.
    """
    found = []
    for model, set_up, rows, length in cells:
        cell = {"model": model, "set_up": set_up, "rows": rows, "length": length, "device": device}
        with tempfile.TemporaryDirectory(prefix="plan-") as folder:
            try:
                by_rank = on_ranks(peak_of_rank, ranks, limit_s=time_limit_s, folder=folder, **cell)
            except RanksTimedOutError:
                print(f"left out: {model}, {set_up} has not ended in {time_limit_s:.0f} s", file=sys.stderr, flush=True)
                continue
        state, peak = (max(each[what] for each in by_rank) for what in ("state", "peak"))
        forecast = planned(model, set_up, rows, length, ranks, device)
        if device != "cpu":
            # torch's allocator does not count the memory of its libraries.
            forecast = replace(forecast, device={k: v for k, v in forecast.device.items() if k != "runtime"})
        cell |= {"ranks": ranks, "planned": dict(forecast.device), "planned_state": forecast.state_bytes}
        cell |= {"planned_logits": forecast.device.get("logits", 0)}
        cell |= {"planned_peak": forecast.device_bytes, "measured_state": state, "measured_peak": peak}
        cell["state_error"] = forecast.state_bytes / state - 1 if state else 0.0
        cell["peak_error"] = forecast.device_bytes / peak - 1
        found.append(cell)
        print(f"{cell['peak_error']:+.1%} {cell['state_error']:+.1%} {model}, {set_up}", file=sys.stderr, flush=True)
    return found


def print_under_ddp(cells: list[dict[str, Any]]) -> None:
    """Prints the effect of each part on DDP's peak."""
    peaks = {cell["model"]: cell["measured_peak"] / MIB for cell in cells if cell["set_up"] == "ddp"}
    for model, peak in peaks.items():
        print(f"DDP, {model}: {peak:.0f} MiB, {peak - peaks.get('whole logits', peak):+.0f} MiB to whole logits")


def too_far(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [c for c in cells if abs(c["state_error"]) > MOST_STATE_ERROR or abs(c["peak_error"]) > MOST_PEAK_ERROR]


_COLUMNS = [
    *(("model", "model"), ("set-up", "set_up"), ("batch", lambda cell: f"{cell['rows']} x {cell['length']}")),
    *(
        ("state", "planned_state", ".0f", 1e6),
        ("measured", "measured_state", ".0f", 1e6),
        ("error", "state_error", "+.1%"),
    ),
    ("logits", "planned_logits", ".0f", 1e6),
    *(("peak", "planned_peak", ".0f", 1e6), ("measured", "measured_peak", ".0f", 1e6), ("error", "peak_error", "+.1%")),
]


def main() -> int:
    options = read_options(
        __doc__,
        models=(list(MODELS), None, MODELS_AND_PARTS),
        set_ups=(list(SET_UPS), None, SET_UPS),
        batches=(["2x64", "8x128"], "rows x length"),
        parts=(
            False,
            "a GPT-2 with its own vocabulary, 4 x 128, by parts that need less memory; --models and --batches do not count",
        ),
        device=("cpu", "or another that torch knows"),
        ranks=2,
        time_limit_s=300.0,
    )
    if options.device != "cpu" and not torch.get_device_module(options.device).is_available():
        print(f"skipped: no {options.device} device on this machine")
        return 0
    if options.device != "cpu":
        # The planner traces for a GPU only after CUDA is initialized.
        torch.get_device_module(options.device).init()
    models, batches, name = options.models, options.batches, "planned_peaks.json"
    if options.parts:
        models, batches, name = [each for each in PARTS if HAS_TRL or PARTS[each] is not _trls], ["4x128"], "parts.json"
        print(
            "left out: Liger's loss, whose kernels need a GPU" + ("" if HAS_TRL else "; TRL's, as trl is not installed")
        )
    shapes = [tuple(map(int, each.split("x"))) for each in batches]
    wanted = [(m, s, *shape) for m in models for shape in shapes for s in options.set_ups]
    cells = measure(wanted, options.ranks, options.time_limit_s, options.device)
    print_table("A rank's memory, in MB: planned and measured", _COLUMNS, cells)
    if options.parts:
        print_under_ddp(cells)
    kind = {"kind": "parts" if options.parts else "forecasts"}
    write_record(options.json or RESULTS / name, describe_run(options) | kind | {"cells": cells})
    wrong = too_far(cells)
    for cell in wrong:
        print("too far:", *texts_of(_COLUMNS, cell))
    return int(bool(wrong) or len(cells) < len(wanted))


if __name__ == "__main__":
    sys.exit(main())
