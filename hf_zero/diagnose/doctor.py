"""`hf-zero doctor`: checks the environment, limits and links of all ranks."""

import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import yaml

from ..config import ConfigError, ZeroConfig
from .findings import Finding, absent, bad, compiler, devices, disk, good, hint, tensor_parallelism, versions

# ---- Variables and config files that work against hf_zero, or make it slow ----

_YES = ("1", "true", "t", "yes", "y", "on")
_ENGINES = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
}
_KINDS = {"FSDP": "FSDP", "DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM"}
_SECTIONS = {"fsdp_config": "FSDP", "deepspeed_config": "DeepSpeed", "megatron_lm_config": "Megatron-LM"}

_AXES = [f"PARALLELISM_CONFIG_{axis}_SIZE" for axis in ("DP_SHARD", "CP", "TP")]

# Variable → the values that hurt (none listed: any but 0), and why.
_SLOW: dict[str, tuple[tuple[str, ...], str]] = {
    "NCCL_P2P_DISABLE": ((), "GPUs of one host talk through host memory"),
    "NCCL_SHM_DISABLE": ((), "GPUs without peer access talk through the network"),
    "NCCL_IB_DISABLE": ((), "nodes talk over TCP and not over InfiniBand"),
    "NCCL_PROTO": (("LL", "LL128", "Simple"), "one protocol is used for all sizes: LL has half the bandwidth"),
    "NCCL_ALGO": (("Ring", "Tree"), "one algorithm is used for all sizes"),
    "NCCL_DEBUG": (("INFO", "TRACE"), "each collective is logged"),
    "TORCH_DISTRIBUTED_DEBUG": (("DETAIL",), "each collective is preceded by another one that compares it"),
    "CUDA_LAUNCH_BLOCKING": ((), "the host waits for every kernel, so that nothing overlaps"),
    "CUDA_DEVICE_MAX_CONNECTIONS": (("1",), "all streams share one queue, so that collectives wait for kernels"),
    "TORCH_NCCL_BLOCKING_WAIT": ((), "the host waits for every collective, so that nothing overlaps"),
    "NCCL_BLOCKING_WAIT": ((), "the host waits for every collective, so that nothing overlaps"),
}
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def environment() -> Iterator[Finding]:
    """Checks the environment variables and accelerate's default config file."""
    yield from _other_engines()
    yield _default_config()
    yield _cpu()
    yield _ranks()
    yield _own_config()
    yield from _slow_variables()
    yield from _interfaces()


def _other_engines() -> Iterator[Finding]:
    asked = [variable for variable in _ENGINES if os.environ.get(variable, "").lower() in _YES]
    for variable in asked:
        advice = f"Two engines cannot own one model: unset {variable} (a flag or config file of accelerate sets it)."
        yield bad("another engine", f"{variable} asks for {_ENGINES[variable]}", advice)
    sizes = {variable: os.environ.get(variable, "") for variable in _AXES}
    if os.environ.get("PARALLELISM_CONFIG_SP_SIZE", "1") != "1":
        # accelerate counts so the ranks beside those of a sequence, over all of which state is sharded.
        sizes.pop("PARALLELISM_CONFIG_DP_SHARD_SIZE")
    split = {variable: size for variable, size in sizes.items() if size not in ("", "1")}
    if split and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() in _YES:
        asked += split
        advice = (
            "accelerate would split the model or its batches in a way of its own: leave --use_parallelism_config out. "
            "ZeroPlugin(tp_size=...) is of models that tensor parallelism has split."
        )
        yield bad("another engine", ", ".join(f"{variable} is {size}" for variable, size in split.items()), advice)
    if not asked:
        yield good("another engine", "none is asked for by accelerate's variables")


