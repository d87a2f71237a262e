"""Folders of somebody else's: each that does not hold what it says is one clear fault, and nothing outside of it is touched."""

import itertools
import json
import os
import pickle
import random
import re
import resource
import shutil
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import fuzzed_readers
import pytest
import torch
from cells import slow
from fuzzed_readers import READERS, VALUES, edit_json, fuzz_readers
from hostile_folders import (
    MANIFEST,
    by_command,
    cast,
    commands,
    every_command,
    list_rows,
    make_card,
    resign,
    with_header,
)
from shared_ranks import run_on_ranks
from trainer_job import as_launched, make_trainer
from training import gpt2

from hf_zero.checkpoint.disks import Disk
from hf_zero.checkpoint.faults import CheckpointError
from hf_zero.checkpoint.files import files_below
from hf_zero.checkpoint.torch_files import load_tensors
from hf_zero.checkpoint.verify import checkpoint_faults, find_good
from hf_zero.config import ConfigError
from hf_zero.integrations import config_model
from hf_zero.integrations.resume import resume_faults

pytestmark = pytest.mark.timeout(180)
SECRET = "nobody's business, 4711"
MOST_S = 60.0
MOST_BYTES = 3 * 2**30
TEXTS = [
    "[" * 100_000,
    '{"a":' * 50_000,
    "9" * 10_000,
    "",
    "null",
    "[]",
    '"x"',
    "{}",
    "\ufeff{}",
    "\x00" * 100,
    '{"format_version": 4}',
    '{"weight_map": {"a": 3}}',
    '{"architectures": ["pipeline"], "model_type": "bert"}',
]


class Trap:
    """Runs a command when it is unpickled by somebody who runs what is in a pickle."""

    def __init__(self, marker: Path):
        self._marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self._marker}",)


@dataclass(frozen=True)
class Target:
    """A checkpoint to harm, the random numbers to do it by, and where its secret and its trap's marker lie."""

    folder: Path
    rng: random.Random
    secret: Path
    marker: Path

    def file(self, *suffixes: str) -> Path:
        """Some file, of one of these suffixes where they are given."""
        # Through a link the harm would be to what it leads to.
        files = [name for name in files_below(self.folder) if not (self.folder / name).is_symlink()]
        names = [name for name in files if not suffixes or name.endswith(suffixes)]
        return self.folder / self.rng.choice(names)


def flips(target: Target) -> None:
    path = target.file()
    content = bytearray(path.read_bytes())
    for _ in range(target.rng.choice([1, 1, 8, 64])):
        if content:
            # Half of them in the first bytes, where headers are.
            at = target.rng.randrange(min(len(content), target.rng.choice([200, 10**9])))
            content[at] ^= 1 << target.rng.randrange(8)
    path.write_bytes(content)


