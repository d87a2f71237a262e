"""Ranks that run layers of equal size in different orders are told so: a device's collectives have no tags."""

import pytest
import standin_device
import torch
from shared_ranks import on_ranks
from torch import nn
from training import fused_adamw

from hf_zero.comm.arrivals import CommunicationError
from hf_zero.engine.engine import ZeroEngine

pytestmark = [pytest.mark.timeout(400), standin_device.needs_compiler]


class Twins(nn.Module):
    """Two layers of one size, run in the order that the caller says."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, hidden: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        for index in order:
            hidden = self.layers[index](hidden)
        return hidden.sum()


@on_ranks(2)
def test_a_step_on_layers_that_were_swapped_is_refused(rank, world_size, library, tmp_path):
    folder = str(tmp_path)
    standin_device.register(library)
    device = torch.device(standin_device.NAME, rank)
    torch.get_device_module(device).set_device(rank)
    with standin_device.process_group(rank, world_size, folder, timeout_s=60.0):
        model = Twins()
        optimizer = fused_adamw(model)
        settings = {"stage": 3, "unit_modules": ["Linear"], "prefetch_units": 0, "reshard_after_forward": False}
        ZeroEngine(model, [optimizer], settings, device=device)
        batch = torch.ones(2, 8).to(device)
        for order in ((0, 1), (1, 0)):
            # Alike on all ranks, each order is a good one.
            model(batch, order).backward()
            optimizer.step()
            optimizer.zero_grad()
        with pytest.raises(CommunicationError, match="have gathered parameters in different orders"):
            model(batch, (rank, 1 - rank)).backward()
