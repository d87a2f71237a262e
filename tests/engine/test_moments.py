"""Moments in 8 bits, in memory and in files: what they take, that they train, and that checkpoints hold all of them."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cells import short_of, slow
from shared_ranks import on_ranks, run_on_ranks
from torch import nn
from training import Job, Unruly, adamw_in_two_groups, gpt2_batch, of_one_seed, save_engine, steps, train
from transformers import GPT2Config, GPT2LMHeadModel

from hf_zero import ZeroConfig
from hf_zero.checkpoint.live_pieces import LivePieces, Piece, lay_out, write_all
from hf_zero.config import ConfigError
from hf_zero.engine import room
from hf_zero.engine.engine import ZeroEngine
from hf_zero.integrations.announce import state_plan
from hf_zero.integrations.state_io import load_engine
from hf_zero.layout.blocks import SMALLEST_NUMEL, blocks, has_blocks, is_in_blocks
from hf_zero.offload.files import aligned

pytestmark = pytest.mark.timeout(180)
IN_8_BITS = {"moments": "8bit", "grad_accumulation": "local"}


def gpt(width: int = 72, vocabulary: int = 256) -> nn.Module:
    """Its matrices are large enough for blocks, most of them no whole number of these; the rest is not."""
    size = {"vocab_size": vocabulary, "n_embd": width, "n_layer": 2, "n_head": 4, "n_positions": 64}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**size, **dropout, bos_token_id=0, eos_token_id=0))


def prepared(settings: dict, **kwargs) -> tuple[nn.Module, torch.optim.Optimizer, ZeroEngine]:
    torch.manual_seed(0)
    model = gpt()
    optimizer = adamw_in_two_groups(model, **kwargs)
    return model, optimizer, ZeroEngine(model, [optimizer], settings)


def whole_states(engine: ZeroEngine, model: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for name, parameter in model.named_parameters():
        state = engine.full_state(parameter) if parameter.requires_grad else {}
        found[name] = {kind: torch.as_tensor(value).clone() for kind, value in state.items()}
    return found


def refuse_difference(some: dict, others: dict) -> None:
    """Bit for bit, so that zeros have their signs too."""
    assert some.keys() == others.keys()
    for name, state in some.items():
        assert state.keys() == others[name].keys()
        for kind, value in state.items():
            assert value.numpy().tobytes() == others[name][kind].numpy().tobytes(), (name, kind)


TEXT = Path(__file__).resolve().parents[2] / "LICENSE"
IN_32_BITS = {"grad_accumulation": "local"}
PLACES = {
    "device": {},
    "by chance": {"param_dtype": "bfloat16", "rounding": "stochastic"},
    "host": {"offload": {"optimizer": "cpu"}},
    "partly host": {"offload": {"optimizer": "cpu", "ratio": 0.5}},
    "kernels": {"kernels": "always"},
    "kernels with masters": {"kernels": "always", "param_dtype": "bfloat16"},
}


@pytest.fixture(autouse=True)
def on_one_thread():
    """Small matrices gain nothing from a second one, and where tests run side by side the two wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def bytes_there(value: object, seen: set[int]) -> int:
    """Bytes of all tensors with dimensions in a nest of dicts and packed states; what is there twice counts once."""
    if torch.is_tensor(value):
        storage = value.untyped_storage()
        is_new = value.data_ptr() not in seen
        seen.add(value.data_ptr())
        return min(value.nbytes, storage.nbytes()) if is_new and value.dim() > 0 else 0
    if hasattr(value, "codes"):
        value = vars(value)
    return sum(bytes_there(each, seen) for each in value.values()) if isinstance(value, dict) else 0


