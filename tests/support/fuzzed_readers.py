"""Mutated inputs for readers. For any input, a reader has to return or raise an error of ours.

A reader must not open a file outside of its folder, and its memory use must not depend on a number in the input.

    python tests/support/fuzzed_readers.py manifest 100000     # guided by coverage if atheris is installed
"""

import argparse
import contextlib
import io
import itertools
import json
import os
import pickle
import random
import sys
import tempfile
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import xxhash

ROOT = Path(__file__).resolve().parents[2]
MOST_S = 20.0
MOST_BYTES = 8192
"""Size limit of an input, so an allocation by a number in the input is clearly visible."""

SLACK_BYTES = 2 * 2**20
"""Allowed in addition to twice the input: Python's objects for a JSON value are larger than its text."""
SLACK_MAPPED_BYTES = 256 * 2**20
"""Allowed growth of all mapped memory of the process, which includes torch's allocations."""

NUMBERS = [0, 1, -1, 7, 127, 128, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**61, 2**62, 2**63 - 1, 2**63, 2**64, 10**30]
VALUES: list[Any] = [
    *(None, True, 1.5, 10**400, float("nan"), float("inf"), -0.0, *NUMBERS),
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


def edit_json(content: Any, rng: random.Random) -> None:
    """Replaces, removes, renames or repeats one value somewhere in a JSON value."""
    place = content
    while isinstance(place, dict | list) and place:
        keys = list(place) if isinstance(place, dict) else range(len(place))
        key = rng.choice(keys)
        if not isinstance(place[key], dict | list) or not place[key] or rng.random() < 0.4:
            break
        place = place[key]
    else:
        return
    change = rng.random()
    if change < 0.7:
        place[key] = rng.choice(VALUES)
    elif change < 0.85:
        del place[key]
    elif isinstance(place, dict):
        place[str(rng.choice(VALUES))] = place[key]
    else:
        place.append(place[key])


def edit_bytes(content: bytes, rng: random.Random, other: bytes) -> bytes:
    """Flips, overwrites, removes, repeats and inserts bytes, also from another input."""
    edited = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 4, 8])):
        at = rng.randrange(len(edited) + 1)
        length = rng.choice([1, 1, 2, 4, 8, 40])
        match rng.randrange(6):
            case 0 if at < len(edited):
                edited[at] ^= 1 << rng.randrange(8)
            case 1:
                edited[at : at + 4] = (rng.choice(NUMBERS) % 2**32).to_bytes(4, rng.choice(["little", "big"]))
            case 2:
                del edited[at : at + length]
            case 3:
                edited[at:at] = edited[at : at + length]
            case 4:
                begin = rng.randrange(len(other) + 1)
                edited[at : at + rng.choice([0, length])] = other[begin : begin + length]
            case _:
                edited[at:at] = rng.choice([b"\x00", b"[", b"{", b'"', b"-", b"9" * 30, b"\xff", b"..", b"\n", b": "])
    return bytes(edited[:MOST_BYTES])


# ---- Supervision of a reader ----

_WITH_PATHS = ("open", "os.", "shutil.", "glob.", "tempfile.", "pathlib.")
_STARTS = ("subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.putenv", "socket.", "ctypes.dlopen")
_OF_IMPORTS = (".py", ".pyc", ".so", ".pth")


class Watch:
    """Lists files opened and processes started outside of a folder. Python cannot remove an audit hook."""

    def __init__(self, folder: Path):
        self._folder = os.path.realpath(folder)
        self._places = tuple(os.path.realpath(path) for path in [*sys.path, sys.prefix, sys.base_prefix] if path)
        self._is_on = False
        self.named = ""
        self.seen: list[str] = []
        sys.addaudithook(self._note)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def _note(self, event: str, arguments: tuple) -> None:
        if not self._is_on:
            return
        if event.startswith(_STARTS) or event == "pickle.find_class":
            self.seen.append(f"{event} {arguments}")
        elif event.startswith(_WITH_PATHS):
            self.seen += [
                f"{event} {path!r}"
                for path in arguments[:2]
                if isinstance(path, str | bytes | os.PathLike)
                and path not in ("r", "rb")
                and not self._is_allowed(path)
            ]

    def _is_allowed(self, path: Any) -> bool:
        text = os.fsdecode(path)
        if text == self.named:
            return True
        whole = os.path.abspath(text)
        if (whole + os.sep).startswith(self._folder + os.sep):
            return True
        # Allow modules imported during a reader's first call.
        return whole.startswith(self._places) and (whole.endswith(_OF_IMPORTS) or not os.path.isfile(whole))


