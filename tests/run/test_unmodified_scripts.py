"""Scripts that know nothing of hf_zero train with the engine; what their run enters, it leaves again."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import accelerate
import psutil
import pytest
import torch
import torch.distributed as dist
import torch.optim.optimizer as torch_optimizer
from cells import slow
from launching import own_environment, own_port, port_to_meet_on, run_forked
from shared_ranks import run_on_ranks
from torch.distributed.elastic.rendezvous import (
    RendezvousParameters,
    c10d_rendezvous_backend,
    static_tcp_rendezvous,
)
from typer.testing import CliRunner

from hf_zero import ConfigError, ZeroConfig
from hf_zero.cli.app import app
from hf_zero.comm.own_groups import interfaces
from hf_zero.device import ACCELERATORS
from hf_zero.integrations import launcher
from hf_zero.integrations.launcher import launch_of, of_accelerate, script_call
from hf_zero.integrations.unmodified import AfterImport, Door, run_script
from hf_zero.presence.store import LOOPBACK

HERE = Path(__file__).parent
RUN = "hf_zero.run"
SCRIPTS = HERE / "scripts"
ON_CPU = {"ACCELERATE_USE_CPU": "true"}


def losses_of(tmp_path: Path, name: str, zero: object, *arguments: object) -> list:
    """What a script logs on two ranks; without `zero`, under stock accelerate."""
    path = tmp_path / f"{zero}.json"
    said = [str(path) if word == "LOSSES" else word for word in arguments]
    words = (SCRIPTS / name, *said)
    started = words if zero is None else (RUN, "--zero", zero, *words)
    done = run_forked(started[0], started[1:], environment=os.environ | ON_CPU, processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert ("state over 2 of 2 ranks" in done.stdout + done.stderr) == (zero is not None)
    return json.loads(path.read_text())


def ends(way: str, *arguments: object, zero: object = 2) -> subprocess.CompletedProcess:
    """A script that ends in one of its odd ways, on one rank."""
    words = ("--zero", zero, SCRIPTS / "odd_ends.py", way, *arguments)
    return run_forked(RUN, words, environment=os.environ | ON_CPU, processes=1)


@pytest.mark.parametrize("stages", [(1, 3), slow((1, 2, 3))], ids=["some", "every"])
def test_an_accelerate_loop_has_ddps_losses_at_its_stage(tmp_path, stages):
    words = ("plain_loop.py", "LOSSES")
    stock = losses_of(tmp_path, words[0], None, *words[1:])
    for zero in stages:
        assert losses_of(tmp_path, words[0], zero, *words[1:]) == stock


@pytest.mark.slow
def test_every_accelerator_of_a_process_has_the_engine(tmp_path):
    words = ("LOSSES", "one", "two")
    stock = losses_of(tmp_path, "plain_loop.py", None, *words)
    assert losses_of(tmp_path, "plain_loop.py", "stage=2", *words) == stock


@pytest.mark.short_cells("subclass-3")
@pytest.mark.parametrize(("kind", "zero"), [("trainer", 1), ("seq2seq", 2), ("subclass", 3)])
def test_trainers_and_their_subclasses_have_ddps_losses(tmp_path, kind, zero):
    words = ("--kind", kind, "--losses", "LOSSES", "--output_dir", tmp_path / "out", "--max_steps", 3)
    words = (*words, "--per_device_train_batch_size", 4, "--logging_steps", 1, "--report_to", "none")
    # A clip that scales adds the squares of gradients in another order.
    words = (*words, "--max_grad_norm", 100)
    stock = losses_of(tmp_path, "trainers.py", None, *words)
    assert losses_of(tmp_path, "trainers.py", zero, *words) == stock


@pytest.mark.slow
def test_a_search_over_hyperparameters_has_ddps_losses_in_each_trial(tmp_path):
    pytest.importorskip("optuna", reason="Optuna, of the extra `dev`, is not installed")
    words = ("--kind", "search", "--losses", "LOSSES", "--output_dir", tmp_path / "out", "--max_steps", 3)
    words = (
        *words,
        "--per_device_train_batch_size",
        4,
        "--logging_steps",
        1,
        "--report_to",
        "none",
        "--max_grad_norm",
        100,
    )
    stock = losses_of(tmp_path, "trainers.py", None, *words)
    assert len(stock) == 6 and losses_of(tmp_path, "trainers.py", 2, *words) == stock


def test_a_module_is_run_by_its_name():
    environment = os.environ | ON_CPU
    done = run_forked(RUN, ("--zero", 2, "-m", "platform", "--of-its-own"), environment=environment, processes=1)
    assert done.returncode == 1
    # It prints what machine this is, and met no engine.
    assert "Linux" in done.stdout and "built neither an Accelerator nor a Trainer" in done.stderr


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("without_accelerate", "ended without the engine: it built neither an Accelerator nor a Trainer"),
        ("steps_alone", "SGD steps without the engine"),
        ("prepares_nothing", "ended without the engine: it built an Accelerator, but prepared no model"),
        ("another_engine", "deepspeed_plugin, for DeepSpeed"),
        ("fully_sharded", "fsdp_plugin, for FSDP"),
    ],
)
def test_a_script_that_never_meets_the_engine_ends_with_an_error(way, said):
    done = ends(way)
    assert done.returncode == 1 and said in done.stderr, done.stderr[-2000:]


def test_a_script_that_only_evaluates_is_told_that_nothing_was_sharded():
    done = ends("evaluates")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "loss 0." in done.stdout and "evaluation only" in done.stderr


def test_a_scripts_own_traceback_and_status_stay_as_they_are():
    failed = ends("fails")
    assert failed.returncode == 1
    first = failed.stderr[failed.stderr.index("Traceback") :].splitlines()[1]
    assert "odd_ends.py" in first and "LookupError: of the script's own" in failed.stderr
    assert "runpy" not in failed.stderr and "ended without" not in failed.stderr
    assert ends("ends_with_3").returncode == 3


@pytest.mark.parametrize("way", ["own_plugin", "attached_plugin", "own_flag"])
def test_a_scripts_own_config_is_the_runs_or_refused(tmp_path, way):
    words = {"own_flag": lambda zero: ("--output_dir", tmp_path, "--zero", zero)}.get(way, lambda zero: (zero,))
    assert ends(way, *words(2)).returncode == 7
    refused = ends(way, *words(3))
    assert refused.returncode == 1 and "one run got two different configs" in refused.stderr, refused.stderr[-2000:]


def test_help_of_the_script_is_no_error():
    words = ("--zero", 2, SCRIPTS / "trainers.py", "--help")
    done = run_forked(RUN, words, environment=os.environ | ON_CPU, processes=1)
    assert done.returncode == 0 and "--losses" in done.stdout


LAUNCHER_IN_THE_SAME_PROCESS = """
import os, runpy, sys

