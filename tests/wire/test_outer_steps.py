"""Groups that step by themselves and meet in outer steps: the models of a plain loop, its bytes, and runs that go on."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cells import slow
from ranks import run_ranks
from shared_ranks import on_ranks
from torch import nn
from training import Unruly, fused_adamw, gpt2, gpt2_batch

from hf_zero.comm.groups import Groups
from hf_zero.comm.point_to_point import PointToPointTransport
from hf_zero.comm.transport import Handle
from hf_zero.comm.waits import Label
from hf_zero.config import CommConfig, ConfigError, ZeroConfig
from hf_zero.config.zero import OuterConfig
from hf_zero.engine.engine import ZeroEngine
from hf_zero.integrations.state_io import load_engine, seal_state, write_state
from hf_zero.wire.outer import SyncedEvery

pytestmark = pytest.mark.timeout(180)

SYNC_EVERY = 3
OUTER = {"lr": 0.7, "momentum": 0.9}


def setting(stage: int, *, size: int | str = "auto", outer: dict = OUTER, **more) -> dict:
    comm = {"sync_every": SYNC_EVERY, "outer": outer, "shard_group_size": size}
    return {"stage": stage, "bucket_bytes": "20KiB", "comm": comm, **more}


def batches_of(rank: int, steps: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [gpt2_batch(generator, 2) for _ in range(steps)]


class PlainGroups:
    """Every group's model in one process, by torch alone.

    Args:
        size: ranks of a group.
    """

    def __init__(self, groups: int, size: int, outer: dict):
        self._size = size
        self.models = []
        for _ in range(groups):
            torch.manual_seed(0)
            self.models.append(gpt2().train())
        self._optimizers = [fused_adamw(model) for model in self.models]
        self._anchor = [nn.Parameter(p.detach().clone()) for p in self.models[0].parameters()]
        self._outer = torch.optim.SGD(self._anchor, **outer, nesterov=outer["momentum"] > 0)

    def train(self, steps: int) -> list[list[float]]:
        """Steps of all groups; the losses of each rank."""
        batches = [batches_of(rank, steps) for rank in range(len(self.models) * self._size)]
        losses: list[list[float]] = [[] for _ in batches]
        for step in range(steps):
            for group, (model, optimizer) in enumerate(zip(self.models, self._optimizers)):
                for rank in range(group * self._size, (group + 1) * self._size):
                    loss = model(**batches[rank][step]).loss
                    (loss / self._size).backward()
                    losses[rank].append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
            if (step + 1) % SYNC_EVERY == 0:
                self.meet()
        return losses

    @torch.no_grad()
    def meet(self) -> None:
        for anchor, *theirs in zip(self._anchor, *(model.parameters() for model in self.models)):
            anchor.grad = anchor - torch.stack(theirs).sum(0) / len(theirs)
        self._outer.step()
        for anchor, *theirs in zip(self._anchor, *(model.parameters() for model in self.models)):
            for parameter in theirs:
                parameter.copy_(anchor)


def start(settings: dict) -> tuple[nn.Module, torch.optim.Optimizer, ZeroEngine]:
    torch.manual_seed(0)
    model = gpt2().train()
    optimizer = fused_adamw(model)
    return model, optimizer, ZeroEngine(model, [optimizer], settings)


def go_on(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict]) -> list[float]:
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def beside_plain_groups(rank: int, world_size: int, size: int, outer: dict) -> list[tuple[int, float, float]]:
    steps = 2 * SYNC_EVERY + 1
    plain = PlainGroups(world_size // size, size, outer)
    expected = plain.train(steps)[rank]
    plain.meet()
    found = []
    for stage in (0, 1, 2, 3) if size == 1 else (1, 2, 3):
        model, optimizer, engine = start(setting(stage, size="auto" if size == 1 else size, outer=outer))
        losses = go_on(model, optimizer, batches_of(rank, steps))
        engine.synchronize()
        loss_error = max(abs(a - b) / b for a, b in zip(losses, expected))
        with engine.gathered():
            pairs = zip(model.parameters(), plain.models[0].parameters())
            difference = max((a - b).abs().max().item() for a, b in pairs)
        found.append((stage, loss_error, difference))
    return found


@pytest.mark.short_cells("1x2")
@pytest.mark.parametrize(
    ("world_size", "size", "outer"),
    [
        (2, 1, OUTER),
        (2, 1, {"lr": 1.0, "momentum": 0.0}),
        slow(3, 1, OUTER),
        pytest.param(4, 2, OUTER, marks=pytest.mark.slow),
    ],
    ids=["1x2", "1x2 plain mean", "1x3", "2x2"],
)
def test_models_are_those_of_a_plain_loop(world_size, size, outer):
    arguments = {"size": size, "outer": outer}
    for outcomes in run_ranks(
        beside_plain_groups, world_size=world_size, time_limit_s=150, keyword_arguments=arguments
    ):
        for stage, loss_error, difference in outcomes:
            assert loss_error <= 1e-5 and difference <= 2e-6, (stage, loss_error, difference)


def with_offload_and_without(
    rank: int, world_size: int, stage: int, size: int, path: str
) -> list[tuple[dict, bool, bool, set[str]]]:
    """Of each way to have masters in host memory or in files: whether losses and weights are those of masters on the device,
    and where the report says that outer steps keep what they keep."""

    def run(**more) -> tuple[list[float], list[torch.Tensor], ZeroEngine]:
        model, optimizer, engine = start(setting(stage, size=size, **more))
        losses = go_on(model, optimizer, batches_of(rank, 2 * SYNC_EVERY + 1))
        engine.synchronize()
        with engine.gathered():
            return losses, [parameter.detach().clone() for parameter in model.parameters()], engine

    found = []
    losses, weights, _ = run()
    ways = [{}, {"ratio": 0.5}, {"optimizer": "nvme", "nvme_path": path}]
    if stage == 3:
        ways += [{"params": "cpu"}, {"params": "nvme", "nvme_path": path}, ways[-1] | {"params": "nvme"}]
    for how in ways:
        offload = {"optimizer": "cpu", **how}
        theirs, values, engine = run(offload=offload)
        report = engine.memory_report()
        places = {row.where for row in report.rows if row.kind == "outer steps"}
        found.append((offload, theirs == losses, all(map(torch.equal, values, weights)), places))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "world_size", "size"),
    [
        slow(1, 2, 1),
        (3, 2, 1),
        pytest.param(2, 4, 2, marks=pytest.mark.slow),
        pytest.param(3, 4, 2, marks=pytest.mark.slow),
    ],
)
def test_masters_in_host_memory_or_in_files_meet_bit_for_bit(stage, world_size, size, tmp_path):
    arguments = {"stage": stage, "size": size, "path": str(tmp_path)}
    by_rank = run_ranks(with_offload_and_without, world_size=world_size, time_limit_s=150, keyword_arguments=arguments)
    for outcomes in by_rank:
        for offload, same_losses, same_weights, places in outcomes:
            assert same_losses and same_weights, offload
            assert places == ({"host memory", "device"} if "ratio" in offload else {"host memory"}), offload


def learns(rank: int, world_size: int) -> dict[str, list[float]]:
    """The losses of a model of one matrix of 64 blocks, with moments in 32 and in 8 bits."""
    losses = {}
    for moments in ("32bit", "8bit"):
        torch.manual_seed(0)
        model = nn.Linear(128, 128, bias=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine = ZeroEngine(model, [optimizer], setting(1, moments=moments))
        generator = torch.Generator().manual_seed(rank)
        losses[moments] = []
        for _ in range(10 * SYNC_EVERY):
            inputs = torch.randn(64, 128, generator=generator)
            loss = (model(inputs) - inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[moments].append(loss.item())
        [held] = [row.bytes for row in engine.memory_report().rows if row.kind == "optimizer state"]
        assert (held < 3 * model.weight.numel()) == (moments == "8bit")
    return losses


def test_moments_in_8_bits_learn_as_those_in_32():
    for losses in run_ranks(learns, world_size=2, time_limit_s=60):
        assert losses["8bit"] != losses["32bit"]
        assert losses["8bit"][-1] < 0.5 * losses["8bit"][0]
        assert losses["8bit"] == pytest.approx(losses["32bit"], rel=0.02)


class Counting(PointToPointTransport):
    """Keeps what is started and ended, in order."""

    def __init__(self, groups: Groups):
        super().__init__(groups, 30)
        self.events: list[tuple[str, str]] = []

    def start_reduce_scatter(self, flat, out, label, among=None):
        return self._noted(super().start_reduce_scatter(flat, out, label, among), label)

    def start_all_gather(self, flat, own, label, among=None):
        return self._noted(super().start_all_gather(flat, own, label, among), label)

    def _noted(self, handle: Handle, label: Label) -> Handle:
        self.events.append(("start", str(label)))

        def complete() -> None:
            handle.finish()
            self.events.append(("end", str(label)))

        return Handle(label, self.ledger, complete)


def meets(rank: int, world_size: int) -> tuple[list[str], list[int]]:
    """What an outer step starts, and how many collectives are under way then."""
    _, _, engine = start(setting(1))
    assert len(engine.buckets) > 4
    transport = Counting(engine.groups)
    outer = CommConfig(sync_every=2, outer=OuterConfig(lr=1.0, momentum=0.0))
    steps = SyncedEvery(transport, engine.groups.outer, outer, engine.buckets, engine._parts.storage.fetched_master)
    steps.after_step(engine.buckets)
    assert not transport.events
    means = []
    for bucket in engine.buckets:
        master = torch.full_like(bucket.master, 1.0 + bucket.layout.index)
        means.append(master * (1 + world_size) / 2)
        bucket.master.copy_(master * (1 + rank))
    assert steps.after_step(engine.buckets) == engine.buckets
    assert all(torch.allclose(bucket.master, mean, rtol=1e-6) for bucket, mean in zip(engine.buckets, means))
    under_way, most = 0, []
    for what, _ in transport.events:
        under_way += 1 if what == "start" else -1
        if what == "start":
            most.append(under_way)
    assert under_way == 0
    return [label for what, label in transport.events if what == "start"], most


def test_several_buckets_meet_at_a_time_in_one_order():
    first, *others = run_ranks(meets, world_size=2, time_limit_s=60)
    labels, under_way = first
    assert all(other[0] == labels for other in others)
    # Behind the first, each starts while another is under way; never more than an outer step is to have in memory.
    assert min(under_way[1:]) >= 2 and max(under_way) <= 3, under_way


def counts(rank: int, world_size: int) -> tuple[dict[str, int], dict[str, int], int, int]:
    """Bytes sent by kind up to the outer step and with it, elements of a rank's shards, and what the report says is held."""
    model, optimizer, engine = start(setting(2))
    before = {row.kind: row.bytes_sent for row in engine.comm_report().rows}
    found = []
    for batches in (batches_of(rank, SYNC_EVERY - 1), batches_of(rank, 1)):
        go_on(model, optimizer, batches)
        rows = engine.comm_report().rows
        found.append({row.kind: row.bytes_sent - before.get(row.kind, 0) for row in rows})
    [held] = [row.bytes for row in engine.memory_report().rows if row.kind == "outer steps"]
    return *found, sum(bucket.layout.shard_numel for bucket in engine.buckets), held


