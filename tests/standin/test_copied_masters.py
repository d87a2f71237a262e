"""Masters of parameters on a device whose optimizer state is in files, stepped on the device or on the host."""

from unittest import mock

import pytest
import standin_device
import torch
from shared_ranks import on_ranks
from training import fused_adamw, gpt2, gpt2_batch

from hf_zero.buckets.rows import MASTER
from hf_zero.config import ZeroConfig
from hf_zero.engine.engine import ZeroEngine
from hf_zero.offload.files import aligned
from hf_zero.planner.layouts import lay_out, ranks_without_a_group

pytestmark = [pytest.mark.timeout(400), standin_device.needs_compiler]


def trained(settings: dict, *, has_room: bool = True) -> tuple[list[torch.Tensor], ZeroEngine]:
    """Returns the losses of three steps with a script's edits in between, the weights afterwards, and the engine."""
    torch.manual_seed(0)
    model = gpt2(layers=2).to(standin_device.NAME)
    optimizer = fused_adamw(model)
    with mock.patch("hf_zero.engine.assemble.has_room_to_step", return_value=has_room):
        engine = ZeroEngine(model, [optimizer], settings)
    found = []
    for seed in range(3):
        batch = gpt2_batch(torch.Generator().manual_seed(seed), 2)
        loss = model(**{name: values.to(standin_device.NAME) for name, values in batch.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().cpu())
        if seed < 2:
            with engine.gathered(writeback=True), torch.no_grad():
                model.transformer.h[0].mlp.c_fc.weight.mul_(0.5)
    with engine.gathered():
        return found + [parameter.detach().cpu() for parameter in model.parameters()], engine


@pytest.mark.parametrize("has_room", [True, False])
@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(1)
def test_a_step_moves_16_bytes_a_parameter_and_keeps_the_bits(rank, world_size, stage, has_room, library, tmp_path):
    standin_device.register(library)
    plain, _ = trained({"stage": stage}, has_room=False)
    settings = {"stage": stage, "offload": {"optimizer": "nvme", "nvme_path": str(tmp_path)}}
    found, engine = trained(settings, has_room=has_room)
    assert all(map(torch.equal, found, plain))
    expected = sum(2 * aligned(4 * bucket.layout.shard_numel) for bucket in engine.buckets)
    assert engine.memory_report().traffic.written_bytes_a_step == expected
    assert engine.tier.files.moved_bytes == (expected, expected)
    config = ZeroConfig.from_dict(settings)
    model = gpt2(layers=2)
    groups = ranks_without_a_group(1, 1, config, "standin")
    device = torch.device(standin_device.NAME)
    layout = lay_out(model, [fused_adamw(model)], config, groups, device, free_bytes=None if has_room else 0)
    assert all(cost.visits == bucket.tier.visits == has_room for cost, bucket in zip(layout.costs, engine.buckets))
    assert [(cost.file_bytes, cost.keeps_master) for cost in layout.costs] == [
        (8 * bucket.layout.shard_numel, False) for bucket in engine.buckets
    ]


@pytest.mark.parametrize("has_room", [True, False])
@on_ranks(1)
def test_masters_of_16_bit_parameters_stay_in_files(rank, world_size, has_room, library, tmp_path):
    standin_device.register(library)
    settings = {"stage": 2, "param_dtype": "bfloat16"}
    plain, _ = trained(settings, has_room=False)
    offload = {"optimizer": "nvme", "nvme_path": str(tmp_path)}
    found, engine = trained(settings | {"offload": offload}, has_room=has_room)
    assert all(map(torch.equal, found, plain))
    assert all(shard.dtypes.get(MASTER) == torch.float32 for shard in engine.tier.files.shards)


@pytest.mark.parametrize("moments", ["32bit", "8bit"])
@on_ranks(1)
def test_a_closed_engine_leaves_state_on_the_device(rank, world_size, moments, library, tmp_path):
    standin_device.register(library)
    settings = {"stage": 2, "moments": moments}

    def states(settings: dict) -> list[torch.Tensor]:
        _, engine = trained(settings)
        optimizer = engine.optimizers[0].optimizer
        engine.close()
        return [optimizer.state[row]["exp_avg_sq"] for group in optimizer.param_groups for row in group["params"]]

    found = states(settings | {"offload": {"optimizer": "nvme", "nvme_path": str(tmp_path)}})
    assert all(state.device.type == standin_device.NAME for state in found)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(found, states(settings), strict=True))
