"""The doctor: each known-bad set-up is found, with what to do, and a good machine passes."""

import importlib.metadata
import importlib.util
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import hf_zero
from hf_zero.cli.app import app
from hf_zero.diagnose import gpus
from hf_zero.diagnose import links as rank_links
from hf_zero.diagnose.disk import disk
from hf_zero.diagnose.environment import environment
from hf_zero.diagnose.finding import Finding
from hf_zero.diagnose.gpus import devices, peer_access, tensor_parallelism
from hf_zero.diagnose.limits import limits, shared_memory
from hf_zero.diagnose.links import links, placement
from hf_zero.diagnose.software import compiler, driver, versions
from hf_zero.integrations.launcher import launch_of

pytestmark = pytest.mark.timeout(120)

CLEARED = (
    *("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM", "ACCELERATE_USE_CPU"),
    *("RANK", "WORLD_SIZE", "MASTER_ADDR", "HF_ZERO_CONFIG", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "CC"),
    *(
        "ACCELERATE_USE_PARALLELISM_CONFIG",
        "NCCL_P2P_DISABLE",
        "NCCL_DEBUG",
        "TORCH_DISTRIBUTED_DEBUG",
        "CUDA_LAUNCH_BLOCKING",
        "NCCL_IB_DISABLE",
    ),
)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch, tmp_path):
    for name in CLEARED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))


def of_status(status: str, findings: Iterable[Finding]) -> dict[str, Finding]:
    return {finding.subject: finding for finding in findings if finding.status == status}


def bad_ones(findings: Iterable[Finding]) -> dict[str, Finding]:
    return of_status("bad", findings)


def write_default_config(text: str) -> None:
    path = Path(os.environ["HF_HOME"], "accelerate", "default_config.yaml")
    path.parent.mkdir(parents=True)
    path.write_text(text)


def with_gpus(monkeypatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


# ---- settings in conflict ----


def test_a_plain_environment_is_good():
    assert not bad_ones(environment())


@pytest.mark.parametrize(
    ("variable", "value", "subject", "said"),
    [
        ("ACCELERATE_USE_FSDP", "true", "another engine", "FSDP"),
        ("ACCELERATE_USE_DEEPSPEED", "1", "another engine", "DeepSpeed"),
        ("ACCELERATE_USE_MEGATRON_LM", "yes", "another engine", "Megatron-LM"),
        ("HF_ZERO_CONFIG", "/nowhere/zero.yaml", "HF_ZERO_CONFIG", "/nowhere/zero.yaml"),
        ("HF_ZERO_CONFIG", "stage=7", "HF_ZERO_CONFIG", "allowed: 0, 1, 2, 3"),
        ("WORLD_SIZE", "2", "training on the CPU", "without ACCELERATE_USE_CPU"),
        ("RANK", "0", "variables of a launcher", "RANK=0"),
        ("NCCL_P2P_DISABLE", "1", "NCCL_P2P_DISABLE", "1"),
        ("NCCL_IB_DISABLE", "1", "NCCL_IB_DISABLE", "1"),
        ("NCCL_PROTO", "LL", "NCCL_PROTO", "LL"),
        ("NCCL_DEBUG", "info", "NCCL_DEBUG", "info"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "TORCH_DISTRIBUTED_DEBUG", "DETAIL"),
        ("CUDA_LAUNCH_BLOCKING", "1", "CUDA_LAUNCH_BLOCKING", "1"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "CUDA_DEVICE_MAX_CONNECTIONS", "1"),
        ("GLOO_SOCKET_IFNAME", "wlan77", "GLOO_SOCKET_IFNAME", "no such network interface"),
        ("NCCL_SOCKET_IFNAME", "=nothing0", "NCCL_SOCKET_IFNAME", "no such network interface"),
    ],
)
def test_a_variable_that_hurts_is_found_with_what_to_do(variable, value, subject, said, monkeypatch):
    monkeypatch.setenv(variable, value)
    finding = bad_ones(environment())[subject]
    assert said in finding.value and len(finding.advice) > 20


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("NCCL_P2P_DISABLE", "0"),
        ("NCCL_DEBUG", "WARN"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "8"),
        ("GLOO_SOCKET_IFNAME", "lo"),
        ("NCCL_SOCKET_IFNAME", "^docker"),
    ],
)
def test_a_variable_that_does_not_hurt_passes(variable, value, monkeypatch):
    monkeypatch.setenv(variable, value)
    assert not bad_ones(environment())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("distributed_type: FSDP\nnum_processes: 2\n", "turns FSDP on"),
        ("distributed_type: DEEPSPEED\n", "turns DeepSpeed on"),
        ("distributed_type: MULTI_GPU\nfsdp_config: {fsdp_version: 2}\n", "turns FSDP on"),
        ("distributed_type: [", "cannot be read"),
    ],
)
def test_a_default_config_that_turns_something_else_on_is_found(text, said):
    write_default_config(text)
    finding = bad_ones(environment())["accelerate's default config"]
    assert said in finding.value and "accelerate config" in finding.advice