def test_bytes_travel_in_outer_steps_only():
    for quiet, with_outer, numel, held in run_ranks(counts, world_size=2, time_limit_s=60):
        assert sum(quiet.values()) == 0, quiet
        # (R-1)/R of the model each way, once in SYNC_EVERY steps: an all-reduce of gradients sends as much in every step.
        assert with_outer["reduce-scatter of models"] == with_outer["all-gather of models"]
        assert 4 * numel // 2 <= with_outer["all-gather of models"] <= 4 * numel // 2 + 4 * 20
        assert sum(with_outer.values()) == 2 * with_outer["all-gather of models"]
        # Anchor and momentum of half of the model each.
        assert 2 * 4 * numel // 2 <= held <= 2 * 4 * numel // 2 + 2 * 4 * 20


IN_8_BITS, IN_HOST_MEMORY = {"moments": "8bit"}, {"offload": {"optimizer": "cpu"}}


@pytest.mark.short_cells("2, 8 bits")
@pytest.mark.parametrize(
    ("stage", "more"),
    [
        (1, {}),
        pytest.param(3, {}, marks=pytest.mark.slow),
        (2, IN_8_BITS),
        pytest.param(2, IN_8_BITS | {"kernels": "always"}, marks=pytest.mark.slow),
        pytest.param(3, IN_HOST_MEMORY, marks=pytest.mark.slow),
        pytest.param(1, IN_8_BITS | IN_HOST_MEMORY, marks=pytest.mark.slow),
    ],
    ids=["1", "3", "2, 8 bits", "2, 8 bits by kernels", "3, host memory", "1, 8 bits in host memory"],
)
@on_ranks(2)
def test_a_run_goes_on_bit_for_bit(rank, world_size, tmp_path, stage, more):
    root = str(tmp_path)
    folder = Path(root) / "checkpoint"
    batches = batches_of(rank, 9)
    model, optimizer, engine = start(setting(stage, **more))
    go_on(model, optimizer, batches[:4])
    engine.synchronize()
    weights = {name: value.clone() for name, value in engine.whole_state_dict(wanted=True).items()}
    seal_state(engine, folder, write_state(engine, folder / "zero"))
    dist.barrier()
    expected = go_on(model, optimizer, batches[4:])

    torch.manual_seed(5)
    model = gpt2().train()
    model.load_state_dict(weights)
    optimizer = fused_adamw(model)
    engine = ZeroEngine(model, [optimizer], setting(stage, **more))
    load_engine(engine, folder / "zero")
    assert go_on(model, optimizer, batches[4:]) == expected

    # All steps together now: from the first group's optimizer state.
    model = gpt2().train()
    model.load_state_dict(weights)
    optimizer = fused_adamw(model)
    engine = ZeroEngine(model, [optimizer], {"stage": 3})
    load_engine(engine, folder / "zero")
    assert all(
        loss == pytest.approx(other, rel=0.05) for loss, other in zip(go_on(model, optimizer, batches[4:]), expected)
    )