def _mapped_bytes() -> int:
    """Returns the peak of this process's mapped memory."""
    if sys.platform != "linux":
        return 0
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmPeak:"))


# ---- The readers ----


@dataclass(frozen=True)
class Reader:
    """A reader of files or text, with accepted inputs.

    Attributes:
        read: returns, or raises one of `errors`.
        seeds: the first inputs.
        is_json: inputs are also mutated value by value.
        sign: corrects the checksum of a mutated input.
    """

    read: Callable[[bytes], object]
    seeds: list[bytes]
    errors: tuple[type[Exception], ...]
    is_json: bool = False
    sign: Callable[[bytes], bytes] = field(default=lambda content: content)

    def mutated(self, content: bytes, rng: random.Random) -> bytes:
        if self.is_json and rng.random() < 0.7:
            head, text = self._split(content)
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(text)
                for _ in range(rng.choice([1, 1, 2, 3])):
                    edit_json(value, rng)
                text = json.dumps(value).encode()
                return ((len(text).to_bytes(8, "little") + text + content[len(head) + 8 :]) if head else text)[
                    :MOST_BYTES
                ]
        return edit_bytes(content, rng, rng.choice(self.seeds))

    @staticmethod
    def _split(content: bytes) -> tuple[bytes, bytes]:
        """Splits off the length before a safetensors header, if there is one, from the JSON text."""
        length = int.from_bytes(content[:8], "little")
        return (content[:8], content[8 : 8 + length]) if length < MOST_BYTES else (b"", content)


def signed(content: bytes) -> bytes:
    """Gives a manifest a correct checksum and the spelling of a written one; returns anything else unchanged."""
    try:
        value = json.loads(content)
        value.pop("xxh3", None)
        digest = xxhash.xxh3_64_hexdigest(json.dumps(value, sort_keys=True).encode())
        return json.dumps({**value, "xxh3": digest}, indent=1).encode()
    except (ValueError, RecursionError, AttributeError, TypeError):
        return content


