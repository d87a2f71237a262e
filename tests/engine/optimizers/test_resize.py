"""Growing and shrinking the vocabulary in the middle of training."""

import itertools

import numpy as np
import pytest
import torch
from cells import short_rows
from ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel
from training import VOCABULARY, fused_adamw, gpt2, gpt2_batch

from hf_zero.engine.engine import ZeroEngine
from hf_zero.optimizer.state_rows import put_state_back

pytestmark = pytest.mark.timeout(120)


def trained_across_a_resize(rank: int, world_size: int, settings: dict | None, vocabulary: int) -> dict:
    torch.manual_seed(0)
    model = gpt2()
    optimizer = fused_adamw(model)
    engine = None if settings is None else ZeroEngine(model, [optimizer], settings)
    entry = DistributedDataParallel(model) if settings is None else model
    losses = []
    for step in range(6):
        if step == 3:
            torch.manual_seed(7)
            if engine is not None:
                engine.resize_embeddings(vocabulary, mean_resizing=False)
            else:
                before = dict(model.named_parameters())
                states = {name: dict(optimizer.state.pop(p)) for name, p in before.items()}
                shapes = {name: p.shape for name, p in before.items()}
                # DDP's hooks and the last graph would expect gradients of the old shapes.
                entry = loss = None
                model.resize_token_embeddings(vocabulary, mean_resizing=False)
                put_state_back([optimizer], states, shapes, before, dict(model.named_parameters()))
                entry = DistributedDataParallel(model)
        batch = gpt2_batch(torch.Generator().manual_seed(10 * step + rank), 2)
        batch = {name: ids % min(vocabulary, VOCABULARY) for name, ids in batch.items()}
        loss = entry(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "tensors": {name: value.numpy().copy() for name, value in model.state_dict().items()}}


LARGER, SMALLER = VOCABULARY + 30, VOCABULARY - 11


@pytest.mark.parametrize(
    ("stage", "vocabulary"),
    short_rows(itertools.product((1, 2, 3), (LARGER, SMALLER)), [(1, LARGER), (3, SMALLER)]),
)
@pytest.mark.short_cells("3-200")
def test_training_goes_on_as_under_ddp(stage, vocabulary):
    arguments = {"settings": None, "vocabulary": vocabulary}
    expected = run_ranks(trained_across_a_resize, world_size=2, time_limit_s=60, keyword_arguments=arguments)
    arguments["settings"] = {"stage": stage, "bucket_bytes": "20KiB"}
    found = run_ranks(trained_across_a_resize, world_size=2, time_limit_s=60, keyword_arguments=arguments)
    for here, there in zip(found, expected):
        assert here["losses"] == there["losses"]
        assert here["tensors"]["transformer.wte.weight"].shape[0] == vocabulary
        for name, value in there["tensors"].items():
            assert np.array_equal(here["tensors"][name], value), name
