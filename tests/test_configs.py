"""The files in configs/: what the engine and accelerate make of them."""

import dataclasses
import math
import re

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from launching import CPU2, ROOT, launch

from hf_zero import ZeroConfig

CONFIGS = ROOT / "configs"
ACCELERATE_CONFIGS = sorted((CONFIGS / "accelerate").glob("*.yaml"))
ZERO_CONFIGS = sorted(CONFIGS.glob("*.yaml"))
KEYS = {
    "stage",
    "grad_accumulation",
    "bucket_bytes",
    "grad_buffers",
    "param_dtype",
    "reduce_dtype",
    "overlap_param_gather",
    "broadcast_buffers",
    "check_nonfinite",
}
KEYS_OF_STAGE_3 = {"prefetch_units", "reshard_after_forward", "persist_below_numel", "unit_modules", "comm"}

SAY_WHERE = """
from accelerate import Accelerator
from recipes.ranks import ranks_together
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
    } < KEYS_OF_STAGE_3
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
    done = launch(script, caches=tmp_path, config=CPU2)
    assert done.returncode == 0, done.stderr
    # Two processes write to one pipe: a line's end may come after the other's line.
    assert sorted(re.findall(r"rank \d of \d on cpu", done.stdout)) == ["rank 0 of 2 on cpu", "rank 1 of 2 on cpu"]
