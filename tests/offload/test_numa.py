"""NUMA nodes and the threads of host steps, with trees of /sys that a test makes."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from resident import resident_bytes
from torch import nn
from torch.optim import adam

from hf_zero.engine.engine import ZeroEngine
from hf_zero.offload import choice
from hf_zero.offload.host_memory import HostCores, NodeCores, ShareOfCores, choose_host_cores, near_cores
from hf_zero.offload.host_tiers import HostTier

pytestmark = pytest.mark.timeout(60)

HERE = sorted(os.sched_getaffinity(0))
GPU = "0000:3b:00.0"
HOST = torch.device("cpu")
several_cores = pytest.mark.skipif(len(HERE) < 2, reason="two nodes need two cores")


def tree(root: Path, nodes: dict[int, str], gpu_node: int | None = None) -> Path:
    """A /sys with these nodes, each with its `cpulist`, and an accelerator on one of them."""
    for node, cores in nodes.items():
        folder = root / "devices" / "system" / "node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    if gpu_node is not None:
        folder = root / "bus" / "pci" / "devices" / GPU
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{gpu_node}\n")
    return root


@pytest.fixture
def two_nodes(tmp_path, monkeypatch) -> list[set[int]]:
    """This machine's cores as two nodes, for engines that are built in the test; the rank is the last of two."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    half = len(HERE) // 2
    nodes = [set(HERE[:half]), set(HERE[half:])]
    system = tree(tmp_path / "sys", {node: ",".join(map(str, sorted(cores))) for node, cores in enumerate(nodes)})
    monkeypatch.setattr(choice, "choose_host_cores", partial(choose_host_cores, system=system))
    return nodes


def near(system: Path, allowed=range(16), **more) -> set[int] | None:
    arguments = {"pci_address": None, "local_rank": 0, "ranks": 1, **more}
    return near_cores(frozenset(allowed), system=system, **arguments)


# Which cores


def test_the_cores_are_those_of_the_accelerators_node(tmp_path):
    system = tree(tmp_path, {0: "0-3,8-11", 1: "4-7,12-15"}, gpu_node=1)
    assert near(system, pci_address=GPU) == {4, 5, 6, 7, 12, 13, 14, 15}
    assert near(system, pci_address=GPU, allowed=range(6)) == {4, 5}


@pytest.mark.parametrize("gpu_node", [-1, None, 7])
def test_a_rank_whose_accelerator_has_no_known_node_is_dealt_one(tmp_path, gpu_node):
    system = tree(tmp_path, {0: "0-7", 1: "8-15"}, gpu_node)
    assert [near(system, pci_address=GPU, local_rank=rank, ranks=2) for rank in range(2)] == [
        set(range(8)),
        set(range(8, 16)),
    ]


