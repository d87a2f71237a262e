"""`hf-zero plan`: the table, JSON, YAML and picture of a plan, and what it refuses."""

import io
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from cells import slow
from command_runs import hf_zero, refusals
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from training import bert, gpt2
from transformers import GPT2Config, GPT2LMHeadModel

from hf_zero import ConfigError, ZeroConfig, make_plan
from hf_zero.device import rounded
from hf_zero.planner.layouts import CONTEXT_BYTES
from hf_zero.planner.meta_models import checkpointing_argument
from hf_zero.planner.search import choose, duration
from hf_zero.planner.tables import table_of

pytestmark = pytest.mark.timeout(100)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    size = {"n_embd": 128, "n_layer": 2, "n_head": 4, "vocab_size": 1000, "bos_token_id": 0, "eos_token_id": 0}
    GPT2Config(**size, architectures=["GPT2LMHeadModel"]).save_pretrained(folder)
    return folder


def test_a_plan_is_a_table_a_file_and_a_picture(config, tmp_path):
    written, picture = tmp_path / "zero.yaml", tmp_path / "plan.png"
    result = hf_zero(
        *("plan", config / "config.json", "--gpus", 4, "--seq", 64, "--host-memory", "64GB", "--disk", "1TB"),
        *("--write", written, "--png", picture),
    )
    assert result.exit_code == 0, result.output
    for words in ("DDP", "stage 3, all nvme", "take this", "saved", "a micro-batch of 1 x 64 a rank, 1 a step: 4 rows"):
        assert words in result.output
    [reason] = [line for line in result.output.splitlines() if "fastest" in line]
    assert ZeroConfig.from_yaml(written).stage in (0, 1, 2, 3) and reason in written.read_text()
    # No background, so that the picture fits a light page and a dark one; nothing in it is black.
    pixels = pytest.importorskip("matplotlib.image").imread(picture)
    assert not pixels[0, 0, 3] and pixels[..., :3].max(axis=-1)[pixels[..., 3] > 0.9].min() > 0.3


def test_json_is_one_document_with_every_set_up(config):
    result = hf_zero("plan", config, "--gpus", 8, "--nodes", 2, "--json", "--seq", 32)
    found = json.loads(result.stdout)
    names = [each["name"] for each in found["set_ups"]]
    assert names[:2] == ["DDP", "stage 0"] and found["recommended"] in names
    assert all(
        each["device_bytes"] == sum(each["device"].values()) and each["step"]["step_s"] > 0 for each in found["set_ups"]
    )


def test_a_plan_where_nothing_fits_says_what_is_short_and_exits_with_1(config):
    result = hf_zero("plan", config, "--gpu-memory", "100MB", "--seq", 32)
    assert result.exit_code == 1 and "Nothing fits" in result.output