def execve(path, words, environment):
    os.environ.update(environment)
    sys.argv = list(words[2:])
    runpy.run_module(words[2], run_name="__main__", alter_sys=True)

os.execve = execve
"""
COMMAND = "from hf_zero.cli.app import main\n\nmain()\n"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, slow(2)])
def test_the_command_starts_the_ranks_by_itself(tmp_path, ranks):
    # The short suite's one start of `accelerate launch`, and of `-m hf_zero.run` under it in a new interpreter. The command
    # becomes the launcher: with two ranks in a new interpreter too, with one in the process that the command has had.
    path, command = tmp_path / "losses.json", tmp_path / "command.py"
    command.write_text((LAUNCHER_IN_THE_SAME_PROCESS if ranks == 1 else "") + COMMAND)
    words = ["run", "--zero", 2, "--cpu", "--num-processes", ranks, "--port", own_port()]
    words = [*words, SCRIPTS / "plain_loop.py", path]
    done = run_forked(command, words, environment=own_environment(tmp_path), processes=1)
    said = done.stdout + done.stderr
    assert done.returncode == 0 and f"state over {ranks} of {ranks} ranks" in said, done.stderr[-3000:]
    # accelerate warns about each option that it was not given and that no config file of its own has.
    assert "were not passed to" not in said
    assert json.loads(path.read_text())


# ---- what a run enters, and leaves again ----


def entered() -> tuple:
    hooks = getattr(torch_optimizer, "_global_optimizer_pre_hooks")  # noqa: B009
    return (
        accelerate.Accelerator.__init__,
        tuple(hooks),
        list(sys.meta_path),
        list(sys.argv),
        list(sys.path),
        dict(os.environ),
    )


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "script.py"
    path.write_text("import sys\nseen = sys.argv[1:], sys.path[0], __name__\nraise SystemExit(4)\n")
    return path


def test_what_was_entered_is_undone_however_the_script_ends(script):
    before = entered()
    with Door(ZeroConfig()).opened():
        assert entered()[:3] != before[:3]
        # Its signature is that of the one that it stands for.
        assert accelerate.Accelerator.__init__.__wrapped__ is before[0]
    assert entered() == before
    for text, status in (("raise SystemExit(4)", 4), ("1 / 0", 1), ("x = (", 1), ("", 1)):
        script.write_text(text)
        with pytest.raises(SystemExit) as ended:
            run_script(script_call(["--zero", "2", str(script)]))
        assert ended.value.code == status and entered() == before


def test_a_call_waits_for_an_import_and_leaves_the_loader_as_it_was(tmp_path, monkeypatch):
    (tmp_path / "imported_later.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    before = list(sys.meta_path)
    with AfterImport(
        {"imported_later": lambda module: seen.append(module.value), "json": lambda _: seen.append("json")}
    ):
        assert seen == ["json"]
        module = importlib.import_module("imported_later")
        assert seen == ["json", 1]
    assert "exec_module" not in vars(module.__spec__.loader)
    assert sys.meta_path == before


def test_the_command_line_is_read_up_to_the_script(script, monkeypatch):
    call = script_call(["--zero", "stage=3", str(script), "--zero", "1", "-m", "x"])
    assert call.config == ZeroConfig(stage=3) and call.arguments == ("--zero", "1", "-m", "x") and not call.is_module
    module = script_call(["--zero=1", "-m", "json.tool", "--lr", "3"])
    assert module.is_module and module.script == "json.tool" and module.config == ZeroConfig(stage=1)
    monkeypatch.setenv("HF_ZERO_CONFIG", "1")
    assert script_call([str(script)]).config == ZeroConfig(stage=1)
    assert script_call(["--zero", "0", str(script)]).config == ZeroConfig(stage=0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["SCRIPT"], "no config"),
        (["--zero", "9", "SCRIPT"], "`stage` is 9"),
        (["--zero", "2", "nowhere.py"], "no script 'nowhere.py'"),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_starts(script, words, said, monkeypatch):
    monkeypatch.delenv("HF_ZERO_CONFIG", raising=False)
    with pytest.raises(ConfigError, match=said):
        script_call([str(script) if word == "SCRIPT" else word for word in words])


@pytest.mark.parametrize("kind", ACCELERATORS)
def test_a_rank_starts_on_each_accelerator_of_any_kind(script, kind, monkeypatch, capsys):
    for each in ACCELERATORS:
        found = SimpleNamespace(is_available=lambda own=each: own == kind, device_count=lambda: 4)
        monkeypatch.setattr(torch, each, found, raising=False)
    launch = launch_of(["--zero", "2", str(script)])
    assert "ACCELERATE_USE_CPU" not in launch.environment and "--num_processes 4" in " ".join(launch.command)
    # A kind that hf_zero has never run on is said.
    assert ("compare the first losses" in capsys.readouterr().err) == (kind != "cuda")
    with pytest.raises(ConfigError, match="1 to 4"):
        launch_of(["--zero", "2", str(script)], processes=5)
    assert launch_of(["--zero", "2", str(script)], cpu=True).environment["ACCELERATE_USE_CPU"] == "true"


def test_the_launch_has_the_flags_and_variables_that_ranks_on_a_cpu_need(script):
    words = ["--zero", "2", str(script), "--lr", "3"]
    launch = launch_of(words, processes=2, cpu=True, port=29501)
    said = " ".join(launch.command)
    assert launch.environment.items() >= ON_CPU.items()
    assert "--num_processes 2 --num_machines 1 --multi_gpu" in said and said.endswith(
        f"-m hf_zero.run {' '.join(words)}"
    )
    assert "--multi_gpu" not in launch_of(words, processes=1, cpu=True).command
    # Where nobody says how many ranks: one would shard nothing.
    assert launch_of(words, cpu=True).command == launch_of(words, processes=2, cpu=True).command
    with pytest.raises(ConfigError, match="--num-processes is 0"):
        launch_of(words, processes=0, cpu=True)
    printed = CliRunner().invoke(
        app, ["run", "--zero", "2", "--num-processes", "2", "--cpu", "--json", str(script), "--lr", "3"]
    )
    assert printed.exit_code == 0, printed.output
    document = json.loads(printed.stdout)
    assert document["command"][-4:] == ["2", str(script), "--lr", "3"] and document["environment"] == launch.environment
    refused = CliRunner().invoke(app, ["run", "--zero", "7", str(script)])
    assert refused.exit_code == 1 and "`stage` is 7" in refused.output


def listened_on() -> set[str]:
    """The addresses at which this process listens."""
    return {each.laddr.ip for each in psutil.Process().net_connections("inet") if each.status == psutil.CONN_LISTEN}


def makes_the_launchers_stores(rank: int, world_size: int) -> list[set[str]]:
    """Addresses of the stores that torchrun makes: at a port that was chosen, and the two of `--standalone` if that is taken."""
    found, stores = [], []

    def launched() -> None:
        settings = {"min_nodes": 1, "max_nodes": 1, "run_id": "test", "rank": 0}
        chosen = RendezvousParameters("static", f"{LOOPBACK}:{port_to_meet_on()}", **settings)
        standalone = RendezvousParameters("c10d", "localhost:0", **settings)
        for make in (
            lambda: static_tcp_rendezvous.create_rdzv_handler(chosen).next_rendezvous(),
            lambda: c10d_rendezvous_backend.create_backend(standalone),
            lambda: dist.TCPStore(host_name=LOOPBACK, port=0, is_master=True, multi_tenant=True),
        ):
            stores.append(make())
            found.append(listened_on())
        # The last one answers.
        dist.TCPStore(LOOPBACK, stores[-1].port, is_master=False).set("key", "value")
        assert stores[-1].get("key") == b"value"

    # torch's record of an event inspects every module that is imported.
    quiet = mock.patch.object(c10d_rendezvous_backend, "construct_and_record_rdzv_event")
    with quiet, mock.patch("accelerate.commands.accelerate_cli.main", launched):
        launcher.main()
    return found


def test_the_launchers_stores_listen_on_the_loopback_address_alone():
    assert run_on_ranks(makes_the_launchers_stores, world_size=1) == [[{LOOPBACK}] * 3]


def test_gloo_listens_on_the_loopback_interface_unless_another_is_set(script, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    name = launch_of(["--zero", "2", str(script)], cpu=True).environment["GLOO_SOCKET_IFNAME"]
    assert LOOPBACK in interfaces()[name]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert "GLOO_SOCKET_IFNAME" not in launch_of(["--zero", "2", str(script)], cpu=True).environment


LISTENS = """
import psutil, torch
from accelerate import Accelerator