def manifests(folder: Path) -> Reader:
    from hostile_folders import list_rows

    from hf_zero.checkpoint.faults import CheckpointError
    from hf_zero.checkpoint.hashes import CHUNK_BYTES, FileRecord
    from hf_zero.checkpoint.live_pieces import write_all
    from hf_zero.checkpoint.manifest import Manifest, SavedWeight
    from hf_zero.checkpoint.own_chunks import own_chunks
    from hf_zero.checkpoint.reader import CheckpointReader
    from hf_zero.checkpoint.rows import plan_rows
    from hf_zero.checkpoint.structure import structure_faults
    from hf_zero.layout.boxes import Box
    from hf_zero.layout.intervals import Interval

    zero = folder / "zero"

    def save(boxes: bool) -> bytes:
        shape = (6, 4)
        merged: list = []

        def merge(value):
            merged.append(merged[-1].merged(value) if merged else value)
            return merged[-1]

        planned = []
        for rank in range(3):
            part = Interval(0, 8) if boxes else Interval(8 * rank, 8 * rank + 8)
            rows = [(kind, "w", part, torch.zeros(8)) for kind in ("master", "weights")]
            rows += [("residual.*", "v", Interval(6 * rank, 6 * rank + 6), torch.zeros(6, dtype=torch.bfloat16))]
            rows += [("row_factor", "v", Interval(0, 3), torch.zeros(3))] if rank == 1 else []
            planned += [
                plan_rows(
                    zero,
                    rank=rank,
                    world_size=3,
                    stage=2,
                    save="0" * 32,
                    rows=rows,
                    shapes={"w": shape, "v": (3, 2)},
                    scalars={name: {"step": torch.tensor(2.0)} for name in "wv"},
                    optimizers=lambda: [{"class": "A", "groups": [{"settings": {"lr": 1}, "parameters": ["w", "v"]}]}],
                    merge=merge,
                    own_shapes={"v": {"residual.*": (3, 3, 2)} | ({"row_factor": (3,)} if rank == 1 else {})},
                    boxes={"w": Box.whole(shape).split(0, 3, rank)} if boxes else {},
                )
            ]
            write_all(planned[-1][1])
        manifest = planned[-1][0]
        records = {
            path.relative_to(folder).as_posix(): FileRecord(
                size=path.stat().st_size, chunk_bytes=CHUNK_BYTES, xxh3=("0" * 16,)
            )
            for path in zero.glob("rank-*")
        }
        written = {"w": SavedWeight(dtype="F32", shape=shape)}
        replace(manifest, files=records, weights=written, step=4).write(zero)
        return (zero / "manifest.json").read_bytes()

    def read(content: bytes) -> None:
        (zero / "manifest.json").write_bytes(content)
        manifest = Manifest.read(zero)
        own_chunks(folder, manifest, rank=1, world_size=3)
        # Like all callers, read values only from a checkpoint without faults.
        if not structure_faults(folder, "zero", manifest):
            with CheckpointReader(zero) as reader:
                for name in manifest.kinds:
                    reader.scalars_of(name)
                    for kind in reader.kinds_of(name):
                        reader.read(kind, name, Interval(0, torch.Size(manifest.shapes[name]).numel()))

    seeds = [save(boxes) for boxes in (True, False)]
    listed = json.loads(seeds[-1])
    # Without the names that residuals had in this format, because the files have the names of today.
    list_rows(listed, by_number=False)
    return Reader(read, [*seeds, signed(json.dumps(listed).encode())], (CheckpointError,), is_json=True, sign=signed)


def headers(folder: Path) -> Reader:
    from safetensors.torch import save

    from hf_zero.checkpoint.faults import CheckpointError
    from hf_zero.checkpoint.mapped_tensors import mapped_tensors
    from hf_zero.checkpoint.safetensors_headers import is_whole_safetensors, save_in, spans_in, tensors_in

    path = folder / "x.safetensors"

    def read(content: bytes) -> None:
        path.write_bytes(content)
        for ask in (is_whole_safetensors, spans_in, tensors_in, save_in):
            ask(path)
        for tensor in mapped_tensors(path).values():
            tensor.sum()

    tensors = {
        "a/w": torch.zeros(5),
        "b": torch.zeros(2, 3, dtype=torch.int8),
        "c": torch.zeros(0, dtype=torch.bfloat16),
    }
    seeds = [save(tensors, {"save": "0" * 32}), save({"w": torch.zeros(2, 2, dtype=torch.bool)}), save({})]
    return Reader(read, seeds, (CheckpointError,), is_json=True)


def pickles(folder: Path) -> Reader:
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    from hf_zero.checkpoint.faults import CheckpointError
    from hf_zero.foreign.pickles import load_dcp_metadata, load_deepspeed_file, load_stream

    path = folder / "x.pt"

    def read(content: bytes) -> None:
        path.write_bytes(content)
        faults = []
        for load in (load_dcp_metadata, load_deepspeed_file, lambda path: load_stream(content, path)):
            try:
                load(path)
            except CheckpointError as error:
                faults.append(error)
        for fault in faults:
            raise fault

    chunk = dcp.ChunkStorageMetadata(offsets=torch.Size([0, 0]), sizes=torch.Size([2, 3]))
    properties = dcp.TensorProperties(dtype=torch.float32)
    described = dcp.Metadata(
        state_dict_metadata={
            "w": dcp.TensorStorageMetadata(properties=properties, size=torch.Size([2, 3]), chunks=[chunk]),
            "step": dcp.BytesStorageMetadata(),
        },
        planner_data={"w": ("state", "w")},
        storage_data={dcp.MetadataIndex("w", torch.Size([0, 0])): _StorageInfo("__0_0.distcp", 0, 100)},
    )
    stream, old = io.BytesIO(), io.BytesIO()
    torch.save({"w": torch.zeros(2, 3), "n": [1, 2.0, "x", None]}, stream)
    torch.save({"w": torch.zeros(2, 3)}, old, _use_new_zipfile_serialization=False)
    saved = ROOT / "tests/support/deepspeed_files/stage1-3ranks/global_step3/mp_rank_00_model_states.pt"
    seeds = [pickle.dumps(described, protocol=4), stream.getvalue(), old.getvalue(), saved.read_bytes()]
    return Reader(read, seeds, (CheckpointError,))