def cuts(target: Target) -> None:
    path = target.file()
    size = path.stat().st_size
    os.truncate(path, target.rng.choice([0, 1, 8, size // 2, max(0, size - 1), size + 4096]))


def takes_away(target: Target) -> None:
    path = target.rng.choice(sorted(target.folder.rglob("*")))
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def edits_json(target: Target) -> None:
    path = target.file(".json")
    content = json.loads(path.read_text())
    for _ in range(target.rng.choice([1, 1, 3])):
        edit_json(content, target.rng)
    path.write_text(json.dumps(content, indent=1))


def writes_text(target: Target) -> None:
    target.file(".json").write_text(target.rng.choice(TEXTS))


def nests(target: Target) -> None:
    value: object = 0
    for _ in range(target.rng.choice([50, 300, 900])):
        value = [value]
    path = target.file(".json")
    content = json.loads(path.read_text())
    content[target.rng.choice(list(content))] = value
    path.write_text(json.dumps(content, indent=1))


def asks_for_much(target: Target) -> None:
    path = target.folder / "config.json"
    name = target.rng.choice(["num_hidden_layers", "hidden_size", "num_labels", "vocab_size", "intermediate_size"])
    number = target.rng.choice([20_000, 10**9, 10**18])
    path.write_text(json.dumps({**json.loads(path.read_text()), name: number}))


def links(target: Target) -> None:
    path = target.rng.choice(sorted(target.folder.rglob("*")))
    to = target.rng.choice([target.secret, target.secret.parent, path, Path("/dev/zero"), Path("/nowhere"), Path("..")])
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    path.symlink_to(to)


def adds_a_link(target: Target) -> None:
    name = target.rng.choice(
        ["tokenizer.json", "vocab.txt", "chat_template.jinja", "generation_config.json", "README.md"]
    )
    if not (target.folder / name).exists():
        (target.folder / name).symlink_to(target.secret)


def puts_another_kind(target: Target) -> None:
    path = target.file()
    path.unlink()
    if target.rng.random() < 0.5:
        path.mkdir()
    else:
        os.mkfifo(path)


def edits_a_header(target: Target) -> None:
    def change(header: dict) -> None:
        name = target.rng.choice([key for key in header if key != "__metadata__"])
        field = target.rng.choice(["dtype", "shape", "data_offsets"])
        if target.rng.random() < 0.3:
            header[target.rng.choice(["x", "", "a" * 3000, "\ud800"])] = header.pop(name)
        else:
            dtypes = ["F64", "F16", "BF16", "U8", "BOOL", "F8_E4M3", "I32", "X"]
            header[name][field] = target.rng.choice(dtypes) if field == "dtype" else target.rng.choice(VALUES)

    with_header(target.file(".safetensors"), change)


def sets_a_trap(target: Target) -> None:
    names = ["scheduler.pt", "rng_state_0.pth", "rng_state.pth", "optimizer.pt", "training_args.bin", "scaler.pt"]
    path = target.folder / target.rng.choice([*names, "pytorch_model.bin", "latest"])
    path.write_bytes(pickle.dumps(Trap(target.marker)))


def is_of_another_engine(target: Target) -> None:
    shutil.rmtree(target.folder / "zero")
    kind = target.rng.randrange(3)
    if kind == 0:
        (target.folder / "latest").write_text(target.rng.choice(["x", "../secret", "a" * 5000, "\x00", "global_step4"]))
        (target.folder / "global_step4").mkdir()
        for name in ("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"):
            (target.folder / "global_step4" / name).write_bytes(pickle.dumps(Trap(target.marker)))
    elif kind == 1:
        for name in ("pytorch_model_fsdp_0", "optimizer_0"):
            (target.folder / name).mkdir()
            (target.folder / name / ".metadata").write_bytes(pickle.dumps(Trap(target.marker), protocol=4))
    else:
        (target.folder / "pytorch_model_fsdp.bin").write_bytes(b"x")


HARMS: list[Callable[[Target], None]] = [
    *(flips, cuts, takes_away, edits_json, edits_json, edits_json, writes_text, nests, asks_for_much, links),
    *(adds_a_link, puts_another_kind, edits_a_header, edits_a_header, sets_a_trap, is_of_another_engine),
]


def harm(target: Target) -> list[str]:
    """Does one to three kinds of harm; mostly the sums are made right again. Returns their names."""
    done = []
    for _ in range(target.rng.choice([1, 1, 1, 2, 3])):
        each = target.rng.choice(HARMS)
        try:
            each(target)
            done.append(each.__name__)
        except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
            # What an earlier harm has left does not take this one.
            continue
    if target.rng.random() < 0.7:
        try:
            resign(target.folder)
            done.append("signed")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            # What is left has no place for sums.
            done.append(f"not to be signed ({type(error).__name__})")
    return done


def doors(folder: Path, work: Path, *, resume: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Ways in, each as a function that ends by itself or by an error of ours."""
    for name, words in commands(folder, work / "out").items():
        yield name, lambda words=words: by_command(*words)
    yield (
        "last-good",
        partial(
            find_good,
            folder.parent,
            "zero",
            disk=Disk.shared(),
            exchange=lambda value: [value],
            further_faults=resume_faults,
        ),
    )
    if resume:
        yield "resume", lambda: resumes(folder, work / "resumed")


def resumes(folder: Path, output_dir: Path) -> str:
    """An error of ours, in words; "" where training went on."""
    trainer = make_trainer("flag 2", "bert", output_dir, max_steps=5, save_strategy="no")
    try:
        trainer.train(resume_from_checkpoint=str(folder))
    except Exception as error:
        if "hf_zero" not in str(error):
            raise
        return str(error)
    return ""


def broken_promises(entered: dict[str, object], folder: Path) -> Iterator[str]:
    """The doors that do not take what `verify` calls good, or what a run that goes on by itself would."""

    def is_taken(door: str) -> bool:
        code, said = entered[door]
        return code == 0 or (door == "push" and "files would be sent" in said)

    if entered.get("verify", (1,))[0] == 0:
        yield from (
            f"{door} refuses it: {entered[door][1]}"
            for door in ("inspect", "consolidate", "push")
            if door in entered and not is_taken(door)
        )
    found, _ = entered.get("last-good", (None, None))
    if found == folder and entered.get("resume"):
        yield f"resume refuses it: {entered['resume']}"


def fuzz(rank: int, world_size: int, base: str, work: str, seeds: range, resume_every: int) -> list[str]:
    """What went wrong, in words, with the seed that it goes wrong by."""
    as_launched(rank, world_size)
    config_model.TIME_LIMIT_S = 10.0
    wrong: list[str] = []
    for seed in seeds:
        place = Path(work) / str(seed)
        folder = Path(shutil.copytree(base, place / "run" / "checkpoint-4", symlinks=True))
        secret = place / "secret" / "secret"
        secret.parent.mkdir()
        secret.write_text(SECRET)
        done = harm(Target(folder=folder, rng=random.Random(seed), secret=secret, marker=place / "marker"))
        entered: dict[str, object] = {}
        for door, enter in doors(folder, place, resume=seed % resume_every == 0):
            context = f"seed {seed} ({', '.join(done)}) by {door}"
            wrong += [f"{context}: {fault}" for fault in _entered(enter, entered, door)]
            if (place / "marker").exists():
                wrong.append(f"{context}: something in it was run")
        wrong += [f"seed {seed} ({', '.join(done)}) is good, and {fault}" for fault in broken_promises(entered, folder)]
        if secret.read_text() != SECRET or _holds_secret(place / "out"):
            wrong.append(f"seed {seed} ({', '.join(done)}): something outside of it was copied or written")
        shutil.rmtree(place)
    return wrong


def _entered(enter: Callable[[], object], entered: dict[str, object], door: str) -> Iterator[str]:
    began_s, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        result = entered[door] = enter()
        if SECRET in str(result) or "Traceback" in str(result):
            yield f"says {str(result)[-300:]}"
    except Exception as error:
        yield f"{type(error).__name__}: {str(error)[:300]}"
    seconds = time.monotonic() - began_s
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    if seconds > MOST_S or grown > MOST_BYTES:
        yield f"took {seconds:.0f} s and {grown / 2**20:.0f} MiB"


def _holds_secret(out: Path) -> bool:
    return out.is_dir() and any(
        path.is_symlink() or SECRET.encode() in path.read_bytes() for path in out.rglob("*") if path.is_file()
    )


ROWS = "rank-00001-of-00002.safetensors"
SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}


def saves(rank: int, world_size: int, folder: str, layout: str) -> None:
    as_launched(rank, world_size)
    make_trainer(f"flag stage=2,checkpoint.layout={layout}", "bert", f"{folder}/{layout}", **SAVING).train()


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Runs of two ranks in both layouts: `hf/checkpoint-2`, `hf/checkpoint-4`, and the same below `sharded`."""
    folder = tmp_path_factory.mktemp("trained")
    for layout in ("hf", "sharded"):
        run_on_ranks(saves, folder=str(folder), layout=layout)
    return folder


@pytest.fixture
def checkpoint(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained / "hf" / "checkpoint-4", tmp_path / "checkpoint-4"))


@pytest.fixture
def sharded(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained / "sharded" / "checkpoint-4", tmp_path / "sharded"))


@pytest.fixture
def plain(tmp_path) -> Path:
    """A model folder."""
    torch.manual_seed(1)
    gpt2().save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def assert_refused(folder: Path, says: str, by: tuple[str, ...] = ("verify",)) -> None:
    """These commands refuse the folder and say why, as far as their extras are there."""
    found = commands(folder, folder.with_name("out"))
    for name in found.keys() & by:
        code, output = by_command(*found[name])
        assert code == 1 and says in output, (name, output)
    assert not folder.with_name("out").exists()


SENDING = ("verify", "consolidate", "push")


# ---- what fits its sums and nothing else ----


def of_another_key(content: dict) -> None:
    list_rows(content)
    content["rows"][0][5] = "exp_avg/nothing"


def with_a_plain_step(content: dict) -> None:
    next(iter(content["scalars"].values()))["step"] = 0


def changed_row(content: dict, *cuts: int, rank: int = 0) -> None:
    content["rows"][0][4:] = [rank, 1, *cuts]


def of_many_ranks(content: dict) -> None:
    """Small in the file, and far more rows than there are files."""
    content["world_size"] = 2**62
    changed_row(content, 0, 1, 1, 2**61)
    content["shapes"][content["rows"][0][1]] = [2**61]


def with_residuals(content: dict, *shape: int) -> None:
    """Adds residuals of a parameter without elements, whose rows are therefore complete."""
    content["shapes"]["empty"], content["kinds"]["empty"] = [0], ["residual.*"]
    content["own_shapes"]["empty"] = {"residual.*": shape} if shape else {}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (partial(changed_row, rank=9), "rows[0] is a list; expected: a list of 10"),
        (lambda content: changed_row(content, 0, 7, 0, 7, rank=9), "is of 1 of 2 ranks from 9 on"),
        (lambda content: changed_row(content, 0, 7, 0, 8), "rows[0] cuts elements 0 to 8 at 7 and every 0"),
        (of_many_ranks, "has rows but is not among the files"),
        (of_another_key, "is stored as 'exp_avg/nothing'; expected: 'exp_avg/"),
        (lambda content: changed_row(content, 0, 10**9, 0, 10**9), "has elements 0 to 1000000000 of"),
        (lambda content: content["files"].pop(f"zero/{ROWS}"), f"{ROWS} has rows but is not among the files"),
        (lambda content: content["files"].pop("model.safetensors"), "model.safetensors is not among the files"),
        (lambda content: content["files"].pop("scheduler.pt"), "scheduler.pt is not among the files"),
        (
            lambda content: content.update(step=3),
            "trainer_state.json is from step 4, but the checkpoint is from step 3",
        ),
        (lambda content: content["rows"][0].__setitem__(2, "F16"), "has dtype F32 in zero/rank-0000"),
        (with_a_plain_step, "scalars has 'step' as a tensor for one of"),
        (
            lambda content: with_residuals(content, 2**62, 0),
            f"own_shapes have ({2**62}, 0) for 'residual.*' of 'empty'",
        ),
        (lambda content: with_residuals(content, 2, 1), "own_shapes have (2, 1) for 'residual.*' of 'empty' with (0,)"),
        (with_residuals, "own_shapes have () for 'residual.*' of 'empty'"),
    ],
    ids=[
        "a short row",
        "row's rank",
        "row's cuts",
        "many ranks",
        "row's key",
        "interval",
        "rows left out",
        "weights left out",
        "scheduler left out",
        "step",
        "dtype",
        "a plain state",
        "more residuals than files",
        "residuals of another shape",
        "residuals without a shape",
    ],
)
def test_a_manifest_that_does_not_describe_its_folder_is_refused(change, says, checkpoint):
    resign(checkpoint, change)
    assert_refused(checkpoint, says)


