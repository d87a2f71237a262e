"""Sums over micro-batches of gradients that are stepped from host memory: taken there, and not in backward."""

import threading

import pytest
import standin_device
import torch
from shared_ranks import on_ranks
from standin_runs import FILES, HOST, own_device, prepared
from training import gpt2_batch

pytestmark = [pytest.mark.timeout(200), standin_device.needs_compiler]

MICRO_BATCHES = 3
PLAIN = {"stage": 2, "grad_accumulation": "sharded"}
OFFLOADED = {
    "stage 2": {"stage": 2, "offload": HOST},
    "stage 2, early": {"stage": 2, "offload": HOST | {"speculate_bytes": "1GiB"}},
    "stage 2, half": {"stage": 2, "offload": HOST | {"ratio": 0.5}},
    "stage 3": {"stage": 3, "offload": HOST},
    "stage 3, in files": {"stage": 3, "offload": FILES},
}


class Waits:
    """What the host waits for while backward runs, on other threads than those of sums and steps."""

    def __init__(self, compiled) -> None:
        self._compiled = compiled
        self.found: list[str] = []

    def of(self, backward) -> None:
        before = len(self._compiled.waits())
        backward()
        beside = {thread.native_id for thread in threading.enumerate() if thread.name.startswith("hf_zero")}
        self.found += [what for thread, what in self._compiled.waits()[before:] if thread not in beside]


def trained(compiled, settings: dict, *, looks: bool = False) -> tuple[list[torch.Tensor], list[str]]:
    """Losses, norms and weights of a few steps of several micro-batches; and what all backwards but a step's last waited for."""
    model, optimizer, engine = prepared({"bucket_bytes": "20KiB", "grad_accumulation": "sharded", **settings})
    found, waits = [], Waits(compiled)
    for step in range(2):
        for micro in range(MICRO_BATCHES):
            batch = gpt2_batch(torch.Generator().manual_seed(100 * step + micro), 2)
            batch = {name: values.to(own_device()) for name, values in batch.items()}
            if micro < MICRO_BATCHES - 1:
                with engine.no_sync():
                    loss = model(**batch).loss
                    waits.of(loss.backward)
            else:
                loss = model(**batch).loss
                loss.backward()
            if looks and micro == 0:
                found += [engine.full_grad(parameter).cpu() for parameter in model.parameters()]
                (optimizer if step else model).zero_grad(set_to_none=False)
            found.append(loss.detach().cpu())
        found.append(engine.clip_grad_norm_(1.0).cpu())
        optimizer.step()
        optimizer.zero_grad()
    # One more shard a bucket at most.
    assert engine.tier.downlink.sum_bytes <= sum(4 * bucket.layout.shard_numel for bucket in engine.buckets)
    with engine.gathered():
        found += [parameter.detach().cpu() for parameter in model.parameters()]
    return found, waits.found


CELLS = [
    pytest.param(1, ["stage 2", "stage 3, in files"], True, id="1"),
    pytest.param(2, ["stage 2, early"], False, id="2"),
    *(pytest.param(ranks, list(OFFLOADED), True, id=f"{ranks}-all", marks=pytest.mark.slow) for ranks in (1, 2)),
]


@pytest.mark.short_cells("2")
@pytest.mark.parametrize(("world_size", "names", "looks"), CELLS)
@on_ranks(time_limit_s=150)
def test_backward_waits_for_no_copy_of_a_micro_batch_and_the_sums_are_those_of_the_device(
    rank, world_size, names, looks, library, tmp_path
):
    folder = str(tmp_path)
    compiled = standin_device.register(library)
    compiled.keep_to(rank + 1)
    with standin_device.process_group(rank, world_size, folder):
        plain, _ = trained(compiled, PLAIN)
        for name in names:
            settings = OFFLOADED[name]
            files = {"nvme_path": folder} if "nvme" in settings["offload"].values() else {}
            found, waits = trained(compiled, settings | {"offload": settings["offload"] | files})
            assert all(map(torch.equal, found, plain)), name
            if world_size == 1:
                assert waits == [], (name, set(waits))
        if looks:
            looked, _ = trained(compiled, PLAIN, looks=True)
            found, _ = trained(compiled, OFFLOADED["stage 2"], looks=True)
            assert all(map(torch.equal, found, looked))
    assert compiled.hazards() == []
    assert compiled.contexts() == {rank + 1}