def test_a_plan_names_the_part_with_which_something_would_fit(tmp_path):
    size = {"n_embd": 64, "n_layer": 6, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    GPT2Config(**size, vocab_size=150000, architectures=["GPT2LMHeadModel"]).save_pretrained(tmp_path)
    asked = ("plan", tmp_path, "--gpus", 2, "--seq", 1024, "--batch", 8)
    whole = hf_zero(*asked, "--gpu-memory", "8GB")
    assert whole.exit_code == 1 and "Its largest part is logits" in whole.output
    said = " ".join(whole.output.split())
    assert "With the loss in chunks, stage 0 fits" in said and 'Use SFTConfig(loss_type="chunked_nll")' in said
    chunked = json.loads(hf_zero(*asked, "--gpu-memory", "8GB", "--chunked-loss", "--json").stdout)
    assert chunked["recommended"] is not None and chunked["activations"]["logits_bytes"] == 0
    needed = {each["name"]: each["device_bytes"] for each in chunked["set_ups"]}
    assert f"stage 0 fits: {needed['stage 0'] / 1e9:.2f} GB a rank" in said
    least = min(needed.values())
    # What a forward saves, too, has no room: layers are recomputed, or their activations go to host memory.
    both = " ".join(hf_zero(*asked, "--gpu-memory", int(0.75 * least)).output.split())
    assert "With the loss in chunks and activation checkpointing," in both
    # For Trainer, and for a script's own loop.
    argument = checkpointing_argument()
    assert f"TrainingArguments({argument}=True), or model.{argument}_enable() before prepare" in both
    assert callable(getattr(GPT2LMHeadModel, f"{argument}_enable"))
    moved = hf_zero(
        *asked, "--gpu-memory", int(0.75 * least), "--chunked-loss", "--host-memory", "64GB", "--offload-activations"
    )
    assert moved.exit_code == 0, moved.output


@pytest.fixture(scope="module")
def wide():
    """Matrices of 50 million elements, whose state is larger than the activations of a few rows."""
    with torch.device("meta"):
        return GPT2LMHeadModel(
            GPT2Config(n_embd=1024, n_layer=4, n_head=8, vocab_size=1000, bos_token_id=0, eos_token_id=0)
        )


def test_a_plan_steps_state_on_the_host_if_the_device_has_no_room_for_gradients(wide):
    weights_bytes = sum(p.nbytes for p in wide.parameters())
    others_bytes = CONTEXT_BYTES + sum(buffer.nbytes for buffer in wide.buffers())
    found = []
    for less in (0, 1):
        # Parameters and gradients may need half of the memory.
        plan = make_plan(wide, gpu_memory=4 * weights_bytes + others_bytes - less, host_memory="64GB", seq=16)
        found += [each for each in plan.candidates if each.name == "stage 2, state cpu"]
    there, on_host = found
    assert "gradients" not in there.forecast.host and on_host.forecast.host["gradients"] >= weights_bytes
    assert on_host.forecast.device_bytes < there.forecast.device_bytes
    # A pass of the host over 28 bytes of a parameter's state, and three over its gradient's 4 bytes.
    assert on_host.step_s - there.step_s > 40 * weights_bytes / 4 / 60e9


def test_a_plan_names_a_part_that_is_faster_than_offload(wide):
    options = {"host_memory": "64GB", "seq": 64, "batch": 32}
    roomy = make_plan(wide, gpu_memory="64GB", **options)
    assert roomy.choice.candidate.name == "DDP" and not any("Faster" in line for line in roomy.choice.why)
    [needed] = [each.forecast.device_bytes for each in roomy.candidates if each.name == "stage 1, state cpu"]
    tight = make_plan(wide, gpu_memory=round(needed / 0.92) + 1, **options)
    chosen = tight.choice.candidate
    assert chosen.name == "stage 1, state cpu"
    [line] = [line for line in tight.choice.why if line.startswith("Faster: ")]
    assert line.startswith("Faster: with half the rows per micro-batch and twice as many micro-batches, stage 0 fits")
    assert f"instead of {duration(chosen.step_s)}" in line and "twice gradient_accumulation_steps" in line


def test_a_plan_says_from_which_model_and_disk_on_files_pay_off(wide):
    options = {"gpu_memory": "64GB", "disk": "1TB", "seq": 64, "batch": 32}
    roomy, tight = (make_plan(wide, host_memory=memory, **options) for memory in ("64GB", "100MB"))
    by_name = {each.name: each for each in roomy.candidates}
    in_memory, in_files = by_name["stage 1, state cpu"], by_name["stage 1, state nvme"]
    [line] = [line for line in roomy.choice.why if line.startswith("Files do not pay off below ")]
    most = int(line.split()[6].replace(",", ""))
    assert most / roomy.parameters == pytest.approx(64e9 / in_memory.forecast.host_bytes, rel=1e-3)
    assert (
        f"{in_files.step_s / in_memory.step_s:.1f} times as long as stage 1, state cpu: a disk of 3 GB/s is busy"
        in line
    )
    least_gbs = float(line.split("a disk below ")[1].split()[0])
    # The same step with a disk of this rate.
    step_s = in_files.step.without_disk_s + in_files.step.disk_s * 3 / least_gbs
    assert step_s == pytest.approx(3 * in_memory.step_s, rel=0.01)
    # Without room in host memory, files are the only way, and only the disk counts.
    assert not any("do not pay off" in line for line in tight.choice.why)
    assert any("a disk below" in line for line in tight.choice.why)


@pytest.mark.slow
def test_ranks_of_a_sequence_have_a_part_of_its_activations_and_of_its_work(config, tmp_path):
    def planned(*arguments) -> dict:
        return json.loads(hf_zero("plan", config, "--gpus", 4, "--batch", 2, "--json", *arguments).stdout)

    whole, part, alone = planned("--seq", 1024), planned("--seq", 1024, "--sp-size", 2), planned("--seq", 512)
    assert part["activations"]["peak_bytes"] == alone["activations"]["peak_bytes"]
    # Attention of all tokens, by half of the heads.
    assert part["activations"]["flops"] == whole["activations"]["flops"] // 2 > alone["activations"]["flops"]
    of_stage_2 = [next(each for each in plan["set_ups"] if each["name"] == "stage 2") for plan in (whole, part)]
    states = [{name: n for name, n in each["device"].items() if name != "activations"} for each in of_stage_2]
    assert states[0]["optimizer state"] == states[1]["optimizer state"]
    assert of_stage_2[0]["step"]["step_s"] > of_stage_2[1]["step"]["step_s"]
    assert "DDP" in [each["name"] for each in whole["set_ups"]]
    assert "DDP" not in [each["name"] for each in part["set_ups"]]
    written = tmp_path / "zero.yaml"
    said = hf_zero("plan", config, "--gpus", 4, "--sp-size", 2, "--seq", 1024, "--write", written).output
    assert "1 x 1024 over 2 ranks, 1 a step:" in " ".join(said.split())
    assert "hf-zero run --sp 2" in written.read_text()


def test_a_plan_says_whether_fewer_bits_pay_off_on_the_given_links(config):
    def line_at(node_gbps: float | None) -> str:
        why = make_plan(config, gpus=4, seq=64, node_gbps=node_gbps, peak_tflops=1.0).choice.why
        [found] = [line for line in why if line.startswith("Links of")]
        return found

    slow_line, fast_line = line_at(1), line_at(None)
    assert "Links of 0.125 GB/s: with `" in slow_line and "`comm.gradients: int8`" in slow_line
    saved, usual = (float(words.split()[0]) for words in slow_line.split("a step takes ")[1].split("instead of "))
    assert saved < usual / 2
    # The limit that the line of fast links names is where the advice changes.
    assert "do not pay off" in fast_line
    limit = 8 * float(fast_line.split("below about ")[1].split()[0])
    assert "do not pay off" in line_at(1.3 * limit) and "do not pay off" not in line_at(0.7 * limit)


def test_adapters_leave_little_to_train(config):
    pytest.importorskip("peft")
    both = [json.loads(hf_zero("plan", config, "--json", "--seq", 32, *more).stdout) for more in ((), ("--lora", 4))]
    assert both[1]["trained"] < both[0]["trained"] / 4
    state = [next(each for each in plan["set_ups"] if each["name"] == "DDP")["device"] for plan in both]
    assert state[1]["optimizer state"] < state[0]["optimizer state"] / 4 and state[1]["frozen"] > 0


@pytest.mark.parametrize(
    "says", [slow({"load_in_8bit": True}), slow({"load_in_4bit": True}), {"load_in_4bit": True, "double": True}]
)
def test_a_base_that_its_config_calls_quantized_is_planned_as_the_loaded_one(says, tmp_path):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes, of the extra `dev`, is not installed")
    from packed_bases import adapted, save_bases

    says = {{"double": "bnb_4bit_use_double_quant"}.get(name, name): value for name, value in says.items()}
    bases = save_bases(tmp_path)
    loaded = make_plan(adapted(bases, "llama", says), gpus=2, on_cpu=True, gpu_memory="1GB", seq=16, batch=2)
    path = tmp_path / "llama" / "config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "bitsandbytes", **says}})
    )
    named = make_plan(path, gpus=2, on_cpu=True, gpu_memory="1GB", seq=16, batch=2, lora=4, dtype="float32")
    for one, other in zip(loaded.candidates, named.candidates, strict=True):
        assert one.forecast.device == pytest.approx(other.forecast.device, rel=0.01)
    of_base = {each.forecast.name: each.forecast.device["frozen"] for each in named.candidates}
    assert of_base["stage 3"] < 0.56 * of_base["stage 2"]
    assert "only adapters on them can be trained. Plan with --lora" in refusals("plan", path, "--seq", 16)[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("no-such/model",), "HF_HUB_OFFLINE is set"),
        (("a/b/c",), "neither a local folder or config.json"),
        (("missing.json",), "neither a local folder or config.json"),
        (("CONFIG", "--gpu-memory", "lots"), "gpu_memory"),
        (("CONFIG", "--gpus", "0"), "gpus"),
        (("CONFIG", "--seq", "100000"), "reads at most 1024"),
        (("CONFIG", "--gpus", "4", "--sp-size", "3"), "a number that divides the 4 ranks"),
        (("CONFIG", "--gpus", "4", "--sp-size", "2", "--tp-size", "2"), "1 together with tp_size or ep_size"),
        (("CONFIG", "--seq", "32", "--write", "/proc/no/such"), "No such file or directory: '/proc/no/such'"),
        (("CONFIG", "--seq", "32", "--write", "/dev/stdout"), "/dev/stdout is a link or not a regular file"),
    ],
)
def test_a_request_that_cannot_be_planned_is_refused_in_one_line(config, arguments, said):
    [line] = refusals("plan", *(str(config) if each == "CONFIG" else each for each in arguments))
    assert said in line


