"""DeepSpeed's checkpoints: every bit of them is read, at any number of ranks, and what is not covered is refused by name."""

import itertools
import json
import os
import pickle
import shutil
from enum import Enum
from pathlib import Path, PurePosixPath

import deepspeed_folder
import pytest
import torch
from cells import examples, slow
from deepspeed_folder import WholeState, write_deepspeed
from deepspeed_run import UNTIED, Tiny, ids_of
from foreign_checks import KINDS, Harm, on_ranks, refusal, same_bits
from hypothesis import given
from hypothesis import strategies as st
from launching import SUPPORT
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, TensorProperties

from hf_zero import gathered
from hf_zero.engine.engine import ZeroEngine
from hf_zero.foreign import pickles
from hf_zero.foreign.convert import load_foreign_weights, open_foreign, open_saved_by_others
from hf_zero.foreign.pickles import load_deepspeed_file
from hf_zero.integrations.state_io import load_state
from hf_zero.layout.intervals import Interval

pytestmark = pytest.mark.timeout(180)

REAL = SUPPORT / "deepspeed_files"
FOLDERS = sorted(path.name for path in REAL.iterdir() if path.name != UNTIED)


@pytest.mark.parametrize("name", FOLDERS)
def test_what_deepspeed_wrote_is_read_as_deepspeed_itself_reads_it(name):
    foreign = open_foreign(REAL / name)
    # It lists frozen and tied weights too.
    every = load_file(REAL / name / "expected.safetensors")
    expected = {key: whole for key, whole in every.items() if key.split("/", 1)[1] in foreign.shapes}
    assert sorted(expected) == sorted(f"{kind}/{n}" for n in foreign.shapes for kind in foreign.kinds_of(n))
    assert set(foreign.shapes) == {"embed.weight", "inner.weight", "inner.bias", "norm.weight", "norm.bias"}
    for key, whole in expected.items():
        kind, parameter = key.split("/", 1)
        for world_size in (1, 2, 3, 4):
            size = -(-whole.numel() // world_size)
            parts = [
                foreign.read(
                    kind, parameter, Interval(min(r * size, whole.numel()), min((r + 1) * size, whole.numel()))
                )
                for r in range(world_size)
            ]
            assert same_bits(torch.cat(parts), whole.reshape(-1)), (key, world_size)
    assert foreign.scalars_of("inner.bias") == {"step": torch.tensor(3.0)}
    assert [group.names for group in foreign.groups][1] == ("inner.bias", "norm.weight", "norm.bias")
    assert [group.settings["weight_decay"] for group in foreign.groups] == [0.01, 0.0]
    others = dict(foreign.other_weights())
    assert others["frozen.weight"].shape == (5, 5) and others["frozen.bias"].shape == (5,)
    assert torch.equal(others["scale"].float(), torch.full((5,), 0.5))


def test_stages_and_ranks_of_deepspeed_agree_on_the_frozen_weights():
    fp32 = [
        dict(open_foreign(REAL / name).other_weights())
        for name in ("stage1-3ranks", "stage2-3ranks-aligned", "stage3-2ranks")
    ]
    for name in ("frozen.weight", "frozen.bias"):
        assert all(same_bits(others[name], fp32[0][name]) for others in fp32)


@st.composite
def whole_states(draw) -> WholeState:
    """Groups of parameters of odd shapes, with values that are all different."""
    groups, weights, state, at = [], {}, {}, 0
    for group in range(draw(st.integers(1, 3))):
        names = []
        for number in range(draw(st.integers(1, 4))):
            shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
            numel, name = torch.Size(shape).numel(), f"g{group}.p{number}"
            values = torch.arange(at, at + 3 * numel).float().view(3, *shape)
            at += 3 * numel
            weights[name], names = values[0].clone(), [*names, name]
            state[name] = {"step": torch.tensor(4.0), "exp_avg": values[1].clone(), "exp_avg_sq": values[2].clone()}
        groups.append(({"lr": 0.1 * (group + 1), "betas": (0.9, 0.99)}, names))
    frozen = {f"frozen{number}": torch.rand(draw(st.integers(1, 7))) for number in range(draw(st.integers(0, 2)))}
    return WholeState(
        weights={**weights, **frozen, "buffer": torch.rand(3)},
        groups=groups,
        state=state,
        buffers=["buffer"],
        frozen=list(frozen),
    )


@given(
    whole=whole_states(),
    stage=st.sampled_from([1, 2, 3]),
    world_size=st.integers(1, 5),
    sub_group_numel=st.integers(1, 60),
    spaced=st.booleans(),
    cut=st.floats(0, 1),
)
@examples(60)
def test_every_element_of_any_deepspeed_folder_comes_back(
    whole, stage, world_size, sub_group_numel, spaced, cut, tmp_path_factory
):
    folder = tmp_path_factory.mktemp("deepspeed")
    write_deepspeed(folder, whole, stage=stage, world_size=world_size, sub_group_numel=sub_group_numel, spaced=spaced)
    foreign = open_foreign(folder)
    assert foreign.shapes == {name: tuple(whole.weights[name].shape) for _, names in whole.groups for name in names}
    assert [(group.settings, list(group.names)) for group in foreign.groups] == whole.groups
    for name, shape in foreign.shapes.items():
        numel = torch.Size(shape).numel()
        middle = round(cut * numel)
        for kind in foreign.kinds_of(name):
            expected = whole.weights[name] if kind == "master" else whole.state[name][kind]
            parts = [foreign.read(kind, name, Interval(0, middle)), foreign.read(kind, name, Interval(middle, numel))]
            assert same_bits(torch.cat(parts), expected)
        assert foreign.scalars_of(name) == {"step": torch.tensor(4.0)}
    weights = dict(foreign.weights())
    assert weights.keys() == whole.weights.keys()
    assert all(same_bits(weights[name], value) for name, value in whole.weights.items())


@pytest.fixture
def stage2(tmp_path) -> Path:
    shutil.copytree(REAL / "stage2-2ranks-bf16", tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.fixture
def stage3(tmp_path) -> Path:
    shutil.copytree(REAL / "stage3-3ranks-bf16", tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def optimizer_file(folder: Path, rank: int) -> Path:
    [path] = folder.glob(f"global_step*/*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return path


def edited(path: Path, change) -> None:
    """Replaces a file by one with the same plain values, changed; DeepSpeed's own objects are left out."""
    content = load_deepspeed_file(path)
    content.get("optimizer_state_dict", {}).pop("loss_scaler", None)
    content.get("optimizer_state_dict", {}).pop("param_slice_mappings", None)
    change(content)
    torch.save(content, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def by_name(member: Enum, _protocol: int) -> tuple:
    return getattr, (type(member), member.name)


def test_members_of_enumerations_are_read_as_early_releases_of_python_3_11_write_them(tmp_path, monkeypatch):
    monkeypatch.setattr(deepspeed_folder.ZeroStageEnum, "__reduce_ex__", by_name)
    weights = {"weight": torch.ones(4)}
    whole = WholeState(
        weights, [({"lr": 0.1}, ["weight"])], {"weight": {"step": torch.ones(()), "exp_avg": torch.zeros(4)}}
    )
    write_deepspeed(tmp_path, whole, stage=2, world_size=1)
    assert load_deepspeed_file(optimizer_file(tmp_path, 0))["optimizer_state_dict"]["zero_stage"] == 2
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    properties = pickles._plain_values(pickle.dumps(TensorProperties(), protocol=4))
    assert torch.float32 in properties.unnamed
    with pytest.raises(pickle.UnpicklingError, match="an object that is not an enumeration"):
        pickles._plain_values(pickle.dumps(Home(), protocol=4))


class Home:
    def __reduce__(self) -> tuple:
        return getattr, (PurePosixPath, "cwd")


def test_a_missing_rank_file_is_named(stage3):
    optimizer_file(stage3, 1).unlink()
    assert "has no optimizer file of rank 1 of 3 (1 missing)" in refusal(stage3)


def test_a_missing_model_file_is_named(stage3):
    next(stage3.glob("global_step*/zero_pp_rank_2_*model_states.pt")).unlink()
    assert "has no model file (…_model_states.pt) of rank 2" in refusal(stage3)


def test_a_folder_that_latest_names_and_that_is_not_there_is_said(stage2):
    (stage2 / "latest").write_text("global_step9")
    assert "names 'global_step9'" in refusal(stage2)
    (stage2 / "latest").write_text("../../etc")
    assert "names '../../etc'" in refusal(stage2)


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.6, 0.99])
def test_a_truncated_file_is_refused(stage2, kept):
    path = optimizer_file(stage2, 1)
    os.truncate(path, int(path.stat().st_size * kept))
    assert str(path) in refusal(stage2) and "cut off or damaged" in refusal(stage2)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "is from a tensor-parallel run"),
        ("mp_rank_01_model_states.pt", "is from a tensor-parallel run"),
        ("layer_00-model_states.pt", "is from a pipeline-parallel run"),
        ("layer_0_expert_3_mp_rank_00_model_states.pt", "is from a mixture-of-experts run"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "is from a mixture-of-experts run"),
        ("zero_pp_rank_2_mp_rank_00_optim_states.pt", "optimizer files of 3 ranks but is partitioned over 2"),
    ],
)
def test_variants_that_are_not_covered_are_refused_by_their_files(stage2, name, says):
    (stage2 / "global_step3" / name).write_bytes(b"")
    assert says in refusal(stage2) and "not supported" in refusal(stage2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c.update(ds_version="1.0.0"), "was written by DeepSpeed 1.0.0 (known: 0.16 to 0.19)"),
        (lambda c: c.update(ds_version=None), "was written by DeepSpeed None"),
        (lambda c: c.update(mp_world_size=2), "is from a run with mp_world_size 2"),
        (lambda c: c.update(checkpoint_parallel_dimensions={"pp_degree": 4}), "is from a run with pp_degree 4"),
        (lambda c: c.update(param_shapes=None), "has no param_shapes"),
        (lambda c: c["param_shapes"].pop(), "names 1 groups, but rank 0's file has 2"),
        (lambda c: c["param_shapes"][1].update({"more": torch.Size([50])}), "names 4 parameters in group 1, but"),
    ],
)
def test_what_a_model_file_says_and_is_not_covered_is_refused(stage2, change, says):
    edited(stage2 / "global_step3" / "mp_rank_00_model_states.pt", change)
    if "ds_version" in says or "written by" in says:
        edited(optimizer_file(stage2, 0), lambda c: c.update(ds_version=None))
    assert says in refusal(stage2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: s.pop("zero_stage"), "is not a file of ZeRO stage 1, 2 or 3"),
        (lambda s: s.update(zero_stage=0), "is from ZeRO stage 0"),
        (lambda s: s.update(partition_count=[2, 1]), "partitioned over [1, 2] ranks (mixture of experts)"),
        (lambda s: s.update(base_optimizer_state=None), "no fp32 masters or no optimizer state"),
        (lambda s: s.update(base_optimizer_state=[{}, {}]), "elastic_checkpoint"),
        (lambda s: s["base_optimizer_state"]["state"][0].update(exp_avg=torch.rand(3)), "has 3 elements of exp_avg"),
        (
            lambda s: s.update(param_alignment_paddings=None) or s["group_paddings"].__setitem__(0, 9),
            "group 0 has partitions of",
        ),
    ],
)
def test_what_an_optimizer_file_says_and_is_not_covered_is_refused(stage2, change, says):
    edited(optimizer_file(stage2, 0), lambda content: change(content["optimizer_state_dict"]))
    assert says in refusal(stage2)


