"""The files in configs/: what the engine and accelerate make of them."""

import dataclasses
import functools
import json
import math
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from finetuning import RESULTS_NAME
from launching import CONFIGS, CPU2, ROOT, SECONDS, launch, launch_command, launch_forked, own_environment
from safetensors.torch import load_file
from trainer_job import CHECKPOINTING

from hf_zero import ZeroConfig

ACCELERATE_CONFIGS = sorted((CONFIGS / "accelerate").glob("*.yaml"))
ZERO_CONFIGS = sorted(CONFIGS.glob("*.yaml"))
KEYS = {
    "stage",
    "grad_accumulation",
    "bucket_bytes",
    "param_dtype",
    "reduce_dtype",
    "broadcast_buffers",
    "nonfinite",
}
KEYS_OF_STAGE_3 = {
    "gather_dtype",
    "prefetch_units",
    "reshard_after_forward",
    "unit_modules",
    "unit_bytes",
}

SAY_WHERE = """
from accelerate import Accelerator
from finetuning import ranks_together
with ranks_together():
    accelerator = Accelerator()
    print(f"rank {accelerator.process_index} of {accelerator.num_processes} on {accelerator.device.type}", flush=True)
"""


def test_every_config_is_there():
    plain = ["zero0.yaml", "zero1.yaml", "zero2.yaml", "zero3.yaml"]
    offloaded = ["one_gpu_7b.yaml", "zero2_offload_cpu.yaml", "zero3_nvme.yaml", "zero3_offload_cpu.yaml"]
    assert [path.name for path in ZERO_CONFIGS] == sorted(plain + offloaded)
    assert [path.stem for path in ACCELERATE_CONFIGS] == ["cpu2", "eight_gpus", "one_gpu", "two_nodes"]


@pytest.mark.parametrize("path", ZERO_CONFIGS, ids=lambda path: path.stem)
def test_zero_config_sets_the_stage_of_its_name_and_known_keys_only(path):
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    stage = 3 if path.stem == "one_gpu_7b" else int(path.stem.removeprefix("zero").partition("_")[0])
    assert set(settings) <= (KEYS | KEYS_OF_STAGE_3 if stage == 3 else KEYS) | {"offload"}
    assert ZeroConfig.from_yaml(path).stage == stage


def test_zero3_shows_every_setting_of_stage_3_with_its_default():
    path = CONFIGS / "zero3.yaml"
    assert set(yaml.safe_load(path.read_text(encoding="utf-8"))) >= KEYS_OF_STAGE_3
    assert {
        field.name for field in dataclasses.fields(ZeroConfig) if field.metadata.get("stage") == 3
    } == KEYS_OF_STAGE_3
    assert ZeroConfig.from_yaml(path) == ZeroConfig(stage=3)


@pytest.mark.parametrize("path", ACCELERATE_CONFIGS, ids=lambda path: path.stem)
def test_accelerate_loads_its_config_and_can_launch_with_it(path):
    config = load_config_from_file(str(path))
    arguments = launch_command_parser().parse_args(["--config_file", str(path), "script.py"])
    launched, _, _ = _validate_launch_command(arguments)
    assert launched.num_processes == config.num_processes
    assert launched.num_machines == config.num_machines
    assert launched.multi_gpu == (config.num_processes > 1)
    assert launched.mixed_precision == config.mixed_precision
    assert math.gcd(launched.num_processes, launched.num_machines) == launched.num_machines


@pytest.mark.timeout(120)
def test_cpu2_starts_two_ranks_that_know_of_each_other(tmp_path):
    script = tmp_path / "say_where.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT / 'scripts')!r})\n{SAY_WHERE}", encoding="utf-8")
    done = launch_forked(script, config=CPU2)
    assert done.returncode == 0, done.stderr
    # Two processes write to one pipe: a line's end may come after the other's line.
    assert sorted(re.findall(r"rank \d of \d on cpu", done.stdout)) == ["rank 0 of 2 on cpu", "rank 1 of 2 on cpu"]


# The files in use, each in a run of a recipe that a run without the file equals bit for bit

_FEW = (
    "--max_train_samples",
    32,
    "--max_eval_samples",
    16,
    "--num_train_epochs",
    1,
    "--per_device_train_batch_size",
    4,
)
_TINY_BERT = (
    *("--config_overrides", "hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=64"),
    *("--max_seq_length", 16),
)
_TRAINER = ("--logging_steps", 1, "--warmup_steps", 0, "--disable_tqdm", "true")
RECIPES = {
    "accelerate": (*_FEW, *_TINY_BERT),
    "bert": (*_FEW, *_TINY_BERT, *_TRAINER),
    "gpt": (*_FEW, *("--config_overrides", "n_embd=32,n_layer=2,n_head=2", "--block_size", 16), *_TRAINER),
}
BF16 = ("--mixed_precision", "bf16")
ONE_THREAD = ("--num_cpu_threads_per_process", 1)
"""As forked ranks have. A launcher gives ranks a number of its own otherwise, and sums of several threads have another order."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run has shown: the loss of each step, or their mean, and its weights."""

    processes: int
    losses: tuple[float, ...]
    weights: dict[str, torch.Tensor]

    def assert_equals(self, other: "Run") -> None:
        assert self.processes == other.processes
        assert self.losses == other.losses and all(map(math.isfinite, self.losses))
        assert self.weights.keys() == other.weights.keys()
        for name, weight in self.weights.items():
            torch.testing.assert_close(weight, other.weights[name], rtol=0, atol=0, msg=name)