def default_config_file() -> Path:
    """Returns the file that `accelerate launch` reads without --config_file."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    home = Path(os.environ.get("HF_HOME") or caches / "huggingface").expanduser()
    yaml_file, json_file = (home / "accelerate" / f"default_config.{kind}" for kind in ("yaml", "json"))
    return json_file if json_file.exists() and not yaml_file.exists() else yaml_file


def _default_config() -> Finding:
    subject, path = "accelerate's default config", default_config_file()
    if not path.exists():
        return absent(subject, f"none ({path})")
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        return bad(
            subject, f"{path} cannot be read: {error}", "Write it anew with `accelerate config`, or move it away."
        )
    settings: Mapping = found if isinstance(found, Mapping) else {}
    kind = str(settings.get("distributed_type", "NO"))
    engine = _KINDS.get(kind) or next((name for key, name in _SECTIONS.items() if settings.get(key)), None)
    if engine is not None:
        advice = (
            "Every `accelerate launch` takes it: pass --config_file with one of hf_zero's, or `accelerate config` anew."
        )
        return bad(subject, f"{path} turns {engine} on", advice)
    if settings.get("use_cpu") and torch.cuda.is_available():
        return bad(subject, f"{path} has use_cpu: true", "The GPUs are left idle: set it to false.")
    count = settings.get("num_processes")
    if isinstance(count, int) and torch.cuda.is_available() and count > torch.cuda.device_count() * _machines(settings):
        advice = "Set num_processes to the number of GPUs, or pass --num_processes."
        return bad(
            subject, f"{path} asks for {count} processes, and there are {torch.cuda.device_count()} GPUs", advice
        )
    return good(subject, f"{path}: {kind}, {count} processes")


def _machines(settings: Mapping) -> int:
    count = settings.get("num_machines", 1)
    return count if isinstance(count, int) and count > 0 else 1


def _cpu() -> Finding:
    asks = os.environ.get("ACCELERATE_USE_CPU", "").lower() in _YES
    if torch.cuda.is_available():
        if asks:
            return bad(
                "training on the CPU", "ACCELERATE_USE_CPU is set and there are GPUs", "unset ACCELERATE_USE_CPU"
            )
        return good("training on the CPU", "not asked for")
    if asks:
        return good("training on the CPU", "ACCELERATE_USE_CPU is set")
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        advice = "Without it accelerate tells each rank that it is alone: export ACCELERATE_USE_CPU=true."
        return bad(
            "training on the CPU", f"WORLD_SIZE is {os.environ['WORLD_SIZE']} without ACCELERATE_USE_CPU", advice
        )
    advice = (
        "Several ranks on the CPU find each other only with ACCELERATE_USE_CPU=true, started by torchrun or `accelerate launch "
        "--multi_gpu`; `accelerate launch --cpu --num_processes N` starts one process."
    )
    return hint("training on the CPU", "no GPU, and ACCELERATE_USE_CPU is not set", advice)


def _ranks() -> Finding:
    found = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if os.environ.get(name)}
    if "RANK" in found or found.get("WORLD_SIZE", "1") != "1":
        if len(found) < 3:
            advice = "Left over from a launcher: unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT."
            return bad("variables of a launcher", ", ".join(f"{name}={value}" for name, value in found.items()), advice)
        return good(
            "variables of a launcher", f"rank {found['RANK']} of {found['WORLD_SIZE']} at {found['MASTER_ADDR']}"
        )
    return good("variables of a launcher", "none are left over")


def _own_config() -> Finding:
    value = os.environ.get("HF_ZERO_CONFIG", "")
    if not value:
        return absent("HF_ZERO_CONFIG", "not set")
    try:
        config = ZeroConfig.of(value, "HF_ZERO_CONFIG")
    except (ConfigError, OSError) as error:
        return bad(
            "HF_ZERO_CONFIG",
            f"{value!r}: {error}",
            "Set it to a stage or to a YAML file that is there, or unset it.",
        )
    return good("HF_ZERO_CONFIG", f"{value}: stage {config.stage}")


def _slow_variables() -> Iterator[Finding]:
    found = 0
    for variable, (values, why) in _SLOW.items():
        value = os.environ.get(variable, "")
        hurts = (
            value.upper() in map(str.upper, values) if values else value.lower() not in ("", "0", "false", "n", "no")
        )
        if hurts:
            found += 1
            yield bad(variable, value, f"{why[0].upper()}{why[1:]}: unset {variable} unless this machine needs it.")
    if not found:
        yield good("variables that slow collectives", "none are set")


def _interfaces() -> Iterator[Finding]:
    there = [name for _, name in socket.if_nameindex()]
    for variable in _INTERFACES:
        value = os.environ.get(variable, "")
        # "=eth0" is that one, "^docker" all but those, "eth" all that begin so.
        if not value or value.startswith("^"):
            continue
        wanted = [name.strip() for name in value.removeprefix("=").split(",")]
        if not any(name.startswith(each) for each in wanted for name in there):
            advice = f"Ranks would not find each other: choose from {', '.join(there)}, or unset {variable}."
            yield bad(variable, f"{value}: there is no such network interface", advice)
        else:
            yield good(variable, value)


# ---- Limits of the system that training runs into: shared memory, locked memory, open files, the host's own name ----

_LEAST_SHM = 256 * 2**20
_LEAST_FILES = 1024
_LOCKED_FOR_OFFLOAD = 2**30


def limits() -> Iterator[Finding]:
    yield shared_memory("/dev/shm")
    yield _open_files()
    yield _locked_memory()
    yield _own_name()


def shared_memory(path: str) -> Finding:
    """Free bytes where workers of a DataLoader, and NCCL, share memory."""
    if not os.path.isdir(path):
        return hint(path, "not there", "DataLoader workers and NCCL share memory there: mount a tmpfs.")
    state = os.statvfs(path)
    free = state.f_bavail * state.f_frsize
    if free < _LEAST_SHM:
        advice = (
            "DataLoader workers and NCCL end with bus errors when it is full: docker run --shm-size=8g, or --ipc=host."
        )
        return bad(path, f"{free / 2**20:.0f} MiB free", advice)
    return good(path, f"{free / 2**30:.1f} GiB free")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _LEAST_FILES:
        advice = f"Ranks, workers and files of shards need more: ulimit -n {max(_LEAST_FILES, min(hard, 65536))}."
        return bad("open files", f"{soft}", advice)
    return good("open files", "unlimited" if soft == resource.RLIM_INFINITY else str(soft))


def _locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return good("locked memory", "unlimited")
    said = f"{soft / 2**20:.0f} MiB"
    if soft < _LOCKED_FOR_OFFLOAD and torch.cuda.is_available():
        advice = (
            "Offload and InfiniBand lock memory: ulimit -l unlimited, also for the container (--ulimit memlock=-1)."
        )
        return hint("locked memory", said, advice)
    return good("locked memory", said)


def _own_name() -> Finding:
    name = socket.gethostname()
    try:
        return good("host name", f"{name} is {socket.gethostbyname(name)}")
    except OSError as error:
        advice = (
            "gloo looks its own address up by this name: add it to /etc/hosts, or set GLOO_SOCKET_IFNAME=lo (one host)."
        )
        return bad("host name", f"{name} has no address: {error}", advice)


# ---- Links between local ranks, measured, and a probe of each collective that the engine uses ----

_PATIENCE_S = 120.0
_SLOWER = 0.5
"""Bytes a second inside a copy of the model to those between copies: below, ranks are badly placed."""
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def links(processes: int | None, tp_size: int = 1) -> Iterator[Finding]:
    """Starts ranks: one a GPU with NCCL where there are several GPUs, else on the CPU with gloo.

    Args:
        processes: how many; None is as many as GPUs, or two copies of the model.
        tp_size: ranks that hold one copy of the model together. Links inside a copy and between copies are measured apart.

    Raises:
        ConfigError: `tp_size` does not divide the ranks.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    count = processes or (gpus if gpus > 1 else 2 * tp_size)
    if count % tp_size:
        raise ConfigError(f"hf_zero: tp_size is {tp_size}, which does not divide the {count} ranks of the links.")
    backend = "nccl" if gpus >= count > 1 else "gloo"
    where = f"{count} ranks, {backend}" + ("" if backend == "nccl" else " on the CPU")
    with tempfile.TemporaryDirectory(prefix="hf-zero-doctor-") as folder:
        error = _run(Path(folder), count, backend, tp_size)
        result = Path(folder, "found.json")
        if error is not None or not result.exists():
            advice = (
                "Ranks on this machine cannot talk to each other: a firewall, GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME."
            )
            yield bad(f"links ({where})", error or "the ranks brought no result", advice)
            return
        found = json.loads(result.read_text())
    if found["dp"] is not None:
        yield from _speeds(found["dp"], where if tp_size == 1 else f"between copies, {where}")
    if found["tp"] is not None:
        yield from _speeds(found["tp"], f"inside a copy of {tp_size}, {where}")
    yield from placement(found["tp"], found["dp"])
    if found["wrong"]:
        advice = "Values arrive wrong: broken memory or drivers, or a NCCL with a known fault. Do not train here."
        yield bad("the engine's collectives", f"wrong results: {', '.join(found['wrong'])}", advice)
    elif found["dp"] is None:
        yield absent("the engine's collectives", "one copy of the model, which sends nothing to others")
    else:
        yield good("the engine's collectives", "reduce-scatter, all-gather, all-to-all, broadcast, agreements: right")


