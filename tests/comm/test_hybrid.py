"""Several shard groups: the losses of one, bytes between nodes as the formula says, checkpoints by the first group alone."""

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cells import slow
from safetensors import safe_open
from shared_ranks import on_ranks, run_on_ranks
from training import Job, gpt2, gpt2_batch, train
from wire_runs import go_on, resume, save, start

from hf_zero.comm.groups import Groups
from hf_zero.config import CommConfig, ConfigError, ZeroConfig
from hf_zero.engine.engine import ZeroEngine
from hf_zero.integrations.announce import state_plan

pytestmark = pytest.mark.timeout(180)

SMALL_BUCKETS = "20KiB"


def setting(stage: int, comm: dict, **more) -> dict:
    return {"stage": stage, "bucket_bytes": SMALL_BUCKETS, "comm": comm, **more}


def hybrid(size: int, **more) -> dict:
    return {"shard_group_size": size, "node_size": size, **more}


def variants_of(size: int) -> list[dict]:
    return [
        setting(1, hybrid(size)),
        setting(2, hybrid(size), grad_accumulation="local"),
        setting(3, hybrid(size), offload={"optimizer": "cpu"}),
        setting(2, hybrid(size)),
        setting(3, hybrid(size)),
    ]


def with_one_group_and_several(
    rank: int, world_size: int, variants: list[dict]
) -> list[tuple[dict, float, float, str]]:
    found = []
    job = {"steps": 3, "accumulation": 2, "max_norm": 0.5}
    plain = train(rank, world_size, Job(settings=setting(3, {}), **job))
    for settings in variants:
        outcome = train(rank, world_size, Job(settings=settings, **job))
        values = b"".join(outcome.tensors[name].tobytes() for name in outcome.parameter_names)
        found.append(
            (settings, outcome.loss_error(plain), outcome.norm_error(plain), hashlib.sha256(values).hexdigest())
        )
    return found


@pytest.mark.parametrize(
    ("world_size", "size", "variants"),
    [(4, 2, variants_of(2)[2:3]), slow(4, 2, [*variants_of(2)[:2], *variants_of(2)[3:]]), slow(6, 3, variants_of(3))],
    ids=["2x2", "2x2-others", "2x3"],
)
def test_several_shard_groups_have_the_losses_of_one(world_size, size, variants):
    by_rank = run_on_ranks(with_one_group_and_several, world_size=world_size, variants=variants)
    for outcomes in zip(*by_rank):
        settings = outcomes[0][0]
        assert len({digest for *_, digest in outcomes}) == 1, settings
        loss_error, norm_error = (max(outcome[place] for outcome in outcomes) for place in (1, 2))
        print(
            f"{world_size // size} groups of {size}, {settings}: off stage 3 by {loss_error:.1e}, norms {norm_error:.1e}"
        )
        assert loss_error <= 1e-5 and norm_error <= 1e-5, settings


def counts(rank: int, world_size: int, stage: int, comm: dict) -> tuple[dict[str, tuple[int, int]], int]:
    """Kind → bytes sent and bytes between nodes of one step; elements of all buckets."""
    model, optimizer, engine, _ = start(setting(stage, comm), steps=1)
    engine.finish_parameters()
    before = {row.kind: row for row in engine.comm_report().rows}
    go_on(model, optimizer, [1])
    engine.finish_parameters()
    sent = {
        row.kind: (row.bytes_sent - before[row.kind].bytes_sent, row.bytes_between - before[row.kind].bytes_between)
        for row in engine.comm_report().rows
    }
    assert all(
        row.gb_per_second > 0 for row in engine.comm_report().rows if row.bytes_sent and "broadcast" not in row.kind
    )
    assert "between nodes" in engine.comm_report().table()
    return sent, sum(bucket.layout.numel for bucket in engine.buckets)


