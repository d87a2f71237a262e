"""bitsandbytes' optimizers on the CPU: state in 8 bits where DDP has it so, and what a script has said of single parameters."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from cells import slow
from loops import engine_or_ddp, take_step
from shared_ranks import on_ranks, on_shared_ranks
from torch import nn
from training import save_engine

from hf_zero.hooks.weak import engine_attached_to
from hf_zero.integrations.state_io import ZERO_FOLDER, load_engine

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")]
bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes, of the extra `dev`, is not installed")
optim = bitsandbytes.optim
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw 8-bit": partial(optim.AdamW8bit, lr=1e-2),
    "adamw 8-bit of large ones": partial(optim.AdamW, lr=1e-2, optim_bits=8, min_8bit_size=16000),
    "adamw 32-bit": partial(optim.AdamW, lr=1e-2),
    "lion 8-bit": partial(optim.Lion8bit, lr=1e-3),
    "paged adamw 8-bit": partial(optim.PagedAdamW8bit, lr=1e-2),
    "rmsprop 8-bit": partial(optim.RMSprop8bit, lr=1e-2),
    "ademamix 8-bit": partial(optim.AdEMAMix8bit, lr=1e-2),
    "lamb 8-bit": partial(optim.LAMB8bit, lr=1e-2),
}


def of_modules(manager, model: nn.Module) -> None:
    """As Trainer does for embeddings."""
    manager.register_module_override(model[0], "weight", {"optim_bits": 32})


def of_parameters(manager, model: nn.Module) -> None:
    """By identity, which is noted by place, too; a rank has other places."""
    manager.override_config(model[3].weight, key_value_dict={"lr": 1e-3, "optim_bits": 32})
    manager.register_parameters(grouped(model))


def grouped(model: nn.Module) -> list[dict]:
    matrices, others = ([p for p in model.parameters() if (p.dim() > 1) is wanted] for wanted in (True, False))
    return [{"params": matrices}, {"params": others, "weight_decay": 0.0}]


def built(
    name: str, says: Callable | None, settings: dict | None
) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    # Sizes that no rank's half of a bucket, and no block of 256 elements, begins or ends at.
    model = nn.Sequential(nn.Embedding(300, 50), nn.Linear(50, 333), nn.Tanh(), nn.Linear(333, 97))
    manager = optim.GlobalOptimManager.get_instance()
    manager.initialize()
    if says is not None:
        says(manager, model)
    optimizer = OPTIMIZERS[name](grouped(model))
    entry, _ = engine_or_ddp(model, optimizer, None if settings is None else {"bucket_bytes": "20KiB", **settings})
    return model, entry, optimizer


def steps(rank: int, entry: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> list[float]:
    losses = []
    for number in numbers:
        words = torch.randint(300, (4, 6), generator=torch.Generator().manual_seed(10 * number + rank))
        losses.append(take_step(entry(words).square().mean(), optimizer))
    return losses


STAGES = [
    {"stage": 0},
    {"stage": 1},
    {"stage": 2},
    {"stage": 3, "unit_bytes": 0},
    {"stage": 2, "offload": {"optimizer": "cpu"}},
    {"stage": 3, "unit_bytes": 0, "offload": {"optimizer": "cpu", "params": "cpu"}},
]


@pytest.mark.parametrize(
    ("cells", "variants"),
    [
        ([("adamw 8-bit", of_modules), ("adamw 8-bit", of_parameters)], STAGES),
        ([("adamw 8-bit of large ones", None), ("lion 8-bit", None), ("paged adamw 8-bit", of_modules)], STAGES[2:4]),
        slow([(name, None) for name in OPTIMIZERS], STAGES),
        slow([(name, says) for name in OPTIMIZERS for says in (of_modules, of_parameters)], STAGES),
    ],
    ids=["overrides", "others", "all", "all-overrides"],
)
@on_shared_ranks
def test_losses_are_ddps_bit_for_bit(rank, world_size, cells, variants):
    for name, says in cells:
        _, entry, optimizer = built(name, says, None)
        expected = steps(rank, entry, optimizer, range(4))
        for settings in variants:
            _, entry, optimizer = built(name, says, settings)
            assert steps(rank, entry, optimizer, range(4)) == expected, (name, says, settings)


@on_ranks(2)
def test_state_in_8_bits_is_resumed_at_another_stage(rank, world_size, tmp_path):
    folder = str(tmp_path)
    model, entry, optimizer = built("adamw 8-bit", of_modules, {"stage": 2})
    steps(rank, entry, optimizer, range(2))
    save_engine(engine_attached_to(model), folder)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    expected = steps(rank, entry, optimizer, range(2, 4))
    model, entry, optimizer = built("adamw 8-bit", of_modules, {"stage": 3})
    model.load_state_dict(weights)
    load_engine(engine_attached_to(model), f"{folder}/{ZERO_FOLDER}")
    assert steps(rank, entry, optimizer, range(2, 4)) == expected


@on_ranks(2)
def test_the_full_state_of_a_parameter_that_one_rank_has_keeps_its_8_bits(rank, world_size):
    plain, entry, optimizer = built("adamw 8-bit", None, None)
    steps(rank, entry, optimizer, range(2))
    expected = [optimizer.state[parameter] for parameter in plain.parameters()]
    for stage in (1, 2, 3):
        model, entry, optimizer = built("adamw 8-bit", None, {"stage": stage})
        steps(rank, entry, optimizer, range(2))
        for parameter, state in zip(model.parameters(), expected, strict=True):
            found = engine_attached_to(model).full_state(parameter)
            assert found["state1"].dtype == state["state1"].dtype
            assert torch.equal(found["state1"], state["state1"]), (stage, parameter.shape)


def test_state_of_which_only_large_parameters_have_8_bits_has_no_file(tmp_path):
    with pytest.raises(ValueError, match=r"AdamW8bit keeps different state for large.*`offload\.optimizer: cpu`"):
        built("adamw 8-bit", None, {"stage": 2, "offload": {"optimizer": "nvme", "nvme_path": str(tmp_path)}})