def declared_as_integers(header: dict) -> None:
    for name, entry in header.items():
        if name != "__metadata__" and entry["dtype"] == "F32":
            entry["dtype"] = "I32"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda rows: rows.write_bytes(b""), f"zero/{ROWS} is cut off or damaged"),
        (lambda rows: os.truncate(rows, rows.stat().st_size - 4), f"zero/{ROWS} is cut off or damaged"),
        (lambda rows: cast(rows, torch.float64), f"has dtype F64 in zero/{ROWS}; expected: F32"),
        (lambda rows: with_header(rows, declared_as_integers), f"has dtype I32 in zero/{ROWS}; expected: F32"),
        (lambda rows: with_header(rows, lambda header: header.popitem()), f"zero/{ROWS} has no "),
    ],
    ids=["empty", "truncated", "another dtype", "declared otherwise", "a row less"],
)
def test_a_ranks_file_that_is_not_what_was_written_is_refused_whatever_its_sum(damage, says, checkpoint):
    damage(checkpoint / "zero" / ROWS)
    resign(checkpoint)
    assert_refused(checkpoint, says)


def test_weights_of_another_step_that_nothing_vouches_for_are_refused(checkpoint, trained):
    shutil.copy2(trained / "hf" / "checkpoint-2" / "model.safetensors", checkpoint)
    resign(checkpoint, lambda content: content["files"].pop("model.safetensors"))
    assert_refused(checkpoint, "model.safetensors is not among the files listed in manifest.json", SENDING)


