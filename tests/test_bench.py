"""The benchmark harness itself: does it count the right bytes, start and stop ranks, and run from end to end?"""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts" / "bench"))

import step
from ranks import RankFailedError, RanksTimedOutError, run_ranks
from summary import summarise
from wire import tcp_bytes

STEP_SCRIPT = step.BENCH_FOLDER / "step.py"
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


def exchange_bytes(rank: int, world_size: int, *, numel: int) -> dict[str, int]:
    tensor = torch.full((numel,), float(rank))
    dist.barrier()
    before = tcp_bytes()
    if rank == 0:
        dist.send(tensor, dst=1)
    else:
        dist.recv(tensor, src=0)
    dist.barrier()
    after = tcp_bytes()
    # A rank that leaves closes its sockets, and what they have counted is gone on both sides.
    dist.barrier()
    return {"rank": rank, "sent": after.sent - before.sent, "received": after.received - before.received}


def test_ranks_bring_back_results_and_gloo_bytes_are_counted():
    sender, receiver = run_ranks(
        exchange_bytes, world_size=2, time_limit_s=TIME_LIMIT_S, keyword_arguments={"numel": 250_000}
    )
    assert (sender["rank"], receiver["rank"]) == (0, 1)
    payload_bytes = 1_000_000
    framing_bytes = 1_000
    assert payload_bytes <= sender["sent"] <= payload_bytes + framing_bytes
    assert payload_bytes <= receiver["received"] <= payload_bytes + framing_bytes


def fail_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("the reason in words")
    dist.barrier()


def test_a_failing_rank_takes_the_others_down_with_its_traceback():
    started_s = time.monotonic()
    with pytest.raises(RankFailedError, match=r"(?s)rank 1 failed.*in fail_on_rank_1.*ValueError: the reason in words"):
        run_ranks(fail_on_rank_1, world_size=2, time_limit_s=TIME_LIMIT_S)
    assert time.monotonic() - started_s < TIME_LIMIT_S / 2


def vanish_on_rank_0(rank: int, world_size: int) -> None:
    if rank == 0:
        os._exit(3)
    dist.barrier()


def test_a_rank_that_vanishes_is_named_with_its_exit_code():
    with pytest.raises(RankFailedError, match="rank 0 failed:\nended without a result, exit code 3"):
        run_ranks(vanish_on_rank_0, world_size=2, time_limit_s=TIME_LIMIT_S)


def sleep_on_rank_1(rank: int, world_size: int) -> int:
    if rank == 1:
        time.sleep(TIME_LIMIT_S)
    return rank


def test_the_time_limit_ends_a_run_and_names_who_was_awaited():
    started_s = time.monotonic()
    with pytest.raises(RanksTimedOutError, match=r"no result from ranks \[.*1\]"):
        run_ranks(sleep_on_rank_1, world_size=2, time_limit_s=4)
    assert time.monotonic() - started_s < TIME_LIMIT_S / 2


def visit(cpu_ms: float) -> dict[str, float | None]:
    return {"cpu_ms": cpu_ms, "wall_ms": cpu_ms, "sent_bytes": 1.0, "received_bytes": 1.0, "waited_ms": None}


def test_ratios_are_paired_by_round_and_losses_compared_with_the_baseline():
    # The machine slows down threefold between the rounds; the engine is 10 % slower in each.
    baseline = {"losses": [2.0, 1.0], "visits": [visit(100.0), visit(300.0)]}
    slower = {"losses": [2.0, 1.5], "visits": [visit(110.0), visit(330.0)]}
    summary = summarise([{"ddp": baseline, "fsdp2": slower}])[1]
    assert summary.cpu_ratio.median == pytest.approx(1.1)
    assert summary.cpu_ratio.highest == pytest.approx(1.1)
    assert summary.loss_difference == 0.5


def test_step_compares_engines_end_to_end(tmp_path):
    figures_path = tmp_path / "figures.json"
    command = [sys.executable, STEP_SCRIPT, "--quick", "--engines", "fsdp2", "--json", figures_path]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    engines = {engine["name"]: engine for engine in json.loads(figures_path.read_text())["engines"]}
    assert list(engines) == ["ddp", "fsdp2"]
    assert engines["fsdp2"]["loss_difference"] == 0.0
    assert engines["fsdp2"]["sent_ratio"]["median"] > 1.0
    assert engines["ddp"]["peak_bytes"] > 0


@pytest.mark.timeout(300)
def test_io_saves_and_resumes_end_to_end(tmp_path):
    figures_path = tmp_path / "io.json"
    command = [sys.executable, STEP_SCRIPT.with_name("io.py"), "--quick", "--stages", "3"]
    command += ["--folder", tmp_path, "--json", figures_path]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    figures = json.loads(figures_path.read_text())
    assert {"stage 3: stall", "stage 3: at once", "torch.save", "DCP", "safetensors"} <= figures["saves"].keys()
    assert all(seconds > 0 for way in figures["saves"].values() for seconds in way)
    assert figures["resumes"].keys() == {"DDP", "stage 3"}


@pytest.mark.parametrize(("world_size", "status"), [(2, 1), (3, 0)])
def test_a_loss_off_by_one_bit_fails_a_run_on_two_ranks(monkeypatch, capsys, tmp_path, world_size, status):
    one_bit_off = torch.nextafter(torch.tensor(2.0), torch.tensor(3.0)).item()
    baseline = {"losses": [2.0], "visits": [visit(100.0)]}
    other = {"losses": [one_bit_off], "visits": [visit(100.0)]}
    monkeypatch.setattr(step, "measure", lambda options: summarise([{"ddp": baseline, "fsdp2": other}]))
    monkeypatch.setattr(sys, "argv", ["step.py", "--ranks", str(world_size), "--json", str(tmp_path / "figures.json")])
    assert step.main() == status
    assert "differs by 2.38e-07" in capsys.readouterr().out


def test_step_refuses_an_unknown_engine(capsys):
    with pytest.raises(SystemExit):
        step.parse_options(["--engines", "fsdp3"])
    assert "unknown engines fsdp3; there are ddp" in capsys.readouterr().err