def test_stage_3_state_on_nvme_is_refused(stage3):
    def swap_out(content: dict) -> None:
        content["optimizer_state_dict"]["fp32_flat_groups"][0] = torch.empty(0)

    edited(optimizer_file(stage3, 1), swap_out)
    assert "rank 1's file 0 (state offloaded to NVMe is not supported)" in refusal(stage3)


def test_nothing_in_a_file_of_deepspeed_is_run(stage2, tmp_path):
    edited(optimizer_file(stage2, 0), lambda content: content.update(more=Harm(tmp_path / "harm")))
    assert "which is not loaded: a checkpoint may contain only tensors and plain values" in refusal(stage2)
    assert not (tmp_path / "harm").exists()


def engine_from(folder: Path, model: Tiny, stage: int) -> tuple[ZeroEngine, torch.optim.Optimizer]:
    """An engine of other settings that has taken in a folder."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": [p for p in trained if p.dim() > 1]}, {"params": [p for p in trained if p.dim() == 1]}]
    optimizer = torch.optim.AdamW(groups, lr=5.0)
    load_foreign_weights(model, folder)
    engine = ZeroEngine(model, [optimizer], {"stage": stage})
    load_state(engine, folder, open_saved_by_others)
    return engine, optimizer


EVERY = list(itertools.product(range(4), (torch.float32, torch.bfloat16)))
SOME = [(0, torch.float32), (1, torch.bfloat16), (2, torch.float32), (3, torch.bfloat16)]


def takes_in(rank: int, world_size: int, engines: list[tuple[int, torch.dtype]]) -> list[str]:
    """Takes every folder into engines of these stages and dtypes; what differs from DeepSpeed's own reading."""
    different = []
    for name in FOLDERS:
        expected = load_file(REAL / name / "expected.safetensors")
        for stage, dtype in engines:
            model = Tiny().to(dtype)
            engine, optimizer = engine_from(REAL / name, model, stage)
            rows = list(engine.state.rows())
            kinds = {*KINDS, "master"} if dtype == torch.bfloat16 else set(KINDS)
            if rows and {row.kind for row in rows} != kinds:
                different.append(f"{name}: kinds {[row.kind for row in rows]}")
            for row in rows:
                whole = expected[f"{row.kind}/{row.name}"].reshape(-1)
                if not same_bits(row.tensor.cpu(), whole[row.interval.start : row.interval.stop]):
                    different.append(f"{name}: {row.kind} of {row.name} {row.interval} as {dtype}")
            with gathered(model):
                for parameter_name, parameter in model.named_parameters():
                    if parameter.requires_grad and not same_bits(
                        parameter.detach(), expected[f"master/{parameter_name}"].to(dtype)
                    ):
                        different.append(f"{name}: {parameter_name} as {dtype}")
            steps = {float(scalars["step"]) for scalars in engine.state.scalars().values()}
            settings = [(group["lr"], group["betas"], group["weight_decay"]) for group in optimizer.param_groups]
            if steps - {3.0} or settings != [(1e-2, (0.8, 0.99), 0.01), (1e-2, (0.8, 0.99), 0.0)]:
                different.append(f"{name}: steps {steps}, settings {settings}")
            engine.close()
    return different


