"""Launch files: what can be held without the cluster that they are for."""

import os
import re
import signal
import socket
import subprocess
import time
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
import torch.distributed as dist
import yaml
from launching import ROOT
from torch.distributed.run import get_args_parser
from typer.testing import CliRunner

from hf_zero import ZeroConfig
from hf_zero.cli.app import app
from hf_zero.presence.store import keep_store

LAUNCH = ROOT / "configs" / "launch"
MANIFESTS = sorted(LAUNCH.glob("kubernetes_*.yaml"))


def torchrun_of(words: list[str]):
    assert words[0] == "torchrun"
    return get_args_parser().parse_args(words[1:])


def check_agent(agent) -> None:
    """An elastic one, whose store outlives each node, with settings that hf_zero knows."""
    least, _, most = agent.nnodes.partition(":")
    assert int(least) < int(most) and agent.max_restarts > 0 and agent.rdzv_backend == "c10d"
    assert "is_host=0" in agent.rdzv_conf.split(",")
    assert (ROOT / agent.training_script).is_file()
    words = " ".join(agent.training_script_args).replace("=", " ", 1)
    [said] = re.findall(r"--zero[ =](\S+)", words)
    config = ZeroConfig.from_yaml(ROOT / said) if said.endswith(".yaml") else ZeroConfig.from_flag(said)
    assert config.checkpoint.resume == config.checkpoint.on_signal == "auto"


def test_the_slurm_file_starts_the_store_and_an_agent_on_each_node_and_ends_both(tmp_path):
    """With stand-ins for SLURM's and our commands, which note how they were called."""
    tools, noted = tmp_path / "bin", tmp_path / "noted"
    tools.mkdir()
    for name, then in (("srun", ""), ("hf-zero", "exec sleep 60")):
        (tools / name).write_text(
            f'#!/bin/bash\necho "{name} $* [$TORCH_DISABLE_SHARE_RDZV_TCP_STORE]" >> {noted}\n{then}\n'
        )
        (tools / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "4", "SLURM_GPUS_ON_NODE": "8"}
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", **slurm}
    words = ["bash", LAUNCH / "slurm.sbatch", "scripts/finetune_gpt.py", "--zero", "configs/launch/elastic.yaml"]
    subprocess.run(words, cwd=ROOT, env=environment, check=True, timeout=30)
    lines = {line.split()[0]: line for line in noted.read_text().splitlines()}
    assert lines["srun"].endswith("[1]")
    flags, _, agent = lines["srun"].partition(" torchrun ")
    assert "--no-kill" in flags and "--kill-on-bad-exit=0" in flags
    called = torchrun_of(["torchrun", *agent.rsplit(" [", 1)[0].split()])
    check_agent(called)
    assert called.nnodes == "2:4" and called.nproc_per_node == "8" and called.rdzv_id == "4711"
    address, _, port = called.rdzv_endpoint.partition(":")
    assert ip_address(address) and port == "24711"
    keeper = f"hf-zero rendezvous --host {address} --port 24711 []"
    assert lines.get("hf-zero", keeper) == keeper


@pytest.mark.parametrize(("status", "is_queued_again"), [(138, True), (0, False)])
def test_the_slurm_file_passes_its_signal_on_and_is_queued_again_unless_the_run_has_come_to_its_end(
    status, is_queued_again, tmp_path
):
    tools, noted = tmp_path / "bin", tmp_path / "noted"
    tools.mkdir()
    run = f'trap "echo struck >> {noted}; exit {status}" USR1; echo ready >> {noted}; while true; do sleep 0.1; done'
    for name, then in (("srun", run), ("hf-zero", "exec sleep 60"), ("scontrol", f'echo "scontrol $*" >> {noted}')):
        (tools / name).write_text(f"#!/bin/bash\n{then}\n")
        (tools / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "4", "SLURM_GPUS_ON_NODE": "8"}
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", **slurm}
    job = subprocess.Popen(["bash", LAUNCH / "slurm.sbatch", "train.py"], env=environment)
    try:
        while not noted.exists():
            time.sleep(0.05)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(30) == status
    finally:
        job.kill()
    assert noted.read_text().splitlines() == ["ready", "struck", *(["scontrol requeue 4711"] * is_queued_again)]