def test_a_folder_without_an_architecture_or_of_a_stranger_is_refused(tmp_path):
    GPT2Config(architectures=["EvilModel"]).save_pretrained(tmp_path)
    assert "is not in transformers" in refusals("plan", tmp_path)[-1]
    assert "has no config.json" in refusals("plan", tmp_path.parent)[0]


def test_a_picture_without_matplotlib_is_refused_after_the_plan_is_printed(config, monkeypatch, tmp_path):
    monkeypatch.setattr("hf_zero.planner.picture.find_spec", lambda name: None)
    result = hf_zero("plan", config, "--seq", "32", "--png", tmp_path / "plan.png")
    assert result.exit_code == 1 and "pip install matplotlib" in result.stderr and "stage" in result.stdout


@pytest.mark.slow
def test_a_backend_that_is_missing_is_no_traceback(config, tmp_path):
    picture, start = tmp_path / "plan.png", "from hf_zero.cli.app import main; main()"
    command = [sys.executable, "-c", start, "plan", str(config), "--seq", "32", "--png", str(picture)]
    asked = subprocess.run(command, env={**os.environ, "MPLBACKEND": "missing"}, capture_output=True, text=True)
    assert asked.returncode == 1 and asked.stderr.rstrip().endswith("Unset MPLBACKEND."), asked.stderr
    assert "Traceback" not in asked.stderr and not picture.exists()