@on_ranks(2)
def test_groups_have_norms_and_buffers_of_their_own_until_they_meet(rank, world_size):
    torch.manual_seed(0)
    model = Unruly(sleeping="odd ranks")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    engine = ZeroEngine(model, [optimizer], setting(1))
    for batch in batches_of(rank, 2):
        model(**batch).loss.backward()
        norm = engine.clip_grad_norm_(1e9)
        optimizer.step()
        optimizer.zero_grad()
    norms = engine.transport.exchange(norm.item())
    assert norms[0] != norms[1]
    means = engine.transport.exchange(model.norm.running_mean.tolist())
    assert means[0] != means[1]
    with engine.gathered(model.head, writeback=True), torch.no_grad():
        model.head.weight.zero_()
    values = torch.cat([t.detach().reshape(-1).float() for t in (*model.parameters(), *model.buffers())]).tolist()
    everyone = engine.transport.exchange(values)
    assert everyone[0] == everyone[1]
    engine.synchronize()
    assert not model.head.weight.any()


def refuses(rank: int, world_size: int) -> None:
    with pytest.raises(
        ConfigError, match=r"`comm.shard_group_size` is 2, which makes one group of the 2 ranks.*allowed: 1, auto"
    ):
        start(setting(2, size=2))


def test_settings_that_do_not_fit_are_refused():
    run_ranks(refuses, world_size=2, time_limit_s=60)
    for settings, says in (
        ("comm.sync_every=0", r"`comm.sync_every` is 0; allowed: a whole number of steps, from 1"),
        ("comm.outer.lr=0.5", r"`comm.outer` configures outer steps, and `comm.sync_every: 1` has none"),
        ("comm.sync_every=4,comm.outer.lr=0", r"`comm.outer.lr` is 0; allowed: a number above 0, up to 2"),
        ("comm.sync_every=4,comm.outer.momentum=1", r"`comm.outer.momentum` is 1; allowed: a number from 0, below 1"),
        ("comm.sync_every=4,comm.outer.speed=1", r"unknown key `comm.outer.speed`.*Known: lr, momentum"),
        ("comm.sync_every=4,comm.outer=3", r"`comm.outer` is 3; allowed: a mapping of lr, momentum"),
        ("comm.sync_every=4,comm.gradients=int8", r"gradients then stay inside a shard group"),
        (
            "comm.sync_every=4,param_dtype=float16",
            r"`param_dtype: float16` cannot be combined with `comm.sync_every: 4`",
        ),
    ):
        with pytest.raises(ConfigError, match=says):
            ZeroConfig.of(settings)
    assert ZeroConfig.of("comm.sync_every=4,comm.outer.lr=1.0").comm.outer.momentum == 0.9


def test_one_rank_alone_has_nobody_to_meet():
    model, optimizer, engine = start(setting(2))
    go_on(model, optimizer, batches_of(0, SYNC_EVERY))
    assert engine.groups.outer is None