def documents_of(path: Path) -> list[dict]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def test_the_pytorchjob_starts_agents_that_find_the_store_of_its_own_deployment():
    deployment, service, job = documents_of(LAUNCH / "kubernetes_pytorchjob.yaml")
    [keeper] = deployment["spec"]["template"]["spec"]["containers"]
    assert keeper["command"][:2] == ["hf-zero", "rendezvous"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert labels == deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    pod = worker["template"]["spec"]
    [container] = pod["containers"]
    # The operator knows the container that trains by this name.
    assert container["name"] == "pytorch"
    agent = torchrun_of(container["command"])
    check_agent(agent)
    elastic = job["spec"]["elasticPolicy"]
    assert agent.nnodes == f"{elastic['minReplicas']}:{elastic['maxReplicas']}"
    assert elastic["maxReplicas"] == worker["replicas"] and elastic["maxRestarts"] == agent.max_restarts
    port = service["spec"]["ports"][0]["port"]
    assert agent.rdzv_endpoint == f"{service['metadata']['name']}:{port}" and keeper["command"][-1] == str(port)
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert {"name": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "value": "1"} in container["env"]
    [address] = [each["name"] for each in container["env"] if "valueFrom" in each]
    assert f"$({address})" == agent.local_addr
    [wait_s] = [int(each["value"]) for each in container["env"] if each["name"] == "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    assert 30 < wait_s < pod["terminationGracePeriodSeconds"]


def test_the_trainjob_starts_the_same_agents():
    [job] = documents_of(LAUNCH / "kubernetes_trainjob.yaml")
    agent = torchrun_of(job["spec"]["trainer"]["command"])
    check_agent(agent)
    assert agent.nnodes.endswith(f":{job['spec']['trainer']['numNodes']}")


def test_the_skypilot_job_starts_a_run_that_goes_on(tmp_path):
    """With a stand-in for torchrun, which tells how it was called."""
    [job] = documents_of(LAUNCH / "skypilot.yaml")
    (tmp_path / "torchrun").write_text("#!/bin/bash\necho torchrun $*\n")
    (tmp_path / "torchrun").chmod(0o755)
    told = {"NODE_RANK": "1", "NUM_NODES": "2", "NUM_GPUS_PER_NODE": "8", "NODE_IPS": "10.0.0.1\n10.0.0.2"}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | {f"SKYPILOT_{name}": told[name] for name in told}
    run = subprocess.run(["bash", "-c", job["run"]], env=environment, capture_output=True, text=True, check=True)
    agent = torchrun_of(run.stdout.split())
    assert (agent.nnodes, agent.nproc_per_node, agent.node_rank, agent.master_addr) == ("2", "8", 1, "10.0.0.1")
    assert (ROOT / agent.training_script).is_file()
    assert agent.training_script_args[:2] == ["--zero", "configs/launch/elastic.yaml"]
    assert agent.training_script_args[3].startswith(*job["file_mounts"]) and job["resources"]["use_spot"] is True


def test_all_launch_files_are_on_the_page():
    page = (ROOT / "docs" / "elastic.md").read_text()
    assert [path.name for path in LAUNCH.iterdir() if f"configs/launch/{path.name}" not in page] == []


def test_the_store_listens_on_one_address_and_no_other(monkeypatch):
    store = keep_store(0, "127.0.0.1")
    other = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=10))
    other.set("who", "an agent")
    assert store.get("who") == b"an agent"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), timeout=5)
    monkeypatch.setattr(signal, "pause", lambda: None)
    said = CliRunner().invoke(app, ["rendezvous", "--host", "127.0.0.1", "--port", "0"])
    assert said.exit_code == 0 and "127.0.0.1:" in said.output and "Pass the --host" in said.output
    taken = CliRunner().invoke(app, ["rendezvous", "--host", "127.0.0.1", "--port", str(store.port)])
    assert taken.exit_code != 0 and "Pass another --port" in taken.output