def yamls(folder: Path) -> Reader:
    from hf_zero.config import ConfigError, ZeroConfig

    path = folder / "zero.yaml"

    def read(content: bytes) -> None:
        path.write_bytes(content)
        _back(ZeroConfig.of(path))

    seeds = [each.read_bytes() for each in sorted((ROOT / "configs").glob("zero*.yaml"))]
    seeds += [b"stage: 2\ncomm: &a {timeout_s: 1}\noffload: {<<: *a}", b"stage: [2, {a: b}]\n? x\n: !!int '2'"]
    return Reader(read, seeds, (ConfigError,))


def flags(folder: Path) -> Reader:
    from hf_zero.config import ConfigError, ZeroConfig

    def read(content: bytes) -> None:
        _back(ZeroConfig.of(os.fsdecode(content)))

    seeds = [
        b"2",
        b"stage=3,offload.params=cpu,comm.timeout_s=60",
        b"stage=2,unit_modules=[A,B]",
        b'{"stage": 2}',
        b"auto",
    ]
    return Reader(read, seeds, (ConfigError,))


def _back(config: Any) -> None:
    """Asserts that plain JSON can store a valid config."""
    assert type(config).from_dict(json.loads(json.dumps(config.to_dict(), allow_nan=False))) == config


READERS = {"manifest": manifests, "header": headers, "pickle": pickles, "yaml": yamls, "flag": flags}