@pytest.mark.parametrize(
    "place",
    [pytest.param(place, marks=pytest.mark.extra("kernels")) if "kernels" in place else place for place in PLACES],
)
def test_adamws_moments_take_two_bytes_an_element(place):
    torch.manual_seed(0)
    model = gpt(width=128)
    optimizer = adamw_in_two_groups(model)
    settings = {**IN_8_BITS, **PLACES[place], "bucket_bytes": "300KiB"}
    engine = ZeroEngine(model, [optimizer], settings)
    plan = state_plan(engine).optimizer
    steps(model, optimizer, range(2))
    numel = sum(parameter.numel() for parameter in model.parameters())
    rows = [row for row in engine.memory_report().rows if row.kind == "optimizer state"]
    reported = sum(row.bytes for row in rows)
    places = [state.state for state in engine._parts.storage._states.values()]
    packed = {index: getattr(place, "packed", {}) for index, place in enumerate(places)}
    there = bytes_there({"packed": packed, "register": dict(optimizer.state)}, set())
    stand_in = 4
    assert there - stand_in == reported <= 2.1 * numel
    assert plan == pytest.approx(reported, rel=0.03)
    assert sum(row.ddp_bytes for row in rows) == 8 * numel
    window = [row.bytes for row in engine.memory_report().rows if row.kind == "window, during the step"]
    largest = max(bucket.layout.shard_numel for bucket in engine.buckets)
    # Kernels have moments in float32 in registers alone.
    assert window == ([] if "kernels" in place else [8 * largest])
    by_kind = {moments for row in engine.dtype_report().rows for moments in row.moments.split(", ")}
    assert by_kind == {"uint8", "float32"}


def on_text(settings: dict, count: int = 50) -> list[float]:
    """Losses of a GPT that learns the license by its letters, with warm-up and decay."""
    letters, text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).unique(return_inverse=True)
    torch.manual_seed(0)
    model = gpt(vocabulary=len(letters))
    optimizer = adamw_in_two_groups(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 10, 1 - step / count))
    ZeroEngine(model, [optimizer], settings)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(count):
        starts = torch.randint(len(text) - 32, (4,), generator=generator)
        ids = torch.stack([text[start : start + 32] for start in starts])
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.extra("kernels")
def test_a_small_gpt_learns_a_text_as_with_32_bits():
    exact, quantized = on_text({"stage": 2}), on_text({"stage": 2, **IN_8_BITS})
    print("loss by step, 32 and 8 bits:", *zip(exact[::10], quantized[::10]), sep="\n")
    assert exact != quantized
    assert sum(quantized[-10:]) == pytest.approx(sum(exact[-10:]), rel=0.01)
    assert quantized == pytest.approx(exact, rel=0.02)
    assert quantized[-1] < exact[0] - 1


class Lion(torch.optim.Optimizer):
    """A user's own: Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms". Makes a new momentum at each step."""

    def __init__(self, parameters, lr: float):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                momentum = state.get("exp_avg", torch.zeros_like(parameter))
                parameter.sub_(momentum.lerp(parameter.grad, 0.1).sign(), alpha=group["lr"])
                state["exp_avg"] = momentum.lerp(parameter.grad, 0.01)


OPTIMIZERS = {
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-3),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
    "SGD, Nesterov": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9, nesterov=True),
    "RMSprop, momentum": lambda p: torch.optim.RMSprop(p, lr=1e-4, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "Lion": lambda p: Lion(p, lr=1e-4),
}
# Of those that keep as many moments of a kind, one is in the short run.
DISTINCT = ["AdamW, amsgrad", "AdamW, fused", "Adamax", "SGD, Nesterov", "RMSprop, momentum", "Lion"]


@pytest.mark.parametrize("name", short_of(OPTIMIZERS, DISTINCT))
@pytest.mark.short_cells("AdamW, amsgrad", "SGD, Nesterov", "RMSprop, momentum")
def test_torchs_elementwise_optimizers_go_with_it(name):
    losses = []
    for settings in (IN_32_BITS, IN_8_BITS):
        torch.manual_seed(0)
        model = gpt()
        optimizer = OPTIMIZERS[name](model.parameters())
        engine = ZeroEngine(model, [optimizer], settings)
        losses.append(steps(model, optimizer, [0] * 12))
    [row] = [row for row in engine.memory_report().rows if row.kind == "optimizer state"]
    assert row.bytes < 0.3 * row.ddp_bytes
    exact, quantized = losses
    assert exact[-1] < exact[0] - 0.1 and quantized == pytest.approx(exact, rel=0.02)