@pytest.mark.parametrize(
    ("stage", "world_size", "size"),
    [pytest.param(2, 4, 2, marks=pytest.mark.slow), (3, 4, 2), pytest.param(3, 6, 3, marks=pytest.mark.slow)],
    ids=["2, 2x2", "3, 2x2", "3, 2x3"],
)
def test_bytes_between_nodes_are_what_the_formula_says(stage, world_size, size):
    groups, title = world_size // size, f"stage {stage}, {world_size // size} nodes of {size}"
    arguments = {"stage": stage, "comm": hybrid(size)}
    for sent, numel in run_on_ranks(counts, world_size=world_size, **arguments):
        # R groups of S: a rank sends 2 (R-1)/R of its shard, an S-th of the elements, to other groups; else to S - 1 peers.
        formula = 4 * 2 * (groups - 1) * numel // groups // size
        between = sum(each for _, each in sent.values())
        print(
            f"{title}, groups: {between} bytes between nodes a step and rank, {between / formula:.4f} of the formula's"
        )
        assert sent["all-reduce of shards of gradients"] == (formula, formula)
        assert sent["reduce-scatter of gradients"] == (4 * numel * (size - 1) // size, 0)
        assert sent["all-gather of parameters"][0] >= 4 * numel * (size - 1) // size
        assert sent["all-gather of parameters"][1] == 0
        assert between <= formula + 1000
    arguments = {"stage": stage, "comm": {"node_size": size}}
    for sent, numel in run_on_ranks(counts, world_size=world_size, **arguments):
        # One group: of W - 1 peers W - S are elsewhere.
        peers, elsewhere = world_size - 1, world_size - size
        print(f"{title}, one group: {sum(each for _, each in sent.values())} bytes between nodes a step and rank")
        assert sent["reduce-scatter of gradients"] == (
            4 * numel * peers // world_size,
            4 * numel * elsewhere // world_size,
        )
        assert sent["all-gather of parameters"][1] * peers == sent["all-gather of parameters"][0] * elsewhere


@pytest.mark.slow
@on_ranks(4)
def test_checkpoints_of_several_shard_groups(rank, world_size, tmp_path):
    root = str(tmp_path)
    for stage in (2, 3):
        settings = setting(stage, hybrid(2, weights="int8"))
        folder = Path(root) / str(stage)
        model, optimizer, engine, _ = start(settings)
        save(engine, model, folder)
        expected = go_on(model, optimizer, range(3, 5))
        if rank == 0:
            kept = []
            for path in sorted((folder / "zero").glob("*.safetensors")):
                with safe_open(path, framework="pt") as opened:
                    kept.append(len(list(opened.keys())))
            assert len(kept) == 4 and kept[0] and kept[1] and kept[2:] == [0, 0]
        model, optimizer, engine = resume(settings, folder)
        assert go_on(model, optimizer, range(3, 5)) == expected
        model, optimizer, engine = resume(setting(5 - stage, {}), folder)
        assert go_on(model, optimizer, range(3, 5)) == pytest.approx(expected, rel=3e-3)
        gradientless = next(engine.model.parameters())
        assert engine.full_state(gradientless)["exp_avg"].shape == gradientless.shape
        dist.barrier()


def finds_its_place(rank: int, world_size: int) -> None:

    os.environ["GROUP_RANK"] = str(rank // 2)
    told = Groups.create(stage=2, device_type="cpu", comm=CommConfig())
    assert told.nodes == (0, 0, 1, 1) and told.shard.ranks == (0, 1, 2, 3) and told.peers_elsewhere(told.shard) == 2
    said = Groups.create(stage=2, device_type="cpu", comm=CommConfig(node_size=3, shard_group_size=2))
    assert said.nodes == (0, 0, 0, 1)
    assert said.shard.ranks == ((0, 1), (2, 3))[rank // 2] and said.replicate.ranks == ((0, 2), (1, 3))[rank % 2]
    whole = Groups.create(stage=0, device_type="cpu", comm=CommConfig())
    assert whole.shard.ranks == (rank,) and whole.replicate.ranks == (0, 1, 2, 3)
    with pytest.raises(
        ConfigError, match=r"`comm.shard_group_size` is 3, which does not divide the 4 ranks.*allowed: 2, 4, auto"
    ):
        model = torch.nn.Linear(4, 4)
        ZeroEngine(model, [torch.optim.SGD(model.parameters(), lr=0.1)], "stage=2,comm.shard_group_size=3")


def test_groups_and_nodes():
    run_on_ranks(finds_its_place, world_size=4)
    with pytest.raises(ConfigError, match=r"`comm.shard_group_size: 2` needs stages 1 to 3"):
        ZeroConfig.of("stage=0,comm.shard_group_size=2")
    with pytest.raises(ConfigError, match=r"`comm.shard_group_size` is 1; allowed: auto, a whole number from 2"):
        ZeroConfig.of("comm.shard_group_size=1")
    with pytest.raises(ConfigError, match=r"`comm.node_size` is 0; allowed: auto, a whole number from 1"):
        ZeroConfig.of("comm.node_size=0")


def steps_with_secondary_shards(rank: int, world_size: int, size: int, wires: list[dict]) -> list[tuple[int, int, int]]:
    """Of each step: parameter bytes between the nodes in forward and in backward, and inside the node in backward."""
    job = Job(steps=3, accumulation=2, max_norm=100.0)
    exact, near = ({"node_size": size, **more} for more in ({}, {"secondary_shard": "node"}))
    for more in wires:
        plain, kept = (
            train(rank, world_size, replace(job, settings=setting(3, {**each, **more}))) for each in (exact, near)
        )
        assert kept.equals(plain), more
    torch.manual_seed(0)
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = ZeroEngine(model, [optimizer], setting(3, near))
    layers = [bucket for unit in engine.sharded.schedule.units[1:] for bucket in unit.buckets]
    kind, inside = "all-gather of parameters", "all-gather of parameters in the node"
    moved, ended = [], 0
    for step in range(3):
        loss = model(**gpt2_batch(torch.Generator().manual_seed(step), 2)).loss
        forward = {row.kind: row for row in engine.comm_report().rows}
        loss.backward()
        backward = {row.kind: row for row in engine.comm_report().rows}
        held = {row.kind: row.bytes for row in engine.memory_report().rows}
        optimizer.step()
        optimizer.zero_grad()
        # In backward no parameter travels between the nodes; in forward it does, to each peer that is elsewhere.
        between = sum(row.bytes_between for name, row in backward.items() if name.startswith(kind))
        assert backward[kind].bytes_sent == forward[kind].bytes_sent and between == forward[kind].bytes_between
        assert forward[kind].bytes_between * (world_size - 1) == forward[kind].bytes_sent * (world_size - size)
        before = forward[inside].bytes_sent if inside in forward else 0
        again = backward[inside].bytes_sent - before
        moved.append((forward[kind].bytes_between - ended, between - forward[kind].bytes_between, again))
        ended = between
        if step:
            # All layers but the last, which stays from forward to backward, each but this rank's part of it.
            assert again == sum(bucket.layout.numel for bucket in layers) * 4 * (size - 1) // size * 2 // 3
            assert (
                held["secondary shards"]
                == sum(b.layout.numel * 4 for u in engine.sharded.schedule.units for b in u.buckets) // size
            )
    assert "secondary shards" not in {row.kind for row in engine.memory_report().rows}
    return moved


@pytest.mark.parametrize(
    ("world_size", "size", "wires"),
    [(4, 2, [{}]), slow(4, 2, [{"weights": "int8"}]), slow(6, 3, [{}, {"weights": "int8"}])],
    ids=["2x2", "2x2-int8", "2x3"],
)
def test_secondary_shards_keep_the_backwards_gathers_inside_the_node(world_size, size, wires):
    by_rank = run_on_ranks(steps_with_secondary_shards, world_size=world_size, size=size, wires=wires)
    for step, moved in enumerate(zip(*by_rank)):
        assert len(set(moved)) == 1
        forward, backward, inside = moved[0]
        print(
            f"2 nodes of {size}, step {step}: parameter bytes between nodes {forward} in forward and {backward} in backward, "
            f"{inside} inside the node"
        )
        assert forward > 0 and backward == 0 and inside > 0


def test_secondary_shards_without_a_node_to_keep_them_in_are_refused():
    with pytest.raises(ConfigError, match=r"`comm.secondary_shard: node` needs the gathers of stage 3 in backward"):
        ZeroConfig.of("stage=2,comm.secondary_shard=node")
    run_on_ranks(refuses_one_node)


def refuses_one_node(rank: int, world_size: int) -> None:
    for size in (1, 2):
        with pytest.raises(ConfigError, match=r"needs several nodes with the same number of ranks, two or more"):
            model = torch.nn.Linear(4, 4)
            comm = {"secondary_shard": "node", "node_size": size}
            ZeroEngine(model, [torch.optim.SGD(model.parameters(), lr=0.1)], {"stage": 3, "comm": comm})


def in_blocks(rank: int, world_size: int, size: int, gradients: str) -> list[tuple[dict, float, str]]:
    """Settings, the largest difference of a loss to that of unquantized groups, and a hash of the weights."""
    found = []
    comm = hybrid(size, gradients=gradients)
    variants = [
        setting(1, comm),
        setting(2, {**comm, "weights": "int8"}, grad_accumulation="local"),
        setting(3, comm, offload={"optimizer": "cpu"}),
    ]
    job = {"steps": 3, "accumulation": 2, "max_norm": 0.5}
    plain = train(rank, world_size, Job(settings=setting(2, hybrid(size)), **job))
    for settings in variants:
        outcome = train(rank, world_size, Job(settings=settings, **job))
        values = b"".join(outcome.tensors[name].tobytes() for name in outcome.parameter_names)
        found.append((settings, outcome.loss_error(plain), hashlib.sha256(values).hexdigest()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "size", "gradients"),
    [
        (4, 2, "int8"),
        pytest.param(6, 2, "int8", marks=pytest.mark.slow),
    ],
    ids=["2x2", "3x2"],
)
def test_quantized_shard_groups_stay_alike_and_near_exact_ones(world_size, size, gradients):
    by_rank = run_on_ranks(in_blocks, world_size=world_size, size=size, gradients=gradients)
    for outcomes in zip(*by_rank):
        assert len({digest for *_, digest in outcomes}) == 1, outcomes[0][0]
        for settings, loss_error, _ in outcomes:
            assert 0 < loss_error <= 3e-3, settings


@pytest.mark.extra("wire")
def test_quantized_bytes_between_nodes_are_what_the_formula_says():
    for sent, numel in run_on_ranks(counts, world_size=4, stage=2, comm=hybrid(2, gradients="int8")):
        # Codes and a float32 scale for each 256. Two groups of two: half of the bucket inside, then twice half of the shard.
        nbytes = numel + 4 * numel // 256
        assert sent["reduce-scatter of gradients"] == (nbytes // 2, 0)
        assert sent["reduce-scatter of shards of gradients"] == (nbytes // 4, nbytes // 4)
        assert sent["all-gather of shards of gradients"] == (nbytes // 4, nbytes // 4)
        assert "all-reduce of shards of gradients" not in sent or sent["all-reduce of shards of gradients"] == (0, 0)


def quantized_saves_and_resumes(rank: int, world_size: int, folder: str, stage: int) -> None:
    settings = setting(stage, hybrid(2, gradients="int8", weights="int8"))
    model, optimizer, engine, _ = start(settings)
    save(engine, model, Path(folder))
    plan, held = state_plan(engine), {row.kind: row.bytes for row in engine.memory_report().rows}
    assert plan.residuals == held["gradient residuals"] > 0
    assert 0 < engine.comm_report().gradient_error < 0.5
    expected = go_on(model, optimizer, range(3, 5))
    model, optimizer, engine = resume(settings, Path(folder))
    assert go_on(model, optimizer, range(3, 5)) == expected
    # Others read it too, at another stage, in one group and without blocks.
    for other in ({"gradients": "int8"}, hybrid(2)):
        model, optimizer, engine = resume(setting(5 - stage, other), Path(folder))
        assert go_on(model, optimizer, range(3, 5)) == pytest.approx(expected, rel=3e-3), other
    engine.finish_parameters()
    dist.barrier()


def residual_rows(rank: int, world_size: int, folder: str, size: int | None) -> list[tuple[str, int, int, np.ndarray]]:
    groups = {} if size is None else hybrid(size)
    _, _, engine = resume(setting(2, {"gradients": "int8", **groups}), Path(folder))
    return [(row.name, *row.interval, row.tensor.double().numpy()) for row in engine.state.residual_rows()]


def summed(by_rank: list) -> dict[str, np.ndarray]:
    """The sum of all residuals of each parameter."""
    rows = [row for theirs in by_rank for row in theirs]
    sums = {name: np.zeros(max(stop for each, _, stop, _ in rows if each == name)) for name, *_ in rows}
    for name, begin, stop, values in rows:
        sums[name][begin:stop] += values
    return sums


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "others"), [(2, [(2, None)]), pytest.param(3, [(2, None), (6, 2), (6, 3)], marks=pytest.mark.slow)]
)
def test_quantized_checkpoints_of_several_shard_groups(tmp_path, stage, others):
    arguments = {"folder": str(tmp_path), "stage": stage}
    run_on_ranks(quantized_saves_and_resumes, world_size=4, **arguments)
    sums = []
    for world_size, size in [(4, 2), *others]:
        arguments = {"folder": str(tmp_path), "size": size}
        sums.append(summed(run_on_ranks(residual_rows, world_size=world_size, **arguments)))
    first = sums[0]
    assert any(values.any() for values in first.values())
    for (_, size), other in zip(others, sums[1:]):
        assert first.keys() == other.keys()
        # In one group all are added to each other, and rounded to bfloat16.
        digits = {"rtol": 0, "atol": 0 if size else 2**-7 * max(np.abs(values).max() for values in first.values())}
        assert all(np.allclose(first[name], other[name], **digits) for name in first)