class Fuzz:
    """Gives inputs to a reader and lists its violations."""

    def __init__(self, name: str, folder: Path):
        warnings.simplefilter("ignore")
        self.reader = READERS[name](folder)
        self._watch = Watch(folder)
        self._names_its_file = name == "flag"
        os.chdir(folder)
        # Imports and caches of a reader's first call do not count for an input.
        for seed in self.reader.seeds:
            for content in (seed, seed[: len(seed) // 2]):
                with contextlib.suppress(*self.reader.errors):
                    self.reader.read(content)

    def faults(self, content: bytes, *, traced: bool = True) -> list[str]:
        """Returns the reader's violations for an input."""
        content = self.reader.sign(content)
        self._watch.seen.clear()
        self._watch.named = os.fsdecode(content) if self._names_its_file else ""
        began_s = time.process_time()
        faults = self._read(content)[0] if not traced else self._read_traced(content)
        seconds = time.process_time() - began_s
        if seconds > MOST_S:
            faults.append(f"takes {seconds:.0f} s")
        return faults + self._watch.seen

    def _read_traced(self, content: bytes) -> list[str]:
        """Returns the violations, including those of memory."""
        # Not since the first input: over a million inputs the process itself grows by more than the limit.
        before = _mapped_bytes()
        faults, peak = self._read(content, is_traced=True)
        if peak > 2 * len(content) + SLACK_BYTES:
            # CPython rebuilds its table of interned strings, 3.8 MB, after about every 100,000 new ones, and pathlib interns the
            # parts of each path. A second reading allocates only what this input causes.
            peak = min(peak, self._read(content, is_traced=True)[1])
        if peak > 2 * len(content) + SLACK_BYTES:
            faults.append(f"allocates {peak} bytes for an input of {len(content)}")
        mapped = _mapped_bytes()
        if mapped > before + SLACK_MAPPED_BYTES:
            faults.append(f"maps {mapped - before} bytes more")
        return faults

    def _read(self, content: bytes, *, is_traced: bool = False) -> tuple[list[str], int]:
        """Returns the violations in errors, and the peak of memory that Python allocated, if this is traced."""
        faults: list[str] = []
        # Do not stop and start the tracing for each input: CPython frees only part of its tables, and over a million pickles the
        # process would grow by 5 GB.
        if is_traced != tracemalloc.is_tracing():
            (tracemalloc.start if is_traced else tracemalloc.stop)()
        tracemalloc.reset_peak()
        held_bytes = tracemalloc.get_traced_memory()[0]
        try:
            with self._watch.on():
                self.reader.read(content)
        except self.reader.errors as error:
            cause: BaseException | None = error
            while cause is not None:
                if isinstance(cause, MemoryError) or "allocate memory" in str(cause):
                    faults.append(f"allocates what there is not: {cause}")
                cause = cause.__cause__
            if not str(error).startswith(("hf_zero", "rank")) or len(str(error)) > 5000:
                faults.append(f"says {str(error)[:300]!r}")
        except Exception as error:
            faults.append(f"{type(error).__name__}: {str(error)[:300]}")
        return faults, tracemalloc.get_traced_memory()[1] - held_bytes

    def inputs(self, count: int, seed: int) -> Iterator[bytes]:
        """Yields mutations of the seeds and of some earlier inputs."""
        rng = random.Random(seed)
        pool = list(self.reader.seeds)
        for _ in range(count):
            content = self.reader.mutated(rng.choice(pool), rng)
            yield content
            # Mutating a mutated input leads to inputs with more than one fault.
            pool[len(self.reader.seeds) :] = [*pool[len(self.reader.seeds) :], content][-8:]


def fuzz_readers(rank: int, world_size: int, counts: dict[str, int], traced_every: int = 1, seed: int = 0) -> list[str]:
    """Returns the violations in words, each with its input. Call it in a separate process."""
    wrong = []
    for name, count in counts.items():
        with tempfile.TemporaryDirectory() as folder:
            fuzz = Fuzz(name, Path(folder))
            for number, content in enumerate(fuzz.inputs(count, seed)):
                faults = fuzz.faults(content, traced=number % traced_every == 0)
                wrong += [f"{name} {number}: {fault} by {content!r}" for fault in faults]
                if len(wrong) > 20:
                    break
            os.chdir("/")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reader", choices=READERS)
    parser.add_argument("runs", type=int)
    parser.add_argument(
        "--traced-every", type=int, default=1, help="measure the memory of one input in so many (default: all)"
    )
    options = parser.parse_args()
    if not find_spec("atheris"):
        runs = {options.reader: options.runs}
        wrong = fuzz_readers(0, 1, runs, traced_every=options.traced_every, seed=random.randrange(2**32))
        sys.exit("\n".join(wrong) or 0)
    import atheris

    with atheris.instrument_imports(
        include=["hf_zero.checkpoint", "hf_zero.config", "hf_zero.foreign", "hf_zero.layout"]
    ):
        with tempfile.TemporaryDirectory() as folder:
            READERS[options.reader](Path(folder))
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as corpus:
        fuzz = Fuzz(options.reader, Path(folder))
        for number, seed in enumerate(fuzz.reader.seeds):
            (Path(corpus) / str(number)).write_bytes(seed)

        numbers = itertools.count()

        def test(content: bytes) -> None:
            faults = fuzz.faults(content, traced=next(numbers) % options.traced_every == 0)
            assert not faults, faults

        def mutate(content: bytes, most_bytes: int, seed: int) -> bytes:
            rng = random.Random(seed)
            return atheris.Mutate(content, most_bytes) if rng.random() < 0.3 else fuzz.reader.mutated(content, rng)

        limits = [f"-runs={options.runs}", f"-max_len={MOST_BYTES}", "-timeout=60", "-rss_limit_mb=4096"]
        atheris.Setup([sys.argv[0], corpus, *limits, f"-artifact_prefix={Path.cwd()}/"], test, custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