@pytest.mark.parametrize(
    ("world_size", "engines"),
    [(2, SOME), slow(1, EVERY), slow(2, EVERY), slow(3, EVERY)],
    ids=["2", "1-every", "2-every", "3-every"],
)
def test_deepspeeds_checkpoints_enter_engines_of_any_stage_and_number_of_ranks_bit_for_bit(world_size, engines):
    assert on_ranks(takes_in, world_size, engines=engines) == [[]] * world_size


def follows(rank: int, world_size: int) -> list[list[float]]:
    """Three more steps at each stage, on the batches that DeepSpeed took."""
    losses = []
    for stage in range(4):
        model = Tiny(tied=False)
        engine, optimizer = engine_from(REAL / UNTIED, model, stage)
        losses.append([])
        for step in range(3, 6):
            ids = ids_of(step, rank)
            loss = torch.nn.functional.cross_entropy(model(ids), ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[stage].append(loss.item())
        engine.close()
    return losses


def test_a_run_goes_on_at_every_stage_as_deepspeed_itself_went_on():
    for rank, losses in enumerate(on_ranks(follows, 2)):
        expected = json.loads((REAL / UNTIED / f"losses-{rank}.json").read_text())[3:]
        assert losses == [pytest.approx(expected, rel=1e-5)] * 4