def _speeds(of: dict[str, float], where: str) -> Iterator[Finding]:
    yield good(f"all-reduce ({where})", f"{of['all_reduce_gb']:.2f} GB/s, latency {of['all_reduce_us']:,.0f} us")
    yield good(f"all-gather ({where})", f"{of['all_gather_gb']:.2f} GB/s, latency {of['all_gather_us']:,.0f} us")


def placement(inside: dict[str, float] | None, between: dict[str, float] | None) -> Iterator[Finding]:
    """Whether the ranks of a copy, which wait for each other in every layer, have the faster links."""
    if inside is None or between is None:
        return
    subject, ratio = "tensor parallel ranks", inside["all_reduce_gb"] / between["all_reduce_gb"]
    value = f"all-reduce inside a copy has {ratio:.1f} times the bytes a second of that between copies"
    if ratio < _SLOWER:
        advice = "Order the GPUs by CUDA_VISIBLE_DEVICES so that those of a copy are neighbours on the fastest links."
        yield hint(subject, value, advice)
    else:
        yield good(subject, value)


def _run(folder: Path, count: int, backend: str, tp_size: int) -> str | None:
    """Runs the ranks to their end; returns the last line of a failed one."""
    environment = {name: value for name, value in os.environ.items() if name not in (*_LAUNCHERS, "HF_ZERO_CONFIG")}
    command = [sys.executable, "-m", "hf_zero.diagnose.link_ranks", str(folder)]
    said = [folder / f"said{rank}" for rank in range(count)]
    ranks = []
    for rank in range(count):
        with said[rank].open("w") as output:
            words = [*command, str(rank), str(count), backend, str(tp_size)]
            ranks.append(subprocess.Popen(words, stdout=output, stderr=output, env=environment))
    deadline_s = time.monotonic() + _PATIENCE_S
    try:
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline_s:
            if any(rank.poll() for rank in ranks):
                break
            time.sleep(0.05)
        failed = next((index for index, rank in enumerate(ranks) if rank.poll()), None)
        if failed is not None:
            lines = said[failed].read_text().strip().splitlines()
            return f"rank {failed}: {lines[-1] if lines else f'exit code {ranks[failed].returncode}'}"
        late = [index for index, rank in enumerate(ranks) if rank.poll() is None]
        return f"ranks {late} have not ended after {_PATIENCE_S:.0f} s" if late else None
    finally:
        for process in ranks:
            process.kill()
            process.wait()