def test_a_trainer_state_of_another_step_is_refused(checkpoint, trained):
    shutil.copy2(trained / "hf" / "checkpoint-2" / "trainer_state.json", checkpoint)
    resign(checkpoint)
    assert_refused(checkpoint, "trainer_state.json is from step 2, but the checkpoint is from step 4")


@pytest.mark.parametrize("step", [None, -4, 4.0, True, "4", []])
def test_a_trainer_state_without_a_number_of_steps_is_refused_also_where_the_manifest_has_none(checkpoint, step):
    state = checkpoint / "trainer_state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"global_step": step}))
    resign(checkpoint, lambda content: content.update(step=None))
    assert_refused(checkpoint, f"trainer_state.json has the global_step {step}, which is not a number of steps")


@pytest.mark.parametrize("dtype", ["F64", "U8", "BOOL", "F8_E4M3"])
def test_weights_that_are_declared_in_another_dtype_than_they_have_are_refused(dtype, sharded):
    resign(sharded, lambda content: [weight.__setitem__(0, dtype) for weight in content["weights"].values()])
    assert_refused(sharded, f"is {dtype}", ("consolidate",))


def test_weights_that_are_no_floating_point_numbers_are_refused(checkpoint):
    with_header(checkpoint / "model.safetensors", declared_as_integers)
    resign(checkpoint)
    assert_refused(checkpoint, "has dtype I32, which the config's model cannot have there")


def test_rows_of_a_second_model_are_looked_at_too(checkpoint):
    shutil.copytree(checkpoint / "zero", checkpoint / "zero_1")
    resign(checkpoint, lambda content: content["rows"].pop(), folder="zero_1")
    resign(checkpoint)
    assert_refused(checkpoint, "is missing or duplicated for some elements")


def test_files_that_no_resume_reads_may_be_added_to_a_checkpoint(checkpoint):
    (checkpoint / "notes.txt").write_text("by hand")
    for name in ("embeddings.pt", "model_ema.safetensors"):
        (checkpoint / name).write_bytes(b"of a callback")
    assert by_command("inspect", checkpoint)[0] == 0
    assert checkpoint_faults(checkpoint, "zero") == []


# ---- links ----


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors", "config.json", "zero"])
def test_a_link_out_of_the_folder_is_neither_read_nor_copied(name, checkpoint, tmp_path):
    aside = tmp_path / "aside"
    if (checkpoint / name).exists():
        (checkpoint / name).rename(aside)
    else:
        aside.write_text("secret")
    (checkpoint / name).symlink_to(aside)
    assert_refused(checkpoint, f"{name} is a link that leads out of the folder", SENDING)


@pytest.mark.extra("hub")
def test_a_link_out_of_a_model_folder_is_not_pushed(plain, tmp_path):
    (tmp_path / "secret").write_text("secret")
    (plain / "tokenizer.json").symlink_to(tmp_path / "secret")
    assert_refused(plain, "tokenizer.json is a link that leads out of the folder", SENDING)


@pytest.mark.extra("hub")
def test_a_card_is_not_written_through_a_link(plain, tmp_path):
    (tmp_path / "secret").write_text("secret")
    (plain / "README.md").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="leads out of"):
        make_card(plain)
    assert (tmp_path / "secret").read_text() == "secret"


