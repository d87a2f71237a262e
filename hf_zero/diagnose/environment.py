"""Checks of environment variables and config files for conflicts with hf_zero and for slow settings."""

import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import yaml

from ..config import ConfigError, ZeroConfig
from .finding import Finding, absent, bad, good, hint

_YES = ("1", "true", "t", "yes", "y", "on")
_ENGINES = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
}
_KINDS = {"FSDP": "FSDP", "DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM"}
_SECTIONS = {"fsdp_config": "FSDP", "deepspeed_config": "DeepSpeed", "megatron_lm_config": "Megatron-LM"}

_AXES = [f"PARALLELISM_CONFIG_{axis}_SIZE" for axis in ("DP_SHARD", "CP", "TP")]

# For each variable, the values that slow training down, and the reason. Without values, all values but 0 count.
_SLOW: dict[str, tuple[tuple[str, ...], str]] = {
    "NCCL_P2P_DISABLE": ((), "GPUs of one host talk through host memory"),
    "NCCL_SHM_DISABLE": ((), "GPUs without peer access talk through the network"),
    "NCCL_IB_DISABLE": ((), "nodes talk over TCP and not over InfiniBand"),
    "NCCL_PROTO": (("LL", "LL128", "Simple"), "one protocol is used for all sizes: LL has half the bandwidth"),
    "NCCL_ALGO": (("Ring", "Tree"), "one algorithm is used for all sizes"),
    "NCCL_DEBUG": (("INFO", "TRACE"), "each collective is logged"),
    "TORCH_DISTRIBUTED_DEBUG": (
        ("DETAIL",),
        "each collective is preceded by a second one that compares the ranks' calls",
    ),
    "CUDA_LAUNCH_BLOCKING": ((), "the host waits for every kernel, so nothing overlaps"),
    "CUDA_DEVICE_MAX_CONNECTIONS": (("1",), "all streams share one queue, so collectives wait for kernels"),
    "TORCH_NCCL_BLOCKING_WAIT": ((), "the host waits for every collective, so nothing overlaps"),
    "NCCL_BLOCKING_WAIT": ((), "the host waits for every collective, so nothing overlaps"),
}
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def environment() -> Iterator[Finding]:
    """Checks environment variables and accelerate's default config file."""
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
        yield bad("another engine", f"{variable} enables {_ENGINES[variable]}", advice)
    sizes = {variable: os.environ.get(variable, "") for variable in _AXES}
    if os.environ.get("PARALLELISM_CONFIG_SP_SIZE", "1") != "1":
        # Under this name, accelerate counts the ranks sharing a sequence, and state is sharded over all of them.
        sizes.pop("PARALLELISM_CONFIG_DP_SHARD_SIZE")
    split = {variable: size for variable, size in sizes.items() if size not in ("", "1")}
    if split and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() in _YES:
        asked += split
        advice = (
            "accelerate would split the model or its batches itself: remove --use_parallelism_config. ZeroPlugin(tp_size=...) "
            "is for models that tensor parallelism has split."
        )
        yield bad("another engine", ", ".join(f"{variable} is {size}" for variable, size in split.items()), advice)
    if not asked:
        yield good("another engine", "none is enabled by accelerate's variables")


def default_config_file() -> Path:
    """Returns the config file of `accelerate launch` without --config_file."""
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
            subject,
            f"{path} cannot be read: {error}",
            "Rewrite it with `accelerate config`, or move it to another folder.",
        )
    settings: Mapping = found if isinstance(found, Mapping) else {}
    kind = str(settings.get("distributed_type", "NO"))
    engine = _KINDS.get(kind) or next((name for key, name in _SECTIONS.items() if settings.get(key)), None)
    if engine is not None:
        advice = (
            "Every `accelerate launch` reads this file: pass --config_file with one of hf_zero's, or run `accelerate config` "
            "again."
        )
        return bad(subject, f"{path} turns {engine} on", advice)
    if settings.get("use_cpu") and torch.cuda.is_available():
        return bad(subject, f"{path} has use_cpu: true", "The GPUs are left idle: set it to false.")
    count = settings.get("num_processes")
    if isinstance(count, int) and torch.cuda.is_available() and count > torch.cuda.device_count() * _machines(settings):
        advice = "Set num_processes to the number of GPUs, or pass --num_processes."
        return bad(subject, f"{path} sets {count} processes, but there are {torch.cuda.device_count()} GPUs", advice)
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
        return good("training on the CPU", "not set")
    if asks:
        return good("training on the CPU", "ACCELERATE_USE_CPU is set")
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        advice = "Without it, accelerate runs each rank as a separate one-process job: export ACCELERATE_USE_CPU=true."
        return bad(
            "training on the CPU", f"WORLD_SIZE is {os.environ['WORLD_SIZE']} without ACCELERATE_USE_CPU", advice
        )
    advice = (
        "Ranks on the CPU form one job only if ACCELERATE_USE_CPU=true is set and torchrun or `accelerate launch --multi_gpu` "
        "starts them; `accelerate launch --cpu --num_processes N` starts one process."
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
            "Set it to a stage or to an existing YAML file, or unset it.",
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
        # "=eth0" is exactly this interface, "^docker" all others, and "eth" all interfaces whose name starts with "eth".
        if not value or value.startswith("^"):
            continue
        wanted = [name.strip() for name in value.removeprefix("=").split(",")]
        if not any(name.startswith(each) for each in wanted for name in there):
            advice = f"Ranks could not connect: choose from {', '.join(there)}, or unset {variable}."
            yield bad(variable, f"{value}: there is no such network interface", advice)
        else:
            yield good(variable, value)
