"""Configs of DeepSpeed, FSDP and accelerate: each key in one list, and a config that is valid, whatever they hold."""

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import hf_zero
from hf_zero import ConfigError, ZeroConfig
from hf_zero.cli.app import app
from hf_zero.foreign.migrate import ACCELERATE, DEEPSPEED, FSDP, Migration, migrate

DS = {
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": 5e8,
        "stage3_param_persistence_threshold": 1e5,
        "offload_optimizer": {"nvme_path": "/scratch", "device": "nvme", "pin_memory": True},
        "mics_hierarchical_params_gather": True,
    },
    "overlap": True,
}
LIKELY = [
    None,
    True,
    False,
    "auto",
    "none",
    "cpu",
    "nvme",
    0,
    1,
    2,
    3,
    4,
    -1,
    8,
    1e5,
    float("nan"),
    "FULL_SHARD",
    "false",
]
LIKELY += [
    "/scratch",
    "\ud800",
    "a: b",
    "fp16",
    "BertLayer,GPT2Block",
    [],
    ["Layer"],
    {},
    {"enabled": True},
    [1],
    "1e5",
    2**70,
]


def leaves(settings: Mapping[Any, Any], prefix: str = "") -> list[str]:
    """Dotted paths of what a table names, below sections; a section that a table takes as one key counts as one."""
    found = []
    for key, value in settings.items():
        if isinstance(value, Mapping) and value and any(isinstance(inner, Leaf) for inner in value.values()):
            found += leaves(value, f"{prefix}{key}.")
        else:
            found.append(f"{prefix}{key}")
    return found


class Leaf:
    """Marks what was drawn for a key, so that a mapping that is a value is no section."""

    def __init__(self, value: Any):
        self.value = value


def bare(settings: Any) -> Any:
    return {k: v.value if isinstance(v, Leaf) else bare(v) for k, v in settings.items()}


@st.composite
def configs(draw: st.DrawFn) -> tuple[dict[str, Any], list[str]]:
    """Keys of one kind of config, and some that nobody knows, with any values; and their dotted paths."""
    table = draw(st.sampled_from([DEEPSPEED, FSDP, ACCELERATE])).table
    paths = draw(st.lists(st.sampled_from(sorted(table)), min_size=1, max_size=12, unique=True))
    paths += draw(st.lists(st.sampled_from(["banana", "zero_optimization.banana", "fsdp_config.banana"]), unique=True))
    settings: dict[str, Any] = {}
    for path in paths:
        *sections, leaf = path.split(".")
        place = settings
        for section in sections:
            place = place.setdefault(section, {})
        place[leaf] = Leaf(draw(st.sampled_from(LIKELY) | st.text(max_size=5) | st.integers() | st.floats()))
    return settings, paths


def keys_of(found: Migration) -> list[str]:
    return [key.key for part in (found.mapped, found.not_needed, found.not_supported) for key in part]


@given(configs())
def test_every_key_is_in_one_list_and_the_yaml_is_a_valid_config(drawn):
    settings, paths = drawn
    known = bare(settings)
    try:
        found = migrate(known)
    except ConfigError as error:
        # A stage that is no stage, which would otherwise be left out without a word.
        if stage := re.search(r": in (\S*(?:stage|strategy)), .* Correct that file\.$", str(error)):
            assert stage[1] in paths
            return
        assert "has no key of" in str(error)
        assert set(paths) <= {"banana", "zero_optimization.banana", "fsdp_config.banana"}
        return
    listed = keys_of(found)
    # A section of another kind of config is one unknown key.
    sections = {path.partition(".")[0] for path in paths}
    assert len(listed) == len(set(listed))
    assert set(listed) <= set(paths) | sections
    assert all(path in listed or path.partition(".")[0] in listed for path in paths)
    assert ZeroConfig.from_dict(yaml.safe_load(found.yaml)) == found.config
    assert all(key.said for part in (found.mapped, found.not_needed, found.not_supported) for key in part)


def test_deepspeeds_settings_have_their_names_here(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(DS))
    found = hf_zero.migrate(path)
    expected = {"stage": 3, "offload": {"optimizer": "nvme", "nvme_path": "/scratch"}}
    assert found.source == "DeepSpeed" and found.config == ZeroConfig.from_dict(expected)
    assert {key.key for key in found.mapped} == {
        "zero_optimization.stage",
        "zero_optimization.offload_optimizer.device",
        "zero_optimization.offload_optimizer.nvme_path",
    }
    unsupported = {key.key: key.said for key in found.not_supported}
    assert set(unsupported) == {"overlap", "zero_optimization.mics_hierarchical_params_gather"}
    assert unsupported["overlap"].startswith("unknown")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"zero_optimization": {}}, {"stage": 0}),
        ({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, {"stage": 2}),
        ({"reshard_after_forward": False, "version": 2}, {"stage": 3, "reshard_after_forward": False}),
        (
            {"fsdp_config": {"fsdp_offload_params": True}},
            {"stage": 3, "offload": {"optimizer": "cpu", "params": "cpu"}},
        ),
        ({"distributed_type": "MULTI_GPU", "num_processes": 8}, {"stage": 0}),
        (
            {"deepspeed_config": {"offload_param_device": "cpu", "zero_stage": 3}},
            {"stage": 3, "offload": {"params": "cpu"}},
        ),
        (
            {"transformer_layer_cls_to_wrap": "BertLayer, GPT2Block"},
            {"stage": 3, "unit_modules": ["BertLayer", "GPT2Block"]},
        ),
    ],
)
def test_other_configs_have_an_equal_here(settings, expected):
    assert migrate(settings).config == ZeroConfig.from_dict(expected)


def test_what_does_not_go_together_is_not_supported_and_says_why():
    found = migrate({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}})
    assert found.config == ZeroConfig(stage=2)
    [key] = found.not_supported
    assert key.key == "zero_optimization.offload_param.device" and "stage 3" in key.said
    twice = migrate({"fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_reshard_after_forward": "NO_SHARD"}})
    assert twice.config == ZeroConfig(stage=3) and "another key sets" in twice.not_supported[0].said


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"banana": 1}', "{", "[" * 5000, "\ufeff"])
def test_what_is_no_config_of_theirs_is_refused(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="hf_zero"):
        migrate(path)


def test_the_command_writes_the_config_and_prints_json(tmp_path):
    path, out = tmp_path / "ds.json", tmp_path / "zero.yaml"
    path.write_text(json.dumps(DS))
    done = CliRunner().invoke(app, ["migrate", str(path), "--write", str(out), "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert ZeroConfig.from_yaml(out) == migrate(path).config
    assert said["yaml"] == out.read_text() and said["source"] == "DeepSpeed" and len(said["mapped"]) == 3
    again = CliRunner().invoke(app, ["migrate", str(path), "--write", str(out)])
    assert again.exit_code == 1 and "already exists" in again.output


def test_a_stage_that_deepspeed_leaves_open_is_chosen_here_too():
    assert migrate({"zero_optimization": {"stage": "auto"}}).config.stage == "auto"
