"""ZeRO over the copies of a tensor-parallel model, beside transformers' own FSDP2 over them.

    python scripts/bench/axes.py [--steps 8] [--rounds 2] [--stages 2 3]

Four gloo ranks on this machine, two copies of a Llama of 15 M parameters, each split over two ranks. For each way, in fresh
ranks: CPU time a step (mean of the ranks), bytes that a rank sends a step, as sockets counted them, and the peak of memory
above what the process had before the model. Traffic of the split itself is in all of them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from memory import status_bytes
from ranks import run_ranks
from rich.console import Console
from rich.table import Table
from wire import tcp_bytes

_RANKS, _TP = 4, 2
_WARM_STEPS = 2
_FSDP = "FSDP2"


def measure(rank: int, world_size: int, *, folder: str, way: str, steps: int) -> dict[str, float]:
    """One way in one rank: seconds of CPU and bytes sent a step, and bytes at the peak."""
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    from hf_zero import ZeroEngine, parallel_config

    before = status_bytes("VmRSS")
    if way == _FSDP:
        config: Any = DistributedConfig(tp_size=_TP, fsdp_size=world_size // _TP)
    else:
        config = parallel_config(tp_size=_TP)
    model = LlamaForCausalLM.from_pretrained(folder, distributed_config=config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = None if way == _FSDP else ZeroEngine(model, [optimizer], {"stage": int(way.split()[-1])})
    ids = torch.randint(8000, (2, 64), generator=torch.Generator().manual_seed(rank // _TP))

    def train(count: int) -> None:
        for _ in range(count):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()

    train(_WARM_STEPS)
    sent, began_s = tcp_bytes().sent, time.process_time()
    train(steps)
    cpu_s, sent = time.process_time() - began_s, tcp_bytes().sent - sent
    peak = status_bytes("VmHWM") - before
    if engine is not None:
        engine.close()
    return {"cpu_s": cpu_s / steps, "sent": sent / steps, "peak": peak}


def save_model(folder: str) -> None:
    """Writes the model that all ways train."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    size = {"vocab_size": 8000, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 5}
    LlamaForCausalLM(LlamaConfig(**size, num_attention_heads=8)).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3])
    arguments = parser.parse_args()
    ways = [_FSDP, *(f"hf_zero stage {stage}" for stage in arguments.stages)]
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        for _ in range(arguments.rounds):
            for way in ways:
                of_ranks = run_ranks(
                    measure,
                    world_size=_RANKS,
                    time_limit_s=600,
                    keyword_arguments={"folder": str(Path(folder)), "way": way, "steps": arguments.steps},
                )
                found[way].append({key: sum(each[key] for each in of_ranks) / _RANKS for key in of_ranks[0]})
    table = Table("way", "CPU s a step", "of FSDP2's", "MB sent a step", "peak MiB")
    base = median(each["cpu_s"] for each in found[_FSDP])
    for way, rounds in found.items():
        cpu_s, sent, peak = (median(each[key] for each in rounds) for key in ("cpu_s", "sent", "peak"))
        table.add_row(way, f"{cpu_s:.3f}", f"{cpu_s / base:.2f}", f"{sent / 1e6:.1f}", f"{peak / 2**20:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