def test_a_plain_default_config_is_good():
    write_default_config("distributed_type: MULTI_CPU\nnum_processes: 2\nfsdp_config: {}\n")
    assert not bad_ones(environment())


def test_gpus_that_the_settings_leave_idle_are_found(monkeypatch):
    with_gpus(monkeypatch, 2)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    write_default_config("use_cpu: true\n")
    found = bad_ones(environment())
    assert "there are GPUs" in found["training on the CPU"].value
    assert "use_cpu" in found["accelerate's default config"].value


def test_more_processes_than_gpus_are_found(monkeypatch):
    with_gpus(monkeypatch, 2)
    write_default_config("distributed_type: MULTI_GPU\nnum_processes: 8\n")
    assert "8 processes" in bad_ones(environment())["accelerate's default config"].value


# ---- what Triton needs ----


def lacking_compiler(monkeypatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)


def lacking_headers(monkeypatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": "/nowhere"})


def lacking_cache(monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/proc/1/triton")


LACKING = {
    "C compiler for Triton": lacking_compiler,
    "Python headers for Triton": lacking_headers,
    "Triton's cache": lacking_cache,
}


@pytest.mark.parametrize("subject", LACKING)
@pytest.mark.parametrize("gpus", [0, 1])
def test_what_triton_lacks_is_a_fault_beside_a_gpu_and_a_hint_elsewhere(subject, gpus, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    LACKING[subject](monkeypatch)
    finding = of_status("bad" if gpus else "hint", compiler())[subject]
    assert finding.advice


def test_a_compiler_that_cc_names_and_is_not_there_is_found(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("CC", "no-such-cc")
    found = {finding.subject: finding for finding in compiler()}
    assert "no-such-cc" in found["C compiler for Triton"].value


def test_without_triton_nothing_is_asked_of_the_compiler(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert [finding.status for finding in compiler()] == ["absent"]


# ---- devices, versions, limits, disk ----


def test_pcie_without_peer_access_is_found(monkeypatch):
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: {a, b} != {0, 2})
    finding = peer_access(3)
    assert (
        finding.status == "bad" and "PCIe without peer access: 0→2, 2→0" in finding.value and "IOMMU" in finding.advice
    )
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    assert peer_access(3).status == "good"


def test_memory_that_cannot_be_pinned_is_found(monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(gpus.torch, "empty", refuse)
    finding = gpus._pinned()
    assert finding.status == "bad" and "ulimit -l" in finding.advice


@pytest.mark.skipif(torch.cuda.is_available(), reason="is of machines without a GPU")
def test_what_needs_a_gpu_says_plainly_that_there_is_none():
    found = [*devices(), *versions()]
    assert {finding.subject for finding in found if finding.value == "no GPU"} >= {"GPUs", "pinned memory", "NCCL"}


def test_an_old_library_and_one_that_is_missing_are_found(monkeypatch):
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "accelerate":
            raise importlib.metadata.PackageNotFoundError(name)
        return "2.4.1+cu121" if name == "torch" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = bad_ones(versions())
    assert found["torch"].value == "2.4.1+cu121" and "pip install -U" in found["torch"].advice
    assert found["accelerate"].value == "not installed"


def test_a_torch_without_cuda_beside_a_driver_is_found(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    said = subprocess.CompletedProcess([], 0, stdout="570.86\n", stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: said)
    monkeypatch.setattr(torch.version, "cuda", None)
    finding = driver()
    assert finding.status == "bad" and "built without CUDA" in finding.value
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "sees no GPU" in driver().value
    said.returncode, said.stderr = 9, "Driver/library version mismatch"
    said.stdout = ""
    assert driver().status == "bad" and "mismatch" in driver().value


def test_gpus_that_the_driver_counts_and_cuda_cannot_start_are_found(monkeypatch):
    with_gpus(monkeypatch, 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bad_ones(devices())["GPUs"].value == "2, and CUDA does not start"
    assert "ACCELERATE_USE_CPU" in launch_of(["--zero", "2", __file__]).environment


def test_a_torch_beyond_the_tested_ones_is_told(monkeypatch):
    assert "newest torch" not in of_status("hint", versions())
    monkeypatch.setattr(torch, "__version__", "2.16.0+cu130")
    assert "2.15" in of_status("hint", versions())["newest torch"].advice


def test_little_shared_memory_is_found(monkeypatch):
    few = os.statvfs_result((4096, 4096, 100, 100, 100, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: few)
    finding = shared_memory("/tmp")
    assert finding.status == "bad" and "--shm-size" in finding.advice


def test_few_open_files_and_a_host_without_an_address_are_found(monkeypatch):
    def has_none(name: str) -> str:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 4096))
    monkeypatch.setattr(socket, "gethostbyname", has_none)
    found = bad_ones(limits())
    assert "ulimit -n 4096" in found["open files"].advice
    assert "GLOO_SOCKET_IFNAME=lo" in found["host name"].advice


def test_little_locked_memory_is_a_hint_beside_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65536, 65536))
    assert "memlock" in of_status("hint", limits())["locked memory"].advice


def test_the_disk_of_a_folder_is_measured_and_left_as_it_was(tmp_path):
    [finding] = disk(tmp_path)
    assert finding.status in ("good", "hint") and "MB/s" in finding.value
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_and_a_full_disk_are_found(tmp_path, monkeypatch):
    [finding] = disk(tmp_path / "nowhere")
    assert finding.status == "bad" and "cannot be written" in finding.value
    full = os.statvfs_result((4096, 4096, 100, 100, 100, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    [finding] = disk(tmp_path)
    assert (finding.status, finding.value) == ("bad", "full")


# ---- links, and the whole ----


def test_ranks_that_cannot_start_are_a_fault_that_says_what_they_said(monkeypatch):
    monkeypatch.setattr(rank_links.sys, "executable", shutil.which("false"))
    [finding] = links(2)
    assert finding.status == "bad" and "exit code 1" in finding.value


def test_ranks_that_never_end_are_killed_and_named(monkeypatch):
    monkeypatch.setattr(rank_links, "_PATIENCE_S", 0.5)
    [finding] = links(2)
    assert finding.status == "bad" and "ranks [0, 1] have not ended" in finding.value


RIGHT = {
    "dp": {"all_reduce_gb": 6.0, "all_gather_gb": 3.0, "all_reduce_us": 9, "all_gather_us": 9},
    "tp": None,
    "wrong": [],
}
WRONG = {**RIGHT, "wrong": ["all-gather on rank 1"]}


@pytest.mark.parametrize(
    "peer, host, sockets, advice",
    [
        ("ranks [0, 1] have not ended", RIGHT, RIGHT, "at 6.00 GB/s: export NCCL_P2P_DISABLE=1,"),
        (WRONG, WRONG, RIGHT, "export NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1,"),
        ("rank 0: unhandled system error", WRONG, "rank 1: no route", "No transport between the ranks of this machine"),
    ],
)
def test_a_transport_that_hangs_fails_or_is_wrong_is_found_with_the_variables_of_one_that_works(
    monkeypatch, peer, host, sockets, advice
):
    # A driver's answer that GPUs have access to each other proves nothing: each transport is tried with real collectives.
    of_variables = {
        (): peer,
        ("NCCL_P2P_DISABLE",): host,
        ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"): sockets,
    }
    with_gpus(monkeypatch, 2)
    monkeypatch.setattr(rank_links, "_measured", lambda *_, variables=(): of_variables[tuple(variables)])
    findings = list(links(2))
    assert findings[-1].status == "bad" and advice in findings[-1].advice


def test_all_transports_of_gpus_are_timed_and_the_rate_is_one_that_plan_reads(monkeypatch):
    with_gpus(monkeypatch, 2)
    monkeypatch.setattr(rank_links, "_measured", lambda *_, variables=(): RIGHT)
    found = {finding.subject: finding.value for finding in links(2)}
    assert {"all-reduce over host memory", "all-reduce over sockets"} <= set(found)
    assert "6.00 GB/s (`hf-zero plan --node-gbps 48`)" in found["all-reduce (2 ranks, nccl)"]


@pytest.mark.slow
def test_ranks_that_cannot_talk_over_the_named_interface_can_over_the_loopback(monkeypatch):
    if torch.cuda.device_count() > 1:
        pytest.skip("measures GPUs")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    [finding] = links(2)
    assert finding.status == "bad" and "export GLOO_SOCKET_IFNAME=lo" in finding.advice


@pytest.fixture
def good_machine(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("is of machines whose faults are known")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def in_json(*options: str) -> dict:
    done = CliRunner().invoke(app, ["doctor", *options, "--json"])
    document = json.loads(done.stdout)
    assert done.exit_code == 0 and document["good"], document
    return document


def test_accelerates_own_way_to_split_a_model_is_another_engine(monkeypatch):
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "1")
    assert not bad_ones(environment()), "accelerate reads the sizes only where it is told to"
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    finding = bad_ones(environment())["another engine"]
    assert finding.value == "PARALLELISM_CONFIG_CP_SIZE is 2" and "ZeroPlugin(tp_size=...)" in finding.advice


def test_gpus_that_make_no_whole_copies_and_an_old_transformers_are_found(monkeypatch):
    with_gpus(monkeypatch, 6)
    found = {finding.subject: finding for finding in tensor_parallelism(4)}
    assert found["copies of the model"].status == "bad" and "sets of 4" in found["copies of the model"].value
    found = {finding.subject: finding for finding in tensor_parallelism(3)}
    assert found["copies of the model"].value == "2, each over 3 GPUs"
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "5.17.0")
    assert "split over 3 ranks needs 5.23" in bad_ones(tensor_parallelism(3))["transformers"].advice


def test_copies_on_the_slower_links_are_a_hint():
    slow, fast = {"all_reduce_gb": 1.0}, {"all_reduce_gb": 4.0}
    [finding] = placement(slow, fast)
    assert finding.status == "hint" and "0.2 times" in finding.value and "CUDA_VISIBLE_DEVICES" in finding.advice
    [finding] = placement(fast, slow)
    assert finding.status == "good"
    assert not list(placement(fast, None)), "of one copy there is nothing to compare with"


def test_ranks_that_tp_size_does_not_divide_are_refused():
    done = CliRunner().invoke(app, ["doctor", "--tp-size", "2", "--processes", "3"])
    assert done.exit_code == 1
    assert done.output.strip() == "hf_zero: tp_size is 2, which does not divide the 3 ranks that measure the links."


RATE = r"\d+\.\d\d GB/s \(`hf-zero plan --node-gbps [\d.e+]+`\), latency [\d,]+ us$"


@pytest.mark.slow
def test_links_inside_a_copy_and_between_copies_are_measured_apart(good_machine, tmp_path):
    document = in_json("--folder", str(tmp_path), "--tp-size", "2")
    subjects = {finding["subject"]: finding for finding in document["findings"]}
    for axis in ("between copies", "inside a copy of 2"):
        assert re.match(RATE, subjects[f"all-reduce ({axis}, 4 ranks, gloo on the CPU)"]["value"])
    assert subjects["the engine's collectives"]["status"] == "good"
    assert "times as fast as between copies" in subjects["tensor parallel ranks"]["value"]


@pytest.mark.slow
def test_links_of_a_good_machine_are_measured_by_ranks_of_its_own(good_machine, tmp_path):
    subjects = {finding["subject"]: finding for finding in in_json("--folder", str(tmp_path))["findings"]}
    assert re.match(RATE, subjects["all-reduce (2 ranks, gloo on the CPU)"]["value"])
    assert subjects["the engine's collectives"]["status"] == "good"


def test_a_good_machine_passes_as_a_table_as_json_and_as_a_function(good_machine, tmp_path):
    assert in_json("--quick", "--folder", str(tmp_path))["findings"]
    shown = CliRunner().invoke(app, ["doctor", "--quick"])
    assert shown.exit_code == 0 and "no faults" in shown.stdout
    assert hf_zero.doctor(measure=False).is_good


def test_a_fault_ends_the_command_with_1_and_is_in_the_last_line(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    done = CliRunner().invoke(app, ["doctor", "--quick"])
    assert done.exit_code == 1 and "1 fault: another engine" in done.stdout
    done = CliRunner().invoke(app, ["doctor", "--quick", "--json"])
    assert done.exit_code == 1 and json.loads(done.stdout)["good"] is False