# ---- Looks at this machine and its settings, and says what would keep training from working or make it slow ----


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The doctor's findings, in the order of the checks."""

    findings: tuple[Finding, ...]

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong; hints are no faults."""
        return not self.faults

    @property
    def faults(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.status == "bad"]

    def to_json(self) -> str:
        """Returns one document: whether all is good, and the findings."""
        return json.dumps({"good": self.is_good, "findings": [asdict(finding) for finding in self.findings]}, indent=2)


def doctor(
    folder: str | Path = ".", processes: int | None = None, *, tp_size: int = 1, measure: bool = True
) -> Diagnosis:
    """Checks versions, devices, limits, conflicting settings, the disk's speed, and the links between ranks that it starts.

    Call this function in one process, not on each rank.

    Args:
        folder: whose disk is measured; checkpoints or offloaded state are to be written there.
        processes: ranks to start for the links; by default one a GPU, or two copies of the model.
        tp_size: ranks that will hold one copy of the model together, as `parallel_config` loads it.
        measure: False leaves the disk and the links out, which take seconds.

    Raises:
        ConfigError: `tp_size` does not divide the ranks.
    """
    return Diagnosis(findings=tuple(_look(Path(folder), processes, tp_size, measure)))


def _look(folder: Path, processes: int | None, tp_size: int, measure: bool) -> Iterator[Finding]:
    yield from versions()
    yield from compiler()
    yield from devices()
    yield from limits()
    yield from environment()
    if tp_size > 1:
        yield from tensor_parallelism(tp_size)
    if measure:
        yield from disk(folder)
        yield from links(processes, tp_size)