def test_a_model_in_hand_is_planned_with_its_own_optimizer():
    model = bert()
    plans = [
        make_plan(model, gpus=2, on_cpu=True, gpu_memory="1GB", optimizer=optimizer(model.parameters()))
        for optimizer in (torch.optim.AdamW, torch.optim.SGD)
    ]
    held = [plan.candidates[0].forecast.device.get("optimizer state", 0) for plan in plans]
    assert held[0] > 0 == held[1]
    with pytest.raises(ConfigError, match="no option 'gpu'"):
        make_plan(gpt2(), gpu=3)


def test_importing_the_package_loads_no_planner():
    assert "make_plan" in dir(sys.modules["hf_zero"])


@pytest.fixture(scope="module")
def planned(config):
    return make_plan(config, gpus=4, seq=64, disk="1TB")


def table_lines(plan, width: int, **details: bool) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(table_of(plan, console, **details))
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 80, 120, 250])
def test_a_plan_is_as_wide_as_the_terminal_and_names_the_columns_for_which_there_is_no_room(planned, width):
    lines = table_lines(planned, width, verbose=True)
    table = [line for line in lines if line[:1] in "┏┃┡│└"]
    assert table and max(map(len, table)) <= width
    # Set-ups and numbers are whole; the reason why a set-up fits may go on in the next line.
    assert "…" not in "".join(table) and any("stage 2, state cpu" in line for line in table)
    said = " ".join("".join(line.rpartition("│")[0].rpartition("│")[2] for line in table).split())
    assert "MB of host memory, none was given" in said and "in all" in "".join(table) and " 0 MB" not in said
    assert ("left out: " in "".join(lines)) == (width < 250)
    # The kinds of memory, for which details are asked, are left out after times and peaks of saves.
    assert width < 120 or {"weights", "activations"} <= {cell.strip() for cell in table[1].split("┃")}