@pytest.mark.extra("hub")
def test_links_inside_a_folder_and_those_of_a_snapshot_in_the_hubs_cache_are_files(plain, tmp_path):
    (plain / "model.safetensors").rename(plain / "weights")
    (plain / "model.safetensors").symlink_to("weights")
    assert by_command("verify", plain)[0] == 0
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0123", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(plain.iterdir())):
        shutil.copy2(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert by_command("verify", snapshot)[0] == 0
    assert by_command("consolidate", snapshot, tmp_path / "out")[0] == 0
    code, output = by_command("push", snapshot, "me/model")
    assert code == 1 and "files would be sent" in output


# ---- configs ----


def with_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["Trainer"]}, "names the architecture Trainer, which is not a subclass"),
        ({"architectures": ["pipeline"]}, "names the architecture pipeline, which is not a subclass"),
        ({"architectures": ["__doc__"]}, "names the architecture ['__doc__'], which transformers does not have"),
        ({"n_layer": 20_000}, "describes a model with more than "),
        ({"n_layer": "many"}, "config.json cannot be read (Validation error for field 'n_layer': TypeError: "),
        ({"n_head": 0}, "its model, GPT2LMHeadModel, cannot be built"),
        ({"n_embd": 10**12}, "its model, GPT2LMHeadModel, cannot be built"),
        ({"model_type": ["gpt2"]}, "config.json cannot be read"),
    ],
)
def test_a_config_is_asked_for_a_model_of_transformers_and_of_these_weights_only(changes, says, plain):
    with_config(plain, **changes)
    assert_refused(plain, says)


def test_a_config_whose_architectures_are_a_number_is_refused_by_it(plain):
    with_config(plain, architectures=3)
    code, output = by_command("verify", plain)
    # Not every release of transformers reads a config whose values are of other kinds than its fields.
    said = re.search(r"names the architecture 3, which|field 'architectures': TypeError: .* value 3 ", output)
    assert code == 1 and said, output


def test_a_config_that_makes_no_end_is_given_up(plain, monkeypatch):
    monkeypatch.setattr(config_model, "TIME_LIMIT_S", 1.0)
    with_config(plain, num_labels=10**9)
    code, output = by_command("verify", plain)
    assert code == 1 and "its model could not be built within 1 s" in output


def test_a_config_cannot_name_code_of_somebody_else(plain):
    with_config(plain, auto_map={"AutoConfig": "somebody/else--code.Config"}, attn_implementation="somebody/else")
    code, output = by_command("verify", plain)
    assert code == 0 or "config.json" in output
    # The name in the file goes before the public argument of `from_pretrained`.
    with_config(plain, _attn_implementation="somebody/else")
    assert config_model.read_config(plain)._attn_implementation == "eager"


# ---- what is no checkpoint at all ----

NESTED = "[" * 100_000
NASTY = [float("nan"), -1, 1.5, 10**30, "x", "", "\ud800", "a" * 300, "../../x", None, True, [], {}, [[1]]]


def everywhere(content: object, path: tuple = ()) -> list[tuple]:
    """The places of a JSON value: the first two of each list and mapping."""
    inner = list(content.items()) if isinstance(content, dict) else list(enumerate(content))
    found = []
    for key, value in inner[:2]:
        found.append((*path, key))
        if isinstance(value, dict | list):
            found += everywhere(value, (*path, key))
    return found


def put(content: object, *, place: tuple, value: object) -> None:
    *path, last = place
    for key in path:
        content = content[key]
    content[last] = value


def fields_of(content: dict) -> list[tuple]:
    return [place for name in content if name != "xxh3" for place in [(name,), *everywhere_below(content, name)]]


def everywhere_below(content: dict, name: str) -> list[tuple]:
    inner = content[name]
    return everywhere(inner, (name,)) if isinstance(inner, dict | list) else []


def test_any_value_of_another_kind_in_a_manifest_is_one_fault(sharded):
    text = (sharded / MANIFEST).read_text()
    places = fields_of(json.loads(text))
    assert len(places) > 60
    for number, place in enumerate(places):
        (sharded / MANIFEST).write_text(text)
        resign(sharded, partial(put, place=place, value=NASTY[number % len(NASTY)]))
        is_other = (sharded / MANIFEST).read_text() != text
        # Of these any value of the right kind is as good as another.
        assert place[0] in _FREE or not is_other or len(checkpoint_faults(sharded, "zero")) >= 1, place


_FREE = ("versions", "world_size", "stage", "written_at", "base", "scalars", "optimizers")


@pytest.mark.parametrize("text", [slow(NESTED), "9" * 10_000, slow("[]")], ids=["nested", "digits", "a list"])
def test_what_is_no_json_of_a_checkpoint_is_one_line(text, checkpoint, plain):
    (checkpoint / MANIFEST).write_text(text)
    assert_refused(checkpoint, "manifest.json is damaged", (*SENDING, "inspect"))
    for name in ("trainer_state.json", "training_run.json"):
        (plain / name).write_text(text)
        assert_refused(plain, name, ("push",))
        (plain / name).unlink()
    (plain / "config.json").write_text(text)
    assert_refused(plain, "config.json", SENDING)
    (plain / "model.safetensors.index.json").write_text(text)
    assert_refused(plain, "model.safetensors.index.json", (*SENDING, "inspect"))


def deep(levels: int) -> str:
    value: object = 0
    for _ in range(levels):
        value = [value]
    return json.dumps(value)


def changed_json(name: str, **changes: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / name
        content = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps({**content, **changes}))

    return change