model = torch.nn.Linear(4, 4)
accelerator = Accelerator()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
accelerator.backward(model(torch.ones(2, 4)).sum())
optimizer.step()
for process in (psutil.Process(), psutil.Process().parent()):
    found = {each.laddr.ip for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN}
    print("LISTENS", sorted(found), flush=True)
"""


@pytest.mark.slow
def test_a_run_on_one_machine_listens_on_the_loopback_address_alone(tmp_path):
    (tmp_path / "listens.py").write_text(LISTENS)
    command = [sys.executable, "-c", COMMAND, "run", "--zero", "2", "--cpu", "--port", str(own_port())]
    environment = own_environment(tmp_path)
    done = subprocess.run(
        [*command, tmp_path / "listens.py"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line for line in done.stdout.splitlines() if line.startswith("LISTENS")] == [f"LISTENS ['{LOOPBACK}']"] * 4


ALST = """
deepspeed_config: {zero_stage: 3, offload_optimizer_device: cpu}
distributed_type: DEEPSPEED
mixed_precision: bf16
num_processes: 4
parallelism_config:
  parallelism_config_dp_shard_size: 2
  parallelism_config_sp_size: 2
  parallelism_config_sp_backend: deepspeed
  parallelism_config_sp_seq_length_is_variable: true