@pytest.mark.parametrize("width", [80, 120])
def test_a_plan_without_details_has_one_line_a_set_up(planned, width):
    lines = table_lines(planned, width)
    [head], rows = ([line for line in lines if line[:1] == mark] for mark in "┃│")
    assert head.split("┃")[1:4] == [f" {'set-up':19} ", " saved ", " in all "] and len(head) <= width
    assert {len(row) for row in rows} == {len(head)} and "…" not in "".join(rows)
    assert [row.split("│")[1].strip() for row in rows] == [each.name for each in planned.candidates]
    assert not any(word in head for word in ("weights", "activations", "waits", "MFU")) and "left out" not in str(lines)
    least = min(planned.candidates, key=lambda each: each.forecast.device_bytes)
    saved = planned.candidates[0].forecast.device_bytes - least.forecast.device_bytes
    assert float(rows[planned.candidates.index(least)].split("│")[2]) == pytest.approx(saved / 1e9, abs=0.005)


@pytest.mark.parametrize(
    ("seconds", "claim"),
    [
        ((1.0, 1.0, 2.0), "DDP fits and is fastest: "),
        ((1.0, 0.98, 2.0), "DDP fits and is simplest of the fast ones (2.1 % slower than stage 0, the fastest): "),
        ((1.0, 0.9999, 2.0), "DDP fits and is simplest of the fast ones (0.1 % slower than stage 0, the fastest): "),
        ((1.0, 0.9, 2.0), "stage 0 fits and is fastest: "),
        (None, "DDP fits and is simplest (step times are not known): "),
    ],
)
def test_the_reason_for_a_set_up_is_true_of_the_step_times(planned, seconds, claim):
    tried = [
        replace(each, step=None if seconds is None else replace(each.step, step_s=seconds[index]))
        for index, each in enumerate(planned.candidates[:3])
    ]
    assert choose(tried, planned.room).why[0].startswith(claim)


@pytest.mark.parametrize("option", ["--gpu-memory", "--host-memory", "--disk"])
def test_a_memory_without_a_unit_is_not_taken_for_bytes(config, option):
    assert "1 MiB or more, with its unit: '24GB'" in refusals("plan", config, "--seq", "32", option, "24")[0]


@given(value=st.floats(1e-6, 1e9), digits=st.integers(2, 4))
def test_numbers_in_sentences_have_no_exponent(value, digits):
    said = rounded(value, digits)
    assert "e" not in said.lower() and float(said) == pytest.approx(value, rel=10.0 ** (1 - digits))


def test_rates_and_times_in_sentences_have_no_exponent():
    assert [rounded(value, 2) for value in (187.4, 1.94, 0.0019)] == ["190", "1.9", "0.0019"]
    assert duration(0.99996) == "1000 ms" and duration(0.0274) == "27.4 ms"