def shown_in(output: Path) -> Run:
    results, log = json.loads((output / RESULTS_NAME).read_text(encoding="utf-8")), output / "trainer_state.json"
    losses = [results["train_loss"]]
    if log.is_file():
        losses += [entry["loss"] for entry in json.loads(log.read_text())["log_history"] if "loss" in entry]
    return Run(results["processes"], tuple(losses), load_file(output / "model.safetensors"))


@pytest.fixture(scope="module")
def caches(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("caches")


@pytest.fixture(scope="module")
def run(caches, tmp_path_factory) -> Callable[..., Run]:
    """`run(recipe, zero, *arguments, config=..., flags=...)` of a recipe on a tiny model; one of a kind is run once.

    In forked ranks, which have the environment that the launcher would give them; with `under_launcher` the launcher is started.
    """
    done: dict[tuple, Run] = {}

    def of(
        recipe: str,
        zero: object,
        *arguments: object,
        config: Path = CPU2,
        flags: tuple = (),
        under_launcher: bool = False,
    ) -> Run:
        kind = (recipe, zero, arguments, config, flags, under_launcher)
        if kind not in done:
            output, script = tmp_path_factory.mktemp("run"), ROOT / "scripts" / f"finetune_{recipe}.py"
            words = ("--zero", zero, "--output_dir", output, *RECIPES[recipe], *arguments)
            start = functools.partial(launch, caches=caches) if under_launcher else launch_forked
            ended = start(script, *words, config=config, flags=flags)
            assert ended.returncode == 0, ended.stderr[-4000:]
            done[kind] = shown_in(output)
        return done[kind]

    return of


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_under_the_launcher_is_that_of_forked_ranks(run):
    """So that what other tests find in forked ranks is true of `accelerate launch`. The tests below launch another recipe."""
    zero = CONFIGS / "zero3.yaml"
    run("bert", zero, flags=ONE_THREAD, under_launcher=True).assert_equals(run("bert", zero))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("zero0", "bert"),
        ("zero1", "gpt"),
        ("zero2", "accelerate"),
        ("zero3", "gpt"),
        ("zero2_offload_cpu", "bert"),
        ("zero3_offload_cpu", "accelerate"),
    ],
)
def test_a_run_by_a_zero_config_is_that_of_its_stage_alone(name, recipe, run):
    stage = ZeroConfig.from_yaml(CONFIGS / f"{name}.yaml").stage
    run(recipe, CONFIGS / f"{name}.yaml").assert_equals(run(recipe, stage))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("recipe", ["accelerate", "bert"])
def test_a_run_by_zero3_nvme_on_a_disk_that_is_there_is_that_of_stage_3(recipe, run, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    text = (CONFIGS / "zero3_nvme.yaml").read_text(encoding="utf-8")
    here = tmp_path / "zero3_nvme.yaml"
    here.write_text(text.replace("/local_nvme ", f"{disk} "), encoding="utf-8")
    assert ZeroConfig.from_yaml(here).offload.nvme_path == str(disk)
    run(recipe, here).assert_equals(run(recipe, 3))
    assert not [entry for entry in disk.iterdir() if entry.is_dir()]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_zero3_nvme_as_it_comes_names_the_folder_that_is_not_there(tmp_path):
    words = ("--zero", CONFIGS / "zero3_nvme.yaml", "--output_dir", tmp_path, *RECIPES["bert"])
    ended = launch_forked(ROOT / "scripts" / "finetune_bert.py", *words)
    assert ended.returncode != 0
    assert "/local_nvme" in ended.stderr and "ConfigError" not in ended.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("checkpointing", [(), (f"--{CHECKPOINTING}", "true")], ids=["", "checkpointing"])
def test_a_run_by_one_gpu_7b_is_that_of_bfloat16_on_the_device(checkpointing, run):
    """As its first lines say that it is launched."""
    launched = {"config": CONFIGS / "accelerate" / "one_gpu.yaml", "flags": ("--mixed_precision", "no")}
    moved = run("gpt", CONFIGS / "one_gpu_7b.yaml", *checkpointing, **launched)
    moved.assert_equals(run("gpt", "stage=3,param_dtype=bfloat16", *checkpointing, **launched))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "ranks"), [("one_gpu", 1), ("eight_gpus", 2)])
def test_a_launch_by_an_accelerate_config_for_gpus_trains_under_autocast(name, ranks, run, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config, ranks_flag = CONFIGS / "accelerate" / f"{name}.yaml", ("--num_processes", ranks)
    flags = (*ONE_THREAD, *(() if ranks == 1 else ranks_flag))
    # The launcher itself starts the ranks of one of the files.
    launched = run("accelerate", 2, config=config, flags=flags, under_launcher=ranks > 1)
    assert launched.processes == ranks
    launched.assert_equals(run("accelerate", 2, flags=(*ranks_flag, *BF16)))
    assert launched.losses != run("accelerate", 2, flags=ranks_flag).losses


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_launches_by_two_nodes_are_one_run(caches, run, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    script, config = ROOT / "scripts" / "finetune_accelerate.py", CONFIGS / "accelerate" / "two_nodes.yaml"
    words = ("--zero", 2, "--output_dir", tmp_path, *RECIPES["accelerate"])
    here = (*ONE_THREAD, "--main_process_ip", "127.0.0.1", "--num_processes", 2)
    nodes = [
        subprocess.Popen(
            launch_command(script, *words, config=config, flags=(*here, "--machine_rank", node)),
            cwd=ROOT,
            env=own_environment(caches),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in (0, 1)
    ]
    try:
        # Two launchers and their ranks import at once, beside other tests.
        said = [node.communicate(timeout=2 * SECONDS)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], said[0][-4000:] + said[1][-4000:]
    shown_in(tmp_path).assert_equals(run("accelerate", 2, flags=("--num_processes", 2, *BF16)))
