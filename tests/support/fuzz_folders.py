"""Random harm to a checkpoint, by a seed, and every door that a harmed one is taken through."""

import json
import os
import pickle
import random
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hostile_folders import by_command, commands, resign, with_header
from trainer_job import as_launched, make_trainer

from hf_zero.checkpoint.commit import Disk
from hf_zero.checkpoint.files import files_below
from hf_zero.integrations import config_model
from hf_zero.integrations.resume import resume_faults
from hf_zero.integrations.verify import find_good

SECRET = "nobody's business, 4711"
MOST_S = 60.0
MOST_BYTES = 3 * 2**30

VALUES = [
    *(None, True, -1, 0, 1, 1.5, 7, 2**31, 2**63, 10**30, 10**400, float("nan"), float("inf"), -0.0),
    *(
        "",
        "x",
        "F64",
        "U8",
        "float16",
        "\ud800",
        "a" * 300,
        "a" * 5000,
        "../secret",
        "/etc/hostname",
        "\x00",
        "\x1b[31m",
    ),
    *("[/red]", "zero", "model.safetensors", "load", "Trainer", [], {}, [[]], [None], {"a": 1}, [1, 2, 3], ["Trainer"]),
    *({"dtype": "F32"}, {"dtype": "load", "value": 1}, list(range(1000)), [0] * 7, "9" * 400),
]
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
        place = content
        while isinstance(place, dict | list) and place:
            keys = list(place) if isinstance(place, dict) else range(len(place))
            key = target.rng.choice(keys)
            if not isinstance(place[key], dict | list) or not place[key] or target.rng.random() < 0.4:
                break
            place = place[key]
        else:
            continue
        change = target.rng.random()
        if change < 0.7:
            place[key] = target.rng.choice(VALUES)
        elif change < 0.85:
            del place[key]
        elif isinstance(place, dict):
            place[str(target.rng.choice(VALUES))] = place[key]
        else:
            place.append(place[key])
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
            if not is_taken(door)
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