def written(name: str, content: str | bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def in_the_place_of(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    def put_it(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return put_it


STATE, RUN, POSITION = "trainer_state.json", "training_run.json", "data_position.json"
READ_BY_OTHERS = {
    "a run that is no mapping": (written(RUN, "[]"), "training_run.json holds a list"),
    "a run nested deep": (written(RUN, deep(900)), "training_run.json holds a list"),
    "a run nested too deep": (written(RUN, NESTED), "training_run.json is damaged"),
    "a run's field": (changed_json(RUN, arguments=7), "arguments is a int; expected: a mapping"),
    "a run with a mark in front": (written(RUN, "\ufeff{}"), "training_run.json is damaged"),
    "a run that is a pipe": (in_the_place_of(RUN, os.mkfifo), "training_run.json is not a regular file"),
    "a history nested deep": (
        changed_json(STATE, log_history=json.loads(deep(300))),
        "log_history is not a list of mappings",
    ),
    "a history's number": (
        changed_json(STATE, log_history=[{"loss": "x"}]),
        "log_history has a loss that is not a number",
    ),
    "a state's field": (
        changed_json(STATE, epoch=[1]),
        "epoch in trainer_state.json is [1], which Trainer never writes",
    ),
    "a state's field too many": (changed_json(STATE, Trainer=1), "has 'Trainer', which Trainer does not know"),
    "a state that is a pipe": (in_the_place_of(STATE, os.mkfifo), "trainer_state.json is not a regular file"),
    "a place in the data": (changed_json(POSITION, rows="x", epoch=0, global_rows=1), "data_position.json holds"),
    "a scheduler that is none": (written("scheduler.pt", b"x" * 100), "scheduler.pt is cut off or damaged"),
    "random states that are none": (
        lambda folder: torch.save([1], folder / "rng_state_0.pth"),
        "rng_state_0.pth has contents that Trainer never writes there",
    ),
    "a pipe of any name": (lambda folder: os.mkfifo(folder / "notes"), "notes is not a regular file"),
    "a quantization": (
        changed_json("config.json", quantization_config={"load_in_8bit": True}),
        "no weight is quantized",
    ),
}


@pytest.mark.parametrize("name", READ_BY_OTHERS)
def test_verify_looks_at_each_file_of_a_checkpoint_that_other_doors_read(name, checkpoint):
    change, says = READ_BY_OTHERS[name]
    change(checkpoint)
    resign(checkpoint)
    assert_refused(checkpoint, says)


OF_A_MODEL = [
    "a run that is no mapping",
    "a run nested deep",
    "a run's field",
    "a run that is a pipe",
    "a pipe of any name",
]


@pytest.mark.parametrize("name", OF_A_MODEL)
def test_a_model_folder_whose_run_cannot_be_told_is_refused_before_anything_is_written(name, plain):
    change, says = READ_BY_OTHERS[name]
    change(plain)
    assert_refused(plain, says, SENDING)


@pytest.mark.extra("hub")
@pytest.mark.parametrize("name", ["README.md", "loss.png"])
def test_a_card_is_not_written_over_a_folder_or_into_a_pipe(name, checkpoint):
    for make in (os.mkfifo, os.mkdir):
        make(checkpoint / name)
        with pytest.raises(CheckpointError, match=f"{name} is not a regular file"):
            make_card(checkpoint)
        (checkpoint / name).unlink() if make is os.mkfifo else (checkpoint / name).rmdir()


def test_an_index_whose_entries_are_no_names_is_damaged(plain):
    (plain / "model.safetensors.index.json").write_text('{"weight_map": {"a": 3}}')
    assert_refused(plain, "its weight_map is not a mapping from tensors to files")
    (plain / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x" * 5000}}))
    assert_refused(plain, "which is not a file of")


# What clears the screen, sets the title, in seven bits and in eight, turns text around, hides it, or begins another line.
OBEYED = "\x1b[2J\x1b]0;t\x07\x9b31m\u202e\u200b\x7f\x00\r\n\u2028\x85"


def odd_manifest(folder: Path) -> None:
    resign(folder, lambda content: content["files"].update({f"{OBEYED}red": [0, 1, "0" * 16]}))


def odd_values_of_a_manifest(folder: Path) -> None:
    def change(content: dict) -> None:
        content["optimizers"][0]["class"] += OBEYED
        content["versions"][OBEYED] = OBEYED
        content["written_at"] = OBEYED

    resign(folder, change)


def odd_parameters(folder: Path) -> None:
    def change(content: dict) -> None:
        name = next(iter(content["shapes"]))
        content["shapes"][name + OBEYED] = content["shapes"].pop(name)

    resign(folder, change)


def odd_tensors(folder: Path) -> None:
    with_header(folder / "model.safetensors", lambda header: header.update({OBEYED: header.pop(list(header)[-1])}))
    resign(folder)


def odd_state(folder: Path) -> None:
    path = folder / "trainer_state.json"
    state = json.loads(path.read_text())
    state["log_history"].append({"step": 4, "loss": OBEYED, f"eval_{OBEYED}": OBEYED})
    path.write_text(json.dumps({**state, "global_step": OBEYED, OBEYED: OBEYED}))
    resign(folder)


def odd_history(folder: Path) -> None:
    path = folder / "trainer_state.json"
    state = json.loads(path.read_text())
    state["log_history"].append({"step": 4, "loss": 1.0, f"eval_{OBEYED}": 1.0, OBEYED: OBEYED})
    path.write_text(json.dumps(state))
    resign(folder)


def odd_config(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "architectures": [OBEYED], "model_type": OBEYED, OBEYED: 1})
    )
    resign(folder)


def odd_run(folder: Path) -> None:
    (folder / "training_run.json").write_text(json.dumps({"arguments": {OBEYED: OBEYED}, "data": {OBEYED: OBEYED}}))
    resign(folder)


def odd_file(folder: Path) -> None:
    (folder / OBEYED.replace("\x00", "")).write_text("x")
    (folder / "zero" / OBEYED.replace("\x00", "")).symlink_to("/etc")


def odd_log(folder: Path) -> None:
    lines = [
        {"kind": "start", "model": OBEYED, "said": {OBEYED: OBEYED}},
        {"kind": "log", "values": {OBEYED: 1.0}},
        {"kind": OBEYED},
    ]
    (folder / "zero_log.jsonl").write_text("\n".join(json.dumps({"time": 1.0, "step": 1, **line}) for line in lines))


def odd_and_good(folder: Path) -> None:
    """All that no command refuses."""
    for change in (odd_values_of_a_manifest, odd_history, odd_run, odd_log):
        change(folder)


ODD = [
    odd_and_good,
    *map(slow, (odd_manifest, odd_parameters, odd_tensors, odd_state, odd_config, odd_file)),
]


@pytest.mark.parametrize("change", ODD)
def test_no_command_prints_what_a_terminal_obeys_out_of_a_folder(change, trained, tmp_path):
    folder = tmp_path / OBEYED.replace("\x00", "") / "checkpoint-4"
    shutil.copytree(trained / "hf" / "checkpoint-4", folder)
    change(folder)
    for words in every_command(folder, tmp_path / "out").values():
        _, said = by_command(*words)
        assert not any(letter in said for letter in OBEYED if not letter.isprintable() and letter != "\n")
        shutil.rmtree(tmp_path / "out", ignore_errors=True)


@pytest.mark.parametrize("kind", [CheckpointError, ConfigError])
def test_an_error_spells_out_what_it_quotes(kind):
    assert str(kind(f"a\n{OBEYED}")).replace("\n", "").isprintable() and str(kind("a\nb")) == "a\nb"


def unreadable(checkpoint: Path) -> None:
    (checkpoint / "zero" / "manifest.json").unlink()
    (checkpoint / "zero" / "manifest.json").symlink_to("manifest.json")


def too_long(checkpoint: Path) -> None:
    resign(checkpoint, lambda content: content["files"].update({"a" * 5000: [0, 1, "0" * 16]}))


class OfAScript:
    """No class that a checkpoint may hold."""


NOT_DAMAGE = [
    MemoryError(),
    PermissionError(13, "Permission denied"),
    ModuleNotFoundError("No module named 'of_a_script'"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory"),
]


@pytest.mark.extra("foreign")
def test_a_file_is_called_damaged_only_for_damage_and_else_the_cause_is_told(checkpoint, monkeypatch):
    # Here: without the extra's folder this file is still collected.
    from hf_zero.foreign.pickles import load_deepspeed_file, load_stream

    def faults() -> list[str]:
        return [fault for fault in resume_faults(checkpoint) if fault.startswith("scheduler.pt ")]

    def by_others() -> Iterator[str]:
        for read in (lambda: load_deepspeed_file(path), lambda: load_stream(path.read_bytes(), path)):
            with pytest.raises(CheckpointError) as raised:
                read()
            yield str(raised.value)

    path = checkpoint / "scheduler.pt"
    content = path.read_bytes()
    for damaged in (content[:-200], b"", b"x" * 100, pickle.dumps({})[:-1]):
        path.write_bytes(damaged)
        said = [*faults(), *by_others()]
        assert len(said) == 3 and all("is cut off or damaged" in each for each in said), said
    torch.save({"schedule": OfAScript()}, path)
    name = f"{__name__}.OfAScript"
    for each in [*faults(), *by_others()]:
        assert f"scheduler.pt needs {name}, which is not loaded" in each and "or damaged" not in each
    path.write_bytes(content)
    assert faults() == []
    for error in NOT_DAMAGE:
        monkeypatch.setattr(torch, "load", Mock(side_effect=error))
        said = [*faults(), *by_others()]
        assert len(said) == 3
        for each in said:
            assert "cannot be read" in each and type(error).__name__ in each and "or damaged" not in each


@pytest.mark.parametrize(
    "damage",
    [
        unreadable,
        too_long,
        lambda checkpoint: (checkpoint / MANIFEST).write_text(NESTED),
        lambda checkpoint: resign(checkpoint, lambda content: content.update(shapes={})),
        lambda checkpoint: shutil.rmtree(checkpoint / "zero") or (checkpoint / "latest").write_text("\x00" * 5000),
    ],
    ids=["a link to itself", "a name too long", "nested", "no shapes", "a tag that is none"],
)
def test_what_cannot_be_read_does_not_keep_a_resume_from_an_earlier_checkpoint(damage, trained, tmp_path):
    for number in (2, 4):
        shutil.copytree(trained / "hf" / f"checkpoint-{number}", tmp_path / f"checkpoint-{number}")
    damage(tmp_path / "checkpoint-4")
    found, [passed] = find_good(tmp_path, "zero", disk=Disk.shared(), exchange=lambda value: [value])
    assert found == tmp_path / "checkpoint-2" and passed.faults


def test_a_disk_that_fails_at_one_checkpoint_does_not_keep_a_resume_from_an_earlier_one(trained, tmp_path, monkeypatch):
    for number in (2, 4):
        shutil.copytree(trained / "hf" / f"checkpoint-{number}", tmp_path / f"checkpoint-{number}")
    read_bytes: Callable = Path.read_bytes

    def failing(path: Path) -> bytes:
        if "checkpoint-4" in path.parts:
            raise OSError(5, "Input/output error")
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", failing)
    found, [passed] = find_good(tmp_path, "zero", disk=Disk.shared(), exchange=lambda value: [value])
    assert found == tmp_path / "checkpoint-2" and "Input/output error" in passed.faults[0]


# ---- anything at all ----


@pytest.mark.parametrize(("layout", "count"), [slow("hf", 10), slow("sharded", 10), ("sharded", 3)])
def test_harmed_checkpoints_are_one_clear_fault_by_every_door(layout, count, trained, tmp_path):
    base = str(trained / layout / "checkpoint-4")
    [wrong] = run_on_ranks(fuzz, world_size=1, base=base, work=str(tmp_path), seeds=range(count), resume_every=5)
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("layout", ["hf", "sharded"])
def test_many_harmed_checkpoints_of_a_layout_are_one_clear_fault_by_every_door(layout, trained, tmp_path):
    base = str(trained / layout / "checkpoint-4")
    [wrong] = run_on_ranks(
        fuzz, world_size=1, time_limit_s=7000, base=base, work=str(tmp_path), seeds=range(1000, 1075), resume_every=1
    )
    assert not wrong, "\n".join(wrong)


# ---- thousands of inputs for each reader, without copies of folders ----

INPUTS = {"manifest": 1000, "header": 2500, "pickle": 500, "yaml": 1500, "flag": 4500}


@pytest.mark.extra("foreign")
def test_ten_thousand_inputs_of_readers_are_read_or_refused():
    [wrong] = run_on_ranks(fuzz_readers, world_size=1, counts=INPUTS, traced_every=20)
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.extra("foreign")
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("reader", READERS)
def test_inputs_that_reach_new_code_are_read_or_refused(reader, request, tmp_path):
    runs = request.config.getoption("fuzz") // len(READERS)
    # Run in a separate process, because atheris ends it. A failing input stays in the folder.
    command = [sys.executable, fuzzed_readers.__file__, reader, str(runs)]
    path = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, errors="replace"
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def fuzz_a_reader_that_allocates(rank: int, world_size: int, numbers: list[int]) -> list[str]:
    """Fuzzes a reader that allocates 4 MB in its calls with these numbers."""
    calls = itertools.count()
    fuzzed_readers.READERS["allocates"] = lambda folder: fuzzed_readers.Reader(
        lambda content: bytearray(2**22 if next(calls) in numbers else 1), [b"seed"], (CheckpointError,)
    )
    return fuzz_readers(rank, world_size, {"allocates": 8})


def test_memory_that_only_one_reading_of_an_input_allocates_is_no_fault_of_the_input():
    assert run_on_ranks(fuzz_a_reader_that_allocates, world_size=1, numbers=[5]) == [[]]
    [wrong] = run_on_ranks(fuzz_a_reader_that_allocates, world_size=1, numbers=[5, 6])
    assert len(wrong) == 1 and wrong[0].startswith("allocates 3: allocates 4")


@pytest.mark.extra("foreign")
@pytest.mark.parametrize("entry", [rb"(?s)(PK\x01\x02.{20})(.{4})", rb"(?s)(PK\x01\x02.{16})(.{8})"])
def test_a_size_in_an_archive_of_tensors_is_no_allocation(entry, tmp_path):
    from hf_zero.foreign.pickles import load_stream

    torch.save({"w": torch.zeros(5)}, tmp_path / "x.pt")
    content = (tmp_path / "x.pt").read_bytes()
    assert load_stream(content, tmp_path / "x.pt")["w"].shape == load_tensors(tmp_path / "x.pt")["w"].shape == (5,)
    # The sizes of each entry in the archive's directory: of the stored bytes, and of the content.
    changed = re.sub(entry, lambda found: found[1] + b"\xff\xff\xff\x7f" * (len(found[2]) // 4), content)
    assert changed != content
    (tmp_path / "x.pt").write_bytes(changed)
    with pytest.raises(ValueError, match="the directory of the archive states"):
        load_tensors(tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="the directory of the archive states"):
        load_stream(changed, tmp_path / "x.pt")


def test_a_length_in_a_pickle_is_no_allocation(tmp_path):
    # A text of 800 MB, in a file of nine bytes that is no archive.
    (tmp_path / "x.pt").write_bytes(b"\x80\x02X\xff\xff\xff\x2ex.")
    tracemalloc.start()
    with pytest.raises(EOFError):
        load_tensors(tmp_path / "x.pt")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20
