"""The comparison with peers: engines in processes of their own, what is left out, curves, tables and pictures."""

import json
import socket
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from xml.etree import ElementTree

import curves
import pytest
import shaped_links
import tables
from compare import Comparison, compare, turns
from engines import ALL_PEERS, ENGINES, WORKLOADS, chosen_engines
from launching import ROOT
from ranks import RankFailedError, live_ranks
from shaped_links import carry

TIME_LIMIT_S = 120


class Counter:
    def __init__(self, rank: int, world_size: int, *, start: int) -> None:
        self.rank, self.count = rank, start

    def add(self, number: int) -> int:
        self.count += number
        return 10 * self.count + self.rank

    def fail(self) -> None:
        if self.rank == 1:
            raise ValueError("the reason in words")


def test_live_ranks_keep_what_they_made_and_answer_until_one_fails():
    with pytest.raises(RankFailedError, match=r"(?s)rank 1 failed.*the reason in words"):
        with live_ranks(
            Counter, world_size=2, time_limit_s=TIME_LIMIT_S, keyword_arguments={"start": 1}
        ) as ranks_of_counter:
            assert ranks_of_counter.call("add", 1) == [20, 21]
            assert ranks_of_counter.call("add", 2) == [40, 41]
            ranks_of_counter.call("fail")


def test_packets_on_a_cable_arrive_in_their_order_and_after_its_delay():
    left, left_plug = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    right, right_plug = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    delay_s = 0.2
    cable = get_context("fork").Process(target=carry, args=(left_plug.fileno(), right_plug.fileno(), delay_s))
    cable.start()
    try:
        for sender, receiver in ((left, right), (right, left)):
            receiver.settimeout(TIME_LIMIT_S)
            began = time.monotonic()
            for number in range(5):
                sender.send(b"%d" % number)
            assert [receiver.recv(10) for _ in range(5)] == [b"0", b"1", b"2", b"3", b"4"]
            # Those that were sent together arrive together, not one delay after another.
            assert delay_s <= time.monotonic() - began < 5 * delay_s
    finally:
        cable.terminate()
        cable.join()
        for end in (left, left_plug, right, right_plug):
            end.close()


def test_the_script_says_which_runs_over_links_are_kept_and_forecasts_them(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["shaped_links.py"])
    assert shaped_links.main() == 0
    assert "| 1000 Mbit/s | 30m | hf_zero stage 2 |" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("delay", ["0ms", "2ms"])
def test_engines_are_measured_over_a_link(tmp_path, delay):
    path, quick = tmp_path / "links.json", ("--rounds", "1", "--steps", "1", "--engines", "hf_zero2")
    command = [sys.executable, shaped_links.__file__, "--links", f"1gbit,{delay},tiny", *quick, "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    if "skipped" in done.stdout:
        pytest.skip(done.stdout.strip())
    assert [run["engine"] for run in json.loads(path.read_text())["runs"]] == ["ddp", "hf_zero2"]


def test_each_engine_comes_first_in_some_round():
    assert turns(["a", "b", "c"], 2) == ["a", "b", "c", "b", "c", "a"]


@pytest.mark.slow
def test_an_engine_that_cannot_start_is_left_out_with_its_reason_and_others_are_measured():
    workload = WORKLOADS["tiny"]
    found = compare(
        Comparison(
            engines=("ddp", "fsdp2", "hf_zero2"),
            workload=workload,
            accumulation=2,
            starts=2,
            rounds=1,
            steps=1,
            memory=False,
            # Which FSDP2 has not.
            sizes={"bucket_bytes": 1 << 16},
            time_limit_s=TIME_LIMIT_S,
        )
    )
    assert [row["name"] for row in found["engines"]] == ["ddp", "hf_zero2"]
    assert "bucket_bytes" in found["left_out"]["fsdp2"]["why"]
    assert found["engines"][1]["loss_difference"] < 1e-6
    assert found["starts"] == 2
    assert all(row["first_step_s"] > 0 and row["sent_bytes"] > 0 for row in found["engines"])


def test_a_peer_that_is_not_installed_is_named():
    absent = replace(ENGINES["torchao_8bit"], package="no_such_peer")
    assert absent.hindrance == "no_such_peer is not installed"
    assert ENGINES["ddp"].hindrance is None
    assert {"deepspeed0", "deepspeed3", "fsdp2_kept", "hf_zero2_offload", "hf_zero3_int8"} <= set(ALL_PEERS)
    assert chosen_engines(ALL_PEERS)[0] == "ddp"


def test_a_curve_is_added_to_its_file_and_drawn(tmp_path, monkeypatch):
    def peaks(names: list[str], comparison: Comparison) -> list[dict[str, int]]:
        return [{"peak_bytes": 1000 * comparison.world_size, "sent_bytes": 500} for _ in names]

    monkeypatch.setattr("compare.measure_peaks", peaks)
    path = tmp_path / "curves.json"
    path.write_text(json.dumps({"commit": "0123abc", "curves": {"kept": {"varied": "figures", "points": []}}}))
    monkeypatch.setattr(
        sys, "argv", ["curves.py", "ranks", "--quick", "--engines", "ddp", "hf_zero2", "--json", str(path)]
    )
    assert curves.main() == 0
    record = tables.read_record(path)
    assert record["commit"] and record["command"].startswith("python") and record["load_before"] >= 0
    assert list(record["curves"]) == ["kept", "ranks"]
    assert f"kept 0123abc, ranks {record['commit']}" in record["note"]
    assert [point["value"] for point in record["curves"]["ranks"]["points"]] == [1, 2]
    del record["curves"]["kept"]
    path.write_text(json.dumps(record))
    assert tables.main([str(path), "--out", str(tmp_path / "out")]) == 0
    assert_has_a_dark_version(tmp_path / "out" / "curves-ranks.svg")
    assert "| 2 | hf_zero stage 2 |" in (tmp_path / "out" / "tables.md").read_text()


def assert_has_a_dark_version(picture: Path) -> None:
    """Each color of an element is an attribute, which the style sheet for dark pages can replace."""
    root = ElementTree.parse(picture).getroot()
    [sheet] = [
        each.text for each in root.iter() if each.tag.endswith("style") and "prefers-color-scheme: dark" in each.text
    ]
    named = {
        value for each in root.iter() for name in ("fill", "stroke") if (value := each.get(name, "none")) != "none"
    }
    assert {"#ffffff", "#000000"} <= named and "[fill='#ffffff']" in sheet and "[stroke='#000000']" in sheet
    styled = [each for each in root.iter() if "style" in each.attrib and not each.tag.endswith("text")]
    assert styled == []
    # Names stand below the panels, where they cover no line.
    assert "legend_1" in {each.get("id") for each in root.iter()}


def test_the_command_refuses_a_part_that_it_does_not_have():
    script = ROOT / "scripts" / "bench" / "all.sh"
    done = subprocess.run(["bash", str(script), "speed"], capture_output=True, text=True, timeout=TIME_LIMIT_S)
    assert done.returncode == 2 and "unknown part 'speed'; there are step, curves" in done.stderr


def test_figures_of_an_unknown_kind_are_refused_by_name(tmp_path):
    (tmp_path / "strange.json").write_text("{}")
    with pytest.raises(ValueError, match=r"strange\.json has no tables"):
        tables.read_record(tmp_path / "strange.json")
