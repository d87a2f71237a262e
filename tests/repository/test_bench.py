"""The benchmark harness itself: does it count the right bytes, start and stop ranks, and run from end to end?"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import guard
import pytest
import torch
import torch.distributed as dist
from engines import ENGINES, Engine

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts" / "bench"))

import bf16_ways
import fused_kernels
import gpus
import harness
import host_calls
import host_time
import offload
import ranks
import step
import tables
from compare import summarize_ranks
from engines import USUAL_ENGINES, WORKLOADS
from harness import BENCH_FOLDER, tcp_bytes
from launching import run_forked

from hf_zero.comm.collective import all_gather_flat, reduce_scatter_flat

TIME_LIMIT_S = 60


def connected_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    return client, accepted


def read_exactly(receiver: socket.socket, count_bytes: int) -> None:
    while count_bytes > 0:
        count_bytes -= len(receiver.recv(min(count_bytes, 1 << 20)))


def test_wire_counts_a_known_transfer():
    client, server = connected_pair()
    with client, server:
        before = tcp_bytes()
        payload = bytes(3_000_001)
        reader = threading.Thread(target=read_exactly, args=(server, len(payload)))
        reader.start()
        client.sendall(payload)
        reader.join()
        server.sendall(b"thanks")
        read_exactly(client, 6)
        after = tcp_bytes()
    # Both ends are this process's, so each byte is sent once and received once.
    assert after.sent - before.sent == len(payload) + 6
    assert after.received - before.received == len(payload) + 6


def test_wire_leaves_sockets_open_and_ignores_other_kinds():
    client, server = connected_pair()
    left, right = socket.socketpair()
    with client, server, left, right:
        before = tcp_bytes()
        left.sendall(b"by unix socket")
        assert tcp_bytes() == before
        assert right.recv(100) == b"by unix socket"
        client.sendall(b"still open")
        assert server.recv(100) == b"still open"


def visit(cpu_ms: float) -> dict[str, float | None]:
    times = {"cpu_ms": cpu_ms, "thread_ms": cpu_ms, "wall_ms": cpu_ms, "waited_ms": None}
    return {**times, "sent_bytes": 1.0, "received_bytes": 1.0}


def test_ratios_are_paired_by_round_and_losses_compared_with_the_baseline():
    # The machine slows down threefold between the rounds; the engine is 10 % slower in each.
    baseline = {"losses": [2.0, 1.0], "visits": [visit(100.0), visit(300.0)]}
    slower = {"losses": [2.0, 1.5], "visits": [visit(110.0), visit(330.0)]}
    summary = summarize_ranks([{"ddp": baseline, "fsdp2": slower}])[1]
    assert summary["cpu_ratio"]["median"] == pytest.approx(1.1)
    assert summary["cpu_ratio"]["highest"] == pytest.approx(1.1)
    assert summary["loss_difference"] == 0.5


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> Path:
    """The folder of figures of `all.sh --quick`, which runs every part once."""
    results = tmp_path_factory.mktemp("bench")
    said = run_on_cpu(["bash", str(BENCH_FOLDER / "all.sh"), "--quick"], {"RESULTS": str(results)}, time_limit_s=1500)
    assert f"tables and pictures in {results}" in said
    return results


def figures_of(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def engines_in_table(path: Path, kind: str) -> list[str]:
    table = tables.tables_of(tables.read_record(path))[kind]
    return [line.split("|")[1].strip() for line in table.splitlines()[2:]]


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_step_compares_engines_end_to_end(quick):
    engines = {engine["name"]: engine for engine in figures_of(quick / "step.json")["engines"]}
    assert list(engines) == list(USUAL_ENGINES)
    assert engines["fsdp2"]["loss_difference"] == 0.0
    assert engines["fsdp2"]["sent_ratio"]["median"] > 1.0
    assert engines["ddp"]["peak_bytes"] > 0


def hold_and_let_go(block_bytes: int, blocks: int) -> tuple[int, int]:
    """Bytes by which a process has grown at most, and by which it has in the end."""
    before = harness.held_before()
    # Below the size that glibc keeps in its heap once a block of it has been freed.
    for _ in range(2):
        torch.ones(block_bytes, dtype=torch.uint8)
    held = [torch.ones(block_bytes, dtype=torch.uint8) for _ in range(blocks)]
    # One behind them, on top of the heap, would keep the freed ones from the system.
    last = torch.ones(block_bytes // 2, dtype=torch.uint8)
    del held
    return harness.most_held() - before, harness._status_bytes("VmRSS") - before - len(last)


def test_a_peak_counts_what_was_held_and_freed_blocks_are_given_back():
    arguments = {"block_bytes": 2 << 20, "blocks": 16}
    most, left = ranks.run_alone(hold_and_let_go, time_limit_s=TIME_LIMIT_S, keyword_arguments=arguments)
    assert 32 << 20 <= most < 40 << 20 and left < 8 << 20


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_host_time_compares_engines_end_to_end(quick):
    engines = {engine["name"]: engine for engine in figures_of(quick / "host_time.json")["engines"]}
    assert list(engines) == list(host_time.USUAL)
    assert engines["ddp"]["to_ddp"] == engines["fsdp2"]["to_fsdp2"] == 1.0
    assert all(engine["cpu_ms"] > 0 and engine["loss_difference"] < 1e-5 for engine in engines.values())


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_first_step_compares_every_stage_with_ddp(quick):
    engines = engines_in_table(quick / "first_step.json", "first-step")
    assert engines == ["DDP", *(f"hf_zero stage {stage}" for stage in (1, 2, 3))]


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("name", ["axes.json", "axes-experts.json"])
def test_axes_compares_stages_with_fsdp2_over_the_copies_of_a_split_model(name, quick):
    pytest.importorskip("transformers.distributed")
    engines = engines_in_table(quick / name, "axes")
    assert engines == ["FSDP2", *(f"hf_zero stage {stage}" for stage in (1, 2, 3))]
    fsdp2, *ours = figures_of(quick / name)["engines"]
    assert all(row["sent_bytes"] < fsdp2["sent_bytes"] for row in ours)


def test_host_time_says_by_how_much_a_goal_is_missed():
    costs = {"ddp": 20.0, "fsdp2": 100.0, "hf_zero2": 22.0, "hf_zero3": 39.0}
    losses = {"losses": [2.0]}
    rows = host_time.summarize([{name: {**losses, "visits": [visit(cost)]} for name, cost in costs.items()}])
    assert host_time.missed_goals(rows) == {"hf_zero2": "1.100 of ddp > 1.05"}


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_saves_and_resumes_are_compared_end_to_end(quick):
    figures = figures_of(quick / "checkpoints.json")
    assert {"stage 3: stall", "stage 3: at once", "torch.save", "DCP", "safetensors"} <= figures["saves"].keys()
    assert all(seconds > 0 for way in figures["saves"].values() for seconds in way)
    assert figures["resumes"].keys() == {"DDP", "stage 3"}


@pytest.mark.parametrize(("world_size", "status"), [(2, 1), (3, 0)])
def test_a_loss_off_by_one_bit_fails_a_run_on_two_ranks(monkeypatch, capsys, tmp_path, world_size, status):
    one_bit_off = torch.nextafter(torch.tensor(2.0), torch.tensor(3.0)).item()
    baseline = {"losses": [2.0], "visits": [visit(100.0)]}
    other = {"losses": [one_bit_off], "visits": [visit(100.0)]}
    rows = summarize_ranks([{"ddp": baseline, "hf_zero2": other}])
    monkeypatch.setattr(step, "compare", lambda comparison: {"engines": rows, "left_out": {}})
    monkeypatch.setattr(sys, "argv", ["step.py", "--ranks", str(world_size), "--json", str(tmp_path / "figures.json")])
    assert step.main() == status
    assert "up to 2e-07 from DDP's" in capsys.readouterr().out


def test_step_refuses_an_unknown_engine(capsys):
    with pytest.raises(SystemExit):
        step.parse_options(["--engines", "fsdp3"])
    assert "unknown engines fsdp3; there are ddp" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_offload_compares_ways_end_to_end_and_says_what_it_leaves_out(quick):
    figures = figures_of(quick / "offload.json")
    ways = {way["way"]: way for way in figures["ways"]}
    assert list(ways) == ["none", "cpu", "nvme", "torch"]
    assert figures["left_out"].keys() == {"torchao", "torchao-gradients", "deepspeed"}
    assert not figures["failed"]
    assert ways["none"]["losses"] == ways["cpu"]["losses"] == ways["nvme"]["losses"]
    assert all(way["step_ms"] > 0 and way["host_peak_bytes"] > 0 for way in ways.values())
    assert ways["nvme"]["written_bytes_a_step"] > 0
    assert figures["commit"] and figures["device"] == "cpu"


def test_offload_begins_no_run_that_would_end_too_late(tmp_path, monkeypatch):
    path = tmp_path / "figures.json"
    few = ["--model", "tiny", "--minutes", "0", "--ways", "none", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", [offload.__file__, *few])
    assert offload.main() == 0
    figures = figures_of(path)
    assert figures["ways"] == [] and not figures["failed"]


def test_offload_keeps_the_runs_before_one_that_the_time_limit_has_cut(monkeypatch):
    limits = []

    def run_alone(*_args, time_limit_s: float, **_) -> dict:
        limits.append(time_limit_s)
        if len(limits) > 1:
            raise ranks.RanksTimedOutError("too late")
        return {"losses": [2.0]}

    monkeypatch.setattr(offload, "run_alone", run_alone)
    rounds = offload.Rounds(["none"], time.monotonic() + 60, {})
    rounds.take(2)
    assert rounds.runs == {"none": [{"losses": [2.0]}]} and not rounds.failures
    cut = offload.Rounds(["none"], time.monotonic() + 60, {})
    cut.take(1)
    assert cut.failures == {"none": "too late"}


def test_an_exact_way_whose_losses_differ_is_named():
    found = {"none": [[2.0, 1.0]], "cpu": [[2.0, 1.5]], "nvme": [[2.0, 1.0]], "torch": [[2.0, 1.9]]}
    assert offload.differing([{"way": way, "losses": losses} for way, losses in found.items()]) == ["cpu"]


def test_the_great_model_has_the_size_that_its_comment_says():
    with torch.device("meta"):
        assert sum(p.numel() for p in WORKLOADS["1.2b"].make_model().parameters()) == 1_210_851_840


def test_a_peer_that_is_not_there_is_said_by_name():
    absent = replace(offload.WAYS["torchao"], package="no_such_peer")
    assert absent.hindrance(torch.device("cuda")) == "no_such_peer is not installed"
    assert offload.WAYS["cpu"].hindrance(torch.device("cpu")) is None


# ---- GPUs ----


def test_a_trace_tells_what_of_communication_is_hidden():
    spans = [
        ("gemm", (0.0, 1000.0)),
        ("ncclAllGather", (500.0, 3000.0)),
        ("copy", (2000.0, 2500.0)),
        ("gemm", (900.0, 1100.0)),
    ]
    assert gpus.trace_in(spans, steps=2) == gpus.DeviceTrace(busy_ms=1.5, comm_ms=1.25, hidden_ms=0.55)
    assert gpus.trace_in([], steps=1) == gpus.DeviceTrace(busy_ms=0.0, comm_ms=0.0, hidden_ms=0.0)


def run_on_cpu(command: list[str], environment: dict[str, str] | None = None, time_limit_s: float = 280) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=time_limit_s,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {}),
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_a_way_that_fails_on_gpus_is_shown_and_the_others_are_measured(tmp_path, monkeypatch):
    measure = gpus.measure

    def failing(way, *arguments, **options):
        if way.name in ("torch", "stage 2"):
            raise ValueError("on purpose")
        return measure(way, *arguments, **options)

    monkeypatch.setattr(gpus, "measure", failing)
    small = ["--device", "cpu", "--models", "bert-tiny", "--steps", "1", "--rounds", "1"]
    small += ["--ways", "stage 1", "stage 2"]
    assert gpus.main([*small, "--json", str(tmp_path / "gpus.json"), "--nvme-path", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "gpus.json").read_text())["ways"]
    errors = {way["way"]: way["error"] for way in found}
    assert errors["torch"] == errors["stage 2"] == "ValueError: on purpose"
    assert errors["stage 1"] is None


@pytest.mark.parametrize(("off", "status"), [(3e-3, 0), (3e-2, 1)])
def test_losses_on_gpus_may_be_off_as_far_as_the_reference_is_from_itself(off, status, tmp_path, monkeypatch):
    losses = iter([1.0, 1.001, 1.0 + off])

    def measured(way, model, **options):
        return gpus.Figures(model=model, way=way.name, losses=[next(losses)], step_ms=1.0, host_ms=1.0, peak_mib=1.0)

    monkeypatch.setattr(gpus, "measure", measured)
    chosen = ["--device", "cpu", "--models", "bert-tiny", "--ways", "stage 2", "--nvme-path", str(tmp_path)]
    assert gpus.main([*chosen, "--json", str(tmp_path / "gpus.json")]) == status


def test_kernels_on_gpus_are_measured_at_a_size_that_fits():
    assert fused_kernels.fitting_numel(80 << 30) == 1 << 28
    for free in (8 << 30, 1 << 30):
        assert free / 4 < fused_kernels.fitting_numel(free) * fused_kernels._BYTES_AN_ELEMENT <= free / 2


def test_training_on_gpus_is_compared_way_by_way(tmp_path):
    small = ["--device", "cpu", "--models", "bert-tiny", "--steps", "1", "--rounds", "1"]
    chosen = ["--ways", "stage 2", "stage 3", "--json", str(tmp_path / "gpus.json"), "--nvme-path", str(tmp_path)]
    script = BENCH_FOLDER / "gpus.py"
    done = run_forked(script, [*small, *chosen], environment=os.environ, processes=1)
    assert done.returncode == 0, done.stderr[-3000:]
    out = done.stdout
    found = json.loads((tmp_path / "gpus.json").read_text())
    assert [way["way"] for way in found["ways"]] == ["torch", "torch, again", "stage 2", "stage 3"]
    assert all(way["loss_difference"] == 0 and way["step_ms"] > 0 for way in found["ways"])
    assert "bert-tiny" in out and "losses are off" not in out


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_script_for_one_gpu_runs_its_parts_and_sums_them_up(tmp_path):
    script = str(BENCH_FOLDER.parent / "gpu_day.sh")
    out = run_on_cpu(["bash", script, "--device", "cpu"], {"RESULTS": str(tmp_path)})
    summary = out[out.index("== summary") :]
    assert all(part in summary for part in ("bf16", "training", "kernels")) and "FAILED" not in summary
    assert len(list(tmp_path.glob("*.json"))) == 3
    [traced] = tmp_path.glob("bf16_trace-*.json")
    by_way = {(each["way"], each["suspect"]): each["losses"] for each in json.loads(traced.read_text())["ways"]}
    # Seven ways, and two or three of them without each of five suspects. Steps are the same in all: only last digits differ.
    assert len(by_way) == 7 + 3 * 3 + 2 * 2
    assert all(losses == pytest.approx(by_way["torch", ""], rel=1e-2) for losses in by_way.values())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_script_for_several_gpus_compares_all_ways_with_ddp(tmp_path):
    script = str(BENCH_FOLDER / "multi_gpu.sh")
    small = ["--device", "cpu", "--models", "bert-tiny", "--steps", "1", "--rounds", "1"]
    kept = ["--json", str(tmp_path / "gpus.json"), "--nvme-path", str(tmp_path)]
    run_on_cpu(["bash", script, "2", *small, *kept])
    found = json.loads((tmp_path / "gpus.json").read_text())
    assert found["ranks"] == 2 and len(found["ways"]) == 16
    assert all(way["error"] is None and way["is_as_expected"] for way in found["ways"])


def test_bf16_ways_are_held_against_what_another_seed_changes():
    def curve(*losses: float) -> bf16_ways.Curve:
        return bf16_ways.Curve(dev_losses=list(losses), train_losses=[], dev_accuracy=0.0, sent_bytes={})

    curves = {bf16_ways.BASELINE: [curve(1.0, 0.5), curve(1.2, 0.9)], "stage 3": [curve(1.1, 0.4), curve(1.2, 0.9)]}
    found = bf16_ways.compare(curves)
    assert found[bf16_ways.BASELINE] == {"mean_distance": 0, "mean_offset": 0, "between_seeds": pytest.approx(0.3)}
    assert found["stage 3"]["mean_distance"] == pytest.approx(0.05)
    assert found["stage 3"]["mean_offset"] == pytest.approx(0)


def test_sentences_become_token_ids_of_the_most_frequent_words(tmp_path):
    (tmp_path / "train.tsv").write_text("good good film\t1\nbad film good\t0")
    ids, labels, words = bf16_ways.read(tmp_path / "train.tsv", None, 4)
    assert (words, labels.tolist()) == ({"good": 2, "film": 3}, [1, 0])
    assert ids[:, :4].tolist() == [[2, 2, 3, 0], [1, 3, 2, 0]]


# ---- the guard: a step's bytes, memory and host work in proportion to its peers, against the baseline ----

WASTEFUL = "hf_zero2, wasteful"
PART_WASTED = 0.2


def make_wasteful(make_model, optimizer_arguments) -> Engine:
    """An engine that sends and holds a fifth more in each step."""
    usual = guard.Costs(**guard.read_baseline()["costs"]["hf_zero2"])
    engine = ENGINES["hf_zero2"](make_model, optimizer_arguments)
    held = torch.ones(int(PART_WASTED * usual.peak_bytes), dtype=torch.uint8)
    # Of two ranks, each sends as much as it reduces.
    sent, clip = torch.ones(int(PART_WASTED * usual.sent_bytes), dtype=torch.uint8), engine.clip

    def wasteful(max_norm: float) -> torch.Tensor:
        dist.all_reduce(sent)
        clip(max_norm)
        return held

    engine.clip = wasteful
    return engine


@pytest.fixture(scope="module")
def costs() -> dict[str, guard.Costs]:
    return guard.measure_costs(guard.engines())


def test_a_step_costs_no_more_in_proportion_to_its_peers_than_at_the_baseline(costs):
    baseline = guard.read_baseline()
    complaint = guard.grown(guard.ratios_of(costs) | guard.host_ratios(), baseline)
    if complaint and guard.versions() != baseline["versions"]:
        pytest.skip(f"the baseline is of other releases of what is compared. {complaint}")
    assert not complaint, complaint


@pytest.mark.slow
def test_a_step_that_wastes_bytes_and_memory_is_found():
    costs = guard.measure_costs(guard.engines() | {WASTEFUL: make_wasteful})
    baseline = guard.read_baseline()
    complaint = guard.grown(baseline["ratios"] | guard.ratios_of(costs | {"hf_zero2": costs[WASTEFUL]}), baseline)
    assert all(f"{words} of hf_zero2 / ddp: was" in complaint for words in guard.KINDS.values()), complaint
    assert "hf_zero1" not in complaint and "hf_zero3" not in complaint


@pytest.mark.parametrize("kind", guard.KINDS.values())
def test_an_eighth_more_of_one_ratio_names_it_and_how_to_renew_the_baseline(kind):
    baseline = guard.read_baseline()
    name = f"{kind} of hf_zero3 / fsdp2"
    was = baseline["ratios"][name]
    assert guard.grown(baseline["ratios"] | {name: 1.09 * was}, baseline) == ""
    complaint = guard.grown(baseline["ratios"] | {name: 1.12 * was}, baseline)
    assert f"{name}: was {was:.3f}, is {1.12 * was:.3f} (+12.0%)" in complaint
    assert complaint.count(": was") == 1 and "guard.py --renew" in complaint


def test_a_twentieth_more_of_a_count_is_found():
    baseline = guard.read_baseline()
    name = "bytecodes of hf_zero2 / ddp, gpt2 bf16 on 8 ranks"
    assert name in guard.grown(baseline["ratios"] | {name: 1.05 * baseline["ratios"][name]}, baseline)


def test_bytecodes_are_counted_by_function_and_exactly():
    def loop(rounds: int) -> None:
        for _ in range(rounds):
            pass

    ten, twenty, again = (host_calls._bytecodes(lambda n=n: loop(n))[loop.__code__] for n in (10, 20, 20))
    assert again == twenty and twenty - ten == 10 * ((twenty - ten) // 10) >= 20


def copies_of_the_fake_group() -> list[int]:
    """Counts the copies in a gather and a reduce-scatter of 64 ranks: inside of `_copied_once`, then outside."""
    dist.init_process_group("fake", rank=0, world_size=64, store=dist.HashStore())
    group, whole, own, counts = dist.group.WORLD, torch.zeros(640), torch.zeros(10), []
    for context in (host_calls._copied_once(), contextlib.nullcontext()):
        with context:
            for collective, tensors in ((all_gather_flat, (whole, own)), (reduce_scatter_flat, (own, whole))):
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                    collective(*tensors, group, async_op=True).wait()
                counts.append(sum(each.name == "aten::copy_" for each in profile.events()))
    return counts


def test_times_of_the_host_do_not_grow_with_the_ranks_of_the_fake_group():
    gather, scatter, *outside = ranks.run_alone(
        copies_of_the_fake_group, time_limit_s=TIME_LIMIT_S, keyword_arguments={}
    )
    assert gather <= 1 and scatter <= 1 and max(outside) == 64


def test_another_release_of_torch_is_named_as_a_possible_cause():
    baseline = guard.read_baseline()
    twice = {name: 2 * ratio for name, ratio in baseline["ratios"].items()}
    assert "torch 0.1" not in guard.grown(twice, baseline)
    older = baseline | {"versions": baseline["versions"] | {"torch": "0.1"}}
    assert "then 0.1" in guard.grown(twice, older)


def test_a_ratio_without_a_baseline_is_not_passed_over():
    baseline = guard.read_baseline()
    assert "other ratios" in guard.grown(baseline["ratios"] | {"bytes sent of hf_zero4 / ddp": 1.0}, baseline)