@given(nodes=st.integers(2, 6), ranks=st.integers(1, 12))
def test_ranks_are_dealt_evenly_and_neighbors_together(tmp_path_factory, nodes, ranks):
    system = tree(tmp_path_factory.mktemp("sys"), {3 * n: f"{2 * n}-{2 * n + 1}" for n in range(nodes)})
    dealt = [min(near(system, local_rank=rank, ranks=ranks)) // 2 for rank in range(ranks)]
    counts = [dealt.count(node) for node in range(nodes)]
    assert dealt == sorted(dealt)
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("nodes", [{}, {0: "0-15"}, {0: "0-15", 1: ""}])
def test_nothing_is_chosen_where_no_two_nodes_have_cores(tmp_path, nodes):
    assert near(tree(tmp_path, nodes)) is None


def test_a_rank_that_is_confined_to_a_node_stays_as_it_is(tmp_path):
    system = tree(tmp_path, {0: "0-7", 1: "8-15"}, gpu_node=0)
    assert near(system, pci_address=GPU, allowed=range(8, 12)) is None


# How many threads


def test_ranks_share_the_cores(monkeypatch, tmp_path):
    beside_gpu = torch.device("cuda")
    monkeypatch.setattr("hf_zero.offload.host_memory.pci_address", lambda device: GPU)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    one_node, system = tmp_path / "nowhere", tree(tmp_path / "sys", {0: "0-1", 1: "2-15"}, gpu_node=0)

    shared = choose_host_cores(beside_gpu, one_node)
    assert (type(shared), shared.threads) == (ShareOfCores, 4)
    # No more than the node has.
    bound = choose_host_cores(beside_gpu, system)
    assert (type(bound), bound.threads, bound.numbers) == (NodeCores, 2, {0, 1})
    on_the_cpu = choose_host_cores(HOST, one_node)
    assert (type(on_the_cpu), on_the_cpu.threads) == (HostCores, torch.get_num_threads())


def test_a_borrowed_thread_is_given_back_as_it_was():
    own, cores = torch.get_num_threads(), ShareOfCores(torch.get_num_threads() + 3)
    cores.release()
    cores.take()
    cores.take()
    assert torch.get_num_threads() == own + 3
    cores.release()
    assert torch.get_num_threads() == own


# In training


def trained(offload: dict, steps: int = 3) -> tuple[list[float], list[tuple[set[int], int]]]:
    """Losses, and on which cores and with how many threads AdamW's arithmetic ran."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = ZeroEngine(model, [optimizer], {"stage": 2, "offload": offload})
    losses, seen, stock = [], [], adam.adam

    def watched(*args, **kwargs):
        seen.append((os.sched_getaffinity(0), torch.get_num_threads()))
        return stock(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adam, "adam", watched)
        for _ in range(steps):
            loss = model(torch.ones(4, 64)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        engine.close()
    return losses, seen


@several_cores
@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("where", ["cpu", "nvme"])
def test_the_scripts_thread_steps_on_its_nodes_cores_and_is_given_back(two_nodes, node, where, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", str(node))
    files = {"nvme_path": str(tmp_path)} if where == "nvme" else {}
    before, count = os.sched_getaffinity(0), torch.get_num_threads()
    losses, seen = trained({"optimizer": where, **files})
    most = min(count, len(two_nodes[node]))
    assert seen and all(cores == two_nodes[node] and threads == most for cores, threads in seen)
    assert os.sched_getaffinity(0) == before and torch.get_num_threads() == count
    assert losses == trained({"optimizer": "none"})[0]


@several_cores
def test_ranks_without_an_accelerator_are_dealt_over_the_nodes(two_nodes, monkeypatch):
    for rank in range(2):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        _, seen = trained({"optimizer": "cpu"}, steps=1)
        assert seen and all(cores == two_nodes[rank] for cores, _ in seen)


@several_cores
def test_a_step_that_fails_leaves_the_thread_bound_until_the_next_forward_only(two_nodes, monkeypatch):
    before = os.sched_getaffinity(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    ZeroEngine(model, [optimizer], {"stage": 2, "offload": {"optimizer": "cpu"}})
    model(torch.ones(2, 8)).sum().backward()

    def fail(*_args):
        raise MemoryError("no room")

    hook = optimizer.register_step_pre_hook(fail)
    with pytest.raises(MemoryError, match="no room"):
        optimizer.step()
    hook.remove()
    model(torch.ones(2, 8))
    assert os.sched_getaffinity(0) == before


@several_cores
def test_pages_are_written_to_from_the_nodes_cores(monkeypatch):
    flat = HostTier(HOST, NodeCores(1, frozenset(HERE[1:]))).empty(1 << 20, torch.bfloat16)
    assert resident_bytes([flat]) == flat.nbytes and not flat.any()
    untouched = HostTier(HOST, HostCores(1)).empty(1 << 20, torch.bfloat16)
    assert resident_bytes([untouched]) == 0
    assert os.sched_getaffinity(0) == set(HERE)
