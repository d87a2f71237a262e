"""ZeRO over the copies of a tensor-parallel or expert-parallel model, next to transformers' own FSDP2 over the copies.

    python scripts/bench/axes.py            # a Llama of 15 M parameters, eight steps, three rounds: two minutes
    python scripts/bench/axes.py --tp 1 --ep 2    # a mixture of experts, which are split over two ranks, and nothing else
    python scripts/bench/axes.py --quick    # a tiny one, once: does the harness run?

Four gloo ranks on this machine: by default two copies of a model, each split over two ranks. For each way, in fresh ranks: CPU
time per step (mean of the ranks), bytes sent by a rank per step, as counted by sockets, and the peak of memory above the memory
before the model. All figures include the traffic of the split itself.
"""

from __future__ import annotations

import argparse
import tempfile
from statistics import median
from typing import Any

import torch
from harness import held_before, most_held, on_ranks, read_options, spent_in
from tables import show_and_keep

_RANKS = 4
_WARM_STEPS = 2
_FSDP = "FSDP2"
_LLAMA = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 5}
_TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def measure(rank: int, world_size: int, *, folder: str, way: str, steps: int, tp: int, ep: int) -> dict[str, float]:
    """Measures one way in one rank: seconds of CPU and bytes sent per step, and bytes at the peak."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    from hf_zero import ZeroEngine, parallel_config

    before = held_before()
    if way == _FSDP:
        config: Any = DistributedConfig(tp_size=tp, ep_size=ep, fsdp_size=world_size // tp)
    else:
        config = parallel_config(tp_size=tp, ep_size=ep)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = None if way == _FSDP else ZeroEngine(model, [optimizer], {"stage": int(way.split()[-1])})
    ids = torch.randint(8000, (2, 64), generator=torch.Generator().manual_seed(rank // tp))

    def train(count: int) -> None:
        for _ in range(count):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    train(_WARM_STEPS)
    spent = spent_in(lambda: train(steps))
    peak = most_held() - before
    if engine is not None:
        engine.close()
    return {"cpu_s": spent.cpu_s / steps, "sent": spent.sent_bytes / steps, "peak": peak}


def save_model(folder: str, size: dict[str, int], *, mixture: bool) -> int:
    """Writes the model for all ways; returns its number of parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    size = {"vocab_size": 8000, "num_attention_heads": 8, **size}
    if mixture:
        model: Any = MixtralForCausalLM(MixtralConfig(num_key_value_heads=8, **size, **_EXPERTS))
    else:
        model = LlamaForCausalLM(LlamaConfig(**size))
    model.save_pretrained(folder)
    return model.num_parameters()


def measure_all(options: argparse.Namespace) -> tuple[int, dict[str, list[dict[str, float]]]]:
    """Returns the model's number of parameters, and for each way the mean of its ranks in each round."""
    ways = [_FSDP, *(f"stage {stage}" for stage in options.stages)]
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        numel = save_model(folder, _TINY if options.quick else _LLAMA, mixture=options.ep > 1)
        for _ in range(options.rounds):
            for way in ways:
                shape = {"steps": options.steps, "tp": options.tp, "ep": options.ep}
                of_ranks = on_ranks(measure, _RANKS, folder=folder, way=way, **shape)
                found[way].append({key: sum(each[key] for each in of_ranks) / _RANKS for key in of_ranks[0]})
    return numel, found


def summarize(found: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Makes a row per way: medians, and CPU time relative to FSDP2's in the median round."""
    rows = []
    for way, rounds in found.items():
        ratios = [own["cpu_s"] / its["cpu_s"] for own, its in zip(rounds, found[_FSDP])]
        rows.append(
            {
                "name": way,
                "cpu_s": median(each["cpu_s"] for each in rounds),
                "to_fsdp2": median(ratios),
                "sent_bytes": median(each["sent"] for each in rounds),
                "peak_bytes": median(each["peak"] for each in rounds),
            }
        )
    return rows


def main() -> int:
    options = read_options(
        __doc__,
        quick={"steps": 1, "rounds": 1},
        steps=8,
        rounds=3,
        tp=(2, "ranks that compute a batch together"),
        ep=(1, "ranks over which the experts of a mixture are split"),
        stages=[1, 2, 3],
    )
    numel, found = measure_all(options)
    figures = {"kind": "axes", "parameters": numel, "engines": summarize(found), "rounds": found}
    print(f"{numel / 1e6:.1f} M parameters, {_RANKS} ranks, tp {options.tp}, ep {options.ep}")
    show_and_keep("axes", options, figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