def test_without_moments_nothing_changes():
    losses = []
    for settings in (IN_32_BITS, IN_8_BITS):
        torch.manual_seed(0)
        model = gpt()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = ZeroEngine(model, [optimizer], settings)
        losses.append(steps(model, optimizer, range(3)))
        assert not any("window" in row.kind for row in engine.memory_report().rows)
    assert losses[0] == losses[1]


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Looks at whole matrices, which are then not cut."""
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and ".h." in name]
    mine = set(matrices)
    return [
        torch.optim.Muon(matrices, lr=1e-2),
        torch.optim.AdamW([p for p in model.parameters() if p not in mine], lr=1e-3),
    ]


def on_all_layouts(rank: int, world_size: int, more: dict, make_optimizer: Callable | None = None) -> list[float]:
    """The losses of the same batch on every rank, which come to the same at each stage."""
    job = Job(make_model=gpt, make_batch=of_one_seed, make_optimizer=make_optimizer)
    layouts = ({"stage": 0}, {"stage": 1}, {"stage": 2, "bucket_bytes": "60KiB"}, {"stage": 3, "bucket_bytes": "1GiB"})
    first, *others = [train(rank, world_size, replace(job, settings={**IN_8_BITS, **more, **each})) for each in layouts]
    for other in others:
        assert other.equals(first), other.loss_error(first)
    return first.losses


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", ["by chance", *(slow(place) for place in ("kernels with masters", "device", "host", "partly host"))]
)
def test_blocks_are_the_same_on_every_layout(place):
    alone = on_all_layouts(0, 1, PLACES[place])
    assert run_on_ranks(on_all_layouts, more=PLACES[place]) == [alone, alone]
    assert alone[-1] < alone[0]


def wherever(path: str) -> dict[str, tuple[dict, dict]]:
    """What offloads moments in blocks → (its settings, those of a run of the same bits)."""
    host, files = {"optimizer": "cpu"}, {"optimizer": "nvme", "nvme_path": path}
    beside = {"optimizer": "cpu", "params": "nvme", "nvme_path": path}
    return {
        "part in files": (files | {"ratio": 0.5}, {}),
        "host beside parameters in files": (beside, {}),
        "host": (host, {}),
        "files": (files, {}),
        "files and parameters in files": (files | {"params": "nvme"}, {}),
    }


def on_each_tier(rank: int, world_size: int, path: str, dtype: str) -> list[str]:
    """The cells whose bits are others than they should be."""
    job = Job(make_model=gpt, make_batch=of_one_seed, steps=5)
    settings = {**IN_8_BITS, "stage": 3, "bucket_bytes": "60KiB", "param_dtype": dtype}
    same, differ = {}, []
    for name, (offload, as_in) in wherever(path).items():
        key = str(as_in)
        if key not in same:
            same[key] = train(rank, world_size, replace(job, settings={**settings, "offload": as_in}))
        if not train(rank, world_size, replace(job, settings={**settings, "offload": offload})).equals(same[key]):
            differ.append(name)
    return differ


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "dtype"), [(1, "bfloat16"), slow(2, "float32")])
def test_blocks_are_the_same_wherever_they_are(world_size, dtype, tmp_path):
    found = run_on_ranks(on_each_tier, world_size=world_size, path=str(tmp_path), dtype=dtype)
    assert found == [[]] * world_size


@pytest.mark.slow
def test_matrices_that_are_not_cut_have_the_same_blocks_too():
    alone = on_all_layouts(0, 1, {}, muon)
    assert run_on_ranks(on_all_layouts, more={}, make_optimizer=muon) == [alone, alone]


LAYOUTS = [{"stage": 3}, {"stage": 2, "bucket_bytes": "60KiB"}, {"stage": 1}, {"stage": 0}]


def goes_on(rank: int, world_size: int, folder: str, kernels: str, layouts: list[dict]) -> None:
    """Saves at stage 2, and goes on at other stages with the bits and the losses of the run that was not stopped."""
    in_8_bits = {**IN_8_BITS, "kernels": kernels}
    model, optimizer, engine = prepared({**in_8_bits, "stage": 2, "bucket_bytes": "60KiB"})
    steps(model, optimizer, range(2))
    save_engine(engine, folder)
    if rank == 0:
        torch.save(model.state_dict(), f"{folder}/weights.pt")
        torch.save(whole_states(engine, model), f"{folder}/states.pt")
    else:
        whole_states(engine, model)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    expected = steps(model, optimizer, range(2, 4))
    end = whole_states(engine, model)
    for more in layouts:
        model, optimizer, engine = prepared({**in_8_bits, **more})
        model.load_state_dict(weights)
        load_engine(engine, f"{folder}/zero")
        refuse_difference(whole_states(engine, model), torch.load(f"{folder}/states.pt", weights_only=True))
        assert steps(model, optimizer, range(2, 4)) == expected, more
        refuse_difference(whole_states(engine, model), end)
    # From one way of stepping to the other.
    model, optimizer, engine = prepared({**IN_8_BITS, "kernels": "never" if kernels == "always" else "always"})
    model.load_state_dict(weights)
    load_engine(engine, f"{folder}/zero")
    refuse_difference(whole_states(engine, model), torch.load(f"{folder}/states.pt", weights_only=True))
    assert steps(model, optimizer, range(2, 4)) == pytest.approx(expected, rel=1e-3)
    # From 8 bits to 32, whose moments are then float32 in memory, and from those to 8 again.
    model, optimizer, engine = prepared({**IN_32_BITS, "stage": 3})
    model.load_state_dict(weights)
    load_engine(engine, f"{folder}/zero")
    refuse_difference(whole_states(engine, model), torch.load(f"{folder}/states.pt", weights_only=True))
    assert steps(model, optimizer, range(2, 4)) == pytest.approx(expected, rel=0.01)
    save_engine(engine, f"{folder}/in 32 bits")
    model, optimizer, engine = prepared({**IN_8_BITS, "stage": 1})
    load_engine(engine, f"{folder}/in 32 bits/zero")
    [row] = [row for row in engine.memory_report().rows if row.kind == "optimizer state"]
    assert row.bytes < 0.3 * 8 * sum(row.tensor.numel() for bucket in engine.buckets for row in bucket.rows)


def resumed_on_another_world_size(rank: int, world_size: int, folder: str) -> None:
    for stage in (0, 3):
        model, optimizer, engine = prepared({**IN_8_BITS, "stage": stage, "bucket_bytes": "100KiB"})
        model.load_state_dict(torch.load(f"{folder}/weights.pt", weights_only=True))
        load_engine(engine, f"{folder}/zero")
        refuse_difference(whole_states(engine, model), torch.load(f"{folder}/states.pt", weights_only=True))
        assert all(loss < 6 for loss in steps(model, optimizer, range(3, 5)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernels", "layouts"),
    [
        pytest.param("always", LAYOUTS[:1], marks=pytest.mark.extra("kernels")),
        pytest.param("always", LAYOUTS[1:], marks=[pytest.mark.slow, pytest.mark.extra("kernels")]),
        slow("never", LAYOUTS),
    ],
)
def test_a_run_goes_on_bit_for_bit_and_its_moments_at_any_world_size(tmp_path, kernels, layouts):
    folder = {"folder": str(tmp_path)}
    run_on_ranks(goes_on, **folder, kernels=kernels, layouts=layouts)
    run_on_ranks(resumed_on_another_world_size, world_size=3, **folder)
    resumed_on_another_world_size(0, 1, **folder)


def test_a_save_makes_float32_of_a_part_at_a_time_and_of_what_was_there_at_the_save(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_zero.checkpoint.live_pieces._CHUNK_BYTES", 10_000)
    model, optimizer, engine = prepared({**IN_8_BITS, "stage": 2})
    steps(model, optimizer, range(2))
    rows = list(engine.state.rows())
    expected = {f"{row.kind}/{row.name}": row.tensor.detach().clone() for row in rows}
    path, other = tmp_path / "live.safetensors", tmp_path / "at-once.safetensors"
    for file in (path, other):
        begins = lay_out(file, {f"{row.kind}/{row.name}": (row.tensor.dtype, row.tensor.shape) for row in rows})
    pieces = [Piece(path=path, offset=begins[f"{row.kind}/{row.name}"], values=row.tensor) for row in rows]
    assert sum(piece.nbytes for piece in pieces) == 8 * sum(parameter.numel() for parameter in model.parameters())
    live = LivePieces(pieces, sum(piece.nbytes for piece in pieces) // 2, refuse_edits=lambda: None)
    live.secure()
    write_all([replace(piece, path=other) for piece in pieces])
    steps(model, optimizer, range(2, 3))
    live.write()
    data = [file.read_bytes() for file in (path, other)]
    assert data[0] == data[1]
    for name, begin in begins.items():
        assert data[0][begin : begin + expected[name].nbytes] == expected[name].numpy().tobytes(), name


@pytest.mark.parametrize("kernels", ["never", pytest.param("always", marks=pytest.mark.extra("kernels"))])
def test_the_optimizers_own_state_dict_has_values_and_takes_them_back(kernels):
    in_8_bits = {**IN_8_BITS, "stage": 2, "kernels": kernels}
    model, optimizer, engine = prepared(in_8_bits)
    steps(model, optimizer, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    assert all(value.isfinite().all() for each in state["state"].values() for value in each.values())
    before = whole_states(engine, model)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    expected = steps(model, optimizer, range(2, 4))
    model, optimizer, engine = prepared(in_8_bits)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    refuse_difference(whole_states(engine, model), before)
    assert steps(model, optimizer, range(2, 4)) == expected
    # Who empties the register begins anew, whatever was in the blocks.
    model.load_state_dict(weights)
    optimizer.state.clear()
    again = steps(model, optimizer, range(2, 4))
    model, optimizer, engine = prepared(in_8_bits)
    model.load_state_dict(weights)
    assert again == steps(model, optimizer, range(2, 4))


@pytest.mark.extra("kernels")
def test_kernels_step_moments_in_their_blocks_as_adamw_would():
    losses, states = [], []
    for kernels in ("never", "always"):
        model, optimizer, engine = prepared({**IN_8_BITS, "stage": 2, "kernels": kernels, "bucket_bytes": "60KiB"})
        losses.append(steps(model, optimizer, range(8)))
        states.append(whole_states(engine, model))
    report = engine.memory_report().kernels
    assert report.buckets == report.all_buckets == len(engine.buckets) and report.hindrances == ()
    assert losses[1] != losses[0] and losses[1] == pytest.approx(losses[0], rel=1e-3)
    for name, state in states[0].items():
        assert state["step"] == states[1][name]["step"] == 8
        for kind in ("exp_avg", "exp_avg_sq"):
            one, other = state[kind], states[1][name][kind]
            assert (one - other).norm() <= 0.05 * one.norm(), (name, kind)


@pytest.mark.extra("kernels")
def test_a_setting_without_a_kernel_is_stepped_on_unpacked_moments_and_said(caplog):
    ends = []
    for kernels in ("never", "always"):
        model, optimizer, engine = prepared({**IN_8_BITS, "stage": 2, "kernels": kernels})
        for step in range(4):
            optimizer.param_groups[0]["maximize"] = step in (1, 2)
            steps(model, optimizer, [step])
        ends.append(whole_states(engine, model)["transformer.wte.weight"])
    assert caplog.text.count("AdamW is stepped by torch: `maximize` is True") == 1
    assert ends[0]["step"] == ends[1]["step"] == 4
    assert (ends[0]["exp_avg"] - ends[1]["exp_avg"]).norm() <= 0.05 * ends[0]["exp_avg"].norm()


@pytest.mark.extra("kernels")
def test_optimizers_without_a_kernel_for_blocks_are_named():
    torch.manual_seed(0)
    model = gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine = ZeroEngine(model, [optimizer], {**IN_8_BITS, "stage": 2, "kernels": "always"})
    assert engine.memory_report().kernels.hindrances == ("no kernel implements SGD with moments in 8 bits",)
    first, *_, last = steps(model, optimizer, [0] * 4)
    assert last < first


def test_state_from_before_and_after_the_engine_is_the_optimizers():
    torch.manual_seed(0)
    model = gpt()
    optimizer = adamw_in_two_groups(model)
    steps(model, optimizer, range(2))
    engine = ZeroEngine(model, [optimizer], {**IN_8_BITS, "stage": 2})
    [row] = [row for row in engine.memory_report().rows if row.kind == "optimizer state"]
    assert row.bytes < 0.3 * row.ddp_bytes
    steps(model, optimizer, range(2, 4))
    states = whole_states(engine, model)
    engine.close()
    refuse_difference(
        {name: {k: torch.as_tensor(v) for k, v in optimizer.state[p].items()} for name, p in model.named_parameters()},
        states,
    )
    assert steps(model, optimizer, range(4, 6))[-1] < 6


@pytest.mark.parametrize("kernels", ["never", slow("always")])
@on_ranks(2)
def test_moments_of_parameters_that_a_step_does_not_use_stay_as_they_are(rank, world_size, kernels):
    torch.manual_seed(0)
    model = Unruly(sleeping="even steps")
    model.branch = nn.Linear(24, SMALLEST_NUMEL // 24 + 1)
    model.tail = nn.Linear(SMALLEST_NUMEL // 24 + 1, 24)
    model.branch, model.tail = nn.Sequential(model.branch, model.tail), None
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    engine = ZeroEngine(model, [optimizer], {**IN_8_BITS, "stage": 2, "kernels": kernels})
    used = []
    for step in range(4):
        loss = model(**gpt2_batch(torch.Generator().manual_seed(10 * step + rank), 2)).loss
        loss.backward()
        before = whole_states(engine, model)
        optimizer.step()
        optimizer.zero_grad()
        after = whole_states(engine, model)
        name = "branch.0.weight"
        used.append(step % 2 == 0)
        if not used[-1]:
            refuse_difference({name: before[name]}, {name: after[name]})
        elif before[name]:
            assert not torch.equal(before[name]["exp_avg"], after[name]["exp_avg"])
        assert torch.as_tensor(after[name].get("step", 0)).item() == sum(used)


@pytest.mark.parametrize("where", ["cpu", "nvme"])
def test_parameters_may_live_elsewhere(where, tmp_path):
    offload = {"params": where} | ({"nvme_path": str(tmp_path)} if where == "nvme" else {})
    losses = []
    for more in ({}, {"offload": offload}):
        model, optimizer, engine = prepared({**IN_8_BITS, "stage": 3, **more})
        losses.append(steps(model, optimizer, range(3)))
        engine.close()
    assert losses[0] == losses[1]


class Capturing(torch.optim.AdamW):
    """Cannot be tried on the host."""

    def step(self, closure=None):
        raise RuntimeError("not here")


REFUSED = {
    "ASGD": (lambda p: torch.optim.ASGD(p), r"ASGD keeps 'ax'; allowed: exp_avg, momentum_buffer"),
    "Rprop": (lambda p: torch.optim.Rprop(p), r"Rprop keeps 'prev'"),
    "RMSprop": (lambda p: torch.optim.RMSprop(p, centered=True), r"RMSprop keeps 'grad_avg'"),
    "untried": (lambda p: Capturing(p), r"cannot determine the state of Capturing"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_with_other_state_are_refused(name):
    make, message = REFUSED[name]
    model = gpt()
    with pytest.raises(ConfigError, match=message):
        ZeroEngine(model, [make(model.parameters())], IN_8_BITS)


def test_float64_is_refused():
    model = gpt().double()
    with pytest.raises(ConfigError, match=r"`moments: 8bit` needs moments in float32.*torch\.float64"):
        ZeroEngine(model, [torch.optim.AdamW(model.parameters())], IN_8_BITS)


def test_another_number_of_bits_is_refused():
    with pytest.raises(ConfigError, match=r"`moments` is '4bit'; allowed: 32bit, 8bit"):
        ZeroConfig(moments="4bit")
    assert ZeroConfig.from_flag("stage=1,moments=8bit").moments == "8bit"


# ---- in files ----

HOST = {"optimizer": "cpu"}


def files(path: object, **more) -> dict:
    return {"optimizer": "nvme", "nvme_path": str(path)} | more


def on(offload: dict, stage: int = 2, **more) -> dict:
    return {**IN_8_BITS, "stage": stage, "bucket_bytes": "100KiB", "offload": offload, **more}


def trained(settings: dict, count: int = 4) -> tuple[list[float], dict, dict, ZeroEngine]:
    model, optimizer, engine = prepared(settings)
    losses = steps(model, optimizer, range(count))
    states = whole_states(engine, model)
    with engine.gathered():
        weights = {name: {"": p.detach().float().clone()} for name, p in model.named_parameters()}
    return losses, weights, states, engine


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
@on_ranks()
def test_the_digits_are_those_of_moments_in_host_memory(rank, world_size, tmp_path):
    """At each stage, with masters in the files and without, the digits are the same."""
    path = str(tmp_path)
    cases = (
        (0, {}, {}),
        (1, {"param_dtype": "bfloat16"}, {}),
        (2, {}, {}),
        (3, {}, {"params": "nvme"}),
        (3, {"param_dtype": "bfloat16"}, {"params": "nvme"}),
    )
    for stage, digits, more in cases:
        host = {**HOST, "params": "cpu"} if "params" in more else HOST
        there = trained(on(host, stage, **digits))
        here = trained(on(files(path, **more), stage, **digits))
        assert here[0] == there[0], (stage, digits, more)
        for one, other in zip(here[1:3], there[1:3]):
            refuse_difference(one, other)
        here[3].close()


def small_numel(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if not is_in_blocks(p.numel()))


def test_files_hold_and_move_two_bytes_an_element(tmp_path):
    model, optimizer, engine = prepared(on(files(tmp_path)))
    steps(model, optimizer, range(2))
    layouts = [bucket.layout for bucket in engine.buckets]
    moments = (
        aligned(layout.shard_numel) + aligned(4 * blocks(layout.shard_numel))
        if has_blocks(layout)
        else aligned(4 * layout.shard_numel)
        for layout in layouts
    )
    held = 2 * sum(moments)
    report = engine.memory_report()
    assert sum(path.stat().st_size for path in engine.tier.files.folder.path.glob("*.state")) == held
    assert report.traffic.held_bytes == report.traffic.written_bytes_a_step == report.traffic.read_bytes_a_step == held
    numel = sum(p.numel() for p in model.parameters())
    rows = {row.kind: row for row in report.rows}
    assert rows["optimizer state"].where == "NVMe"
    # Each moment of a bucket is padded twice: its codes and its scales.
    assert 0 <= held - state_plan(engine).in_files <= 4 * aligned(1) * len(layouts)
    assert rows["optimizer state"].bytes <= 2.04 * sum(layout.numel for layout in layouts) + 8 * small_numel(model)
    assert rows["optimizer state"].ddp_bytes == 8 * numel
    # A bucket's moments in 32 bits, beside the window of files.
    most = 8 * max(layout.shard_numel for layout in layouts)
    assert most < report.traffic.window_bytes < 2 * most
    for state in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            assert state[name].untyped_storage().nbytes() == 4 or not is_in_blocks(state[name].numel())


def test_the_forecast_of_the_disk_is_a_quarter_too(monkeypatch, tmp_path):
    numel = sum(p.numel() for p in gpt().parameters())
    monkeypatch.setattr(room, "free_disk_bytes", lambda _: int(2.2 * numel))
    prepared(on(files(tmp_path)))
    with pytest.raises(OSError, match="too little"):
        prepared(on(files(tmp_path), moments="32bit"))


def test_a_checkpoint_goes_on_from_files_and_into_them(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    model, optimizer, engine = prepared(on(files(disk)))
    steps(model, optimizer, range(3))
    save_engine(engine, tmp_path)
    states = whole_states(engine, model)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    own = copy.deepcopy(optimizer.state_dict())
    assert all(value.isfinite().all() for each in own["state"].values() for value in each.values())
    expected = steps(model, optimizer, range(3, 5))
    end = whole_states(engine, model)
    for offload in (files(disk), HOST, {"optimizer": "none"}):
        model, optimizer, engine = prepared(on(offload))
        model.load_state_dict(weights)
        load_engine(engine, tmp_path / "zero")
        refuse_difference(whole_states(engine, model), states)
        assert steps(model, optimizer, range(3, 5)) == expected
        refuse_difference(whole_states(engine, model), end)
    model, optimizer, engine = prepared(on(files(disk)))
    model.load_state_dict(weights)
    optimizer.load_state_dict(own)
    refuse_difference(whole_states(engine, model), states)
    assert steps(model, optimizer, range(3, 5)) == expected


def test_state_from_before_the_engine_goes_to_files_as_to_host_memory(tmp_path):
    runs = []
    for offload in (HOST, files(tmp_path)):
        torch.manual_seed(0)
        model = gpt()
        optimizer = adamw_in_two_groups(model)
        steps(model, optimizer, range(2))
        engine = ZeroEngine(model, [optimizer], on(offload))
        runs.append((steps(model, optimizer, range(2, 4)), whole_states(engine, model)))
        engine.close()
    assert runs[0][0] == runs[1][0]
    refuse_difference(runs[0][1], runs[1][1])
    assert not list(Path(tmp_path).glob("hf_zero-run-*"))