"""


@pytest.mark.extra("foreign")
def test_a_yaml_of_accelerate_says_stage_ranks_precision_and_sequences(tmp_path):
    path = tmp_path / "alst.yaml"
    path.write_text(ALST)
    said = of_accelerate(str(path))
    assert ZeroConfig.of(said.pop("zero")) == ZeroConfig.of({"stage": 3, "offload": {"optimizer": "cpu"}})
    assert said == {"processes": 4, "mixed_precision": "bf16", "sp": 2}
    assert of_accelerate("3") == of_accelerate(None) == {}
    path.write_text(ALST.replace("dp_shard_size: 2", "cp_size: 2").replace("sp_size: 2", "sp_size: 1"))
    with pytest.raises(ConfigError, match="parallelism_config_cp_size: context parallelism is not available"):
        of_accelerate(str(path))


def test_a_launch_tells_the_ranks_how_many_share_a_sequence():
    words = ("--zero", "3", str(SCRIPTS / "plain_loop.py"))
    said = launch_of(words, processes=4, cpu=True, sp=2).environment
    assert said["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true" and said["PARALLELISM_CONFIG_SP_SIZE"] == "2"
    assert "PARALLELISM_CONFIG_SP_SIZE" not in launch_of(words, processes=4, cpu=True).environment
    with pytest.raises(ConfigError, match="--sp is 3; allowed: a number that divides the 4 ranks"):
        launch_of(words, processes=4, cpu=True, sp=3)
