"""Every way of writing a config gives the same object; every wrong one a sentence that helps."""

import dataclasses
import json
import re
import typing

import numpy as np
import pytest
import torch
import yaml

from hf_zero import ZeroPlugin
from hf_zero.buckets.precision import check_cast_owner, resolve_casts
from hf_zero.config import (
    CheckpointConfig,
    CommConfig,
    ConfigError,
    OffloadConfig,
    OuterConfig,
    ZeroConfig,
    parse_bytes,
)
from hf_zero.config import zero as typed_settings
from hf_zero.config.checks import CUT

SETTINGS = {"stage": 1, "bucket_bytes": "2MiB", "grad_accumulation": "local", "comm": {"timeout_s": 60}}


def test_yaml_dict_and_flag_agree(tmp_path):
    path = tmp_path / "zero.yaml"
    path.write_text(yaml.safe_dump(SETTINGS))
    expected = ZeroConfig(stage=1, bucket_bytes=2 * 2**20, grad_accumulation="local", comm=CommConfig(timeout_s=60))
    assert ZeroConfig.from_dict(SETTINGS) == expected
    assert ZeroConfig.of(str(path)) == ZeroConfig.of(path) == expected
    assert ZeroConfig.of("stage=1,bucket_bytes=2MiB,grad_accumulation=local,comm.timeout_s=60") == expected
    assert ZeroConfig.from_dict(expected.to_dict()) == expected


def test_a_number_is_a_stage():
    assert ZeroConfig.of(1) == ZeroConfig.of("1") == ZeroConfig(stage=1)
    assert ZeroConfig.of(None) == ZeroConfig() == ZeroConfig.of({})


def test_frozen_and_keyword_only():
    with pytest.raises(AttributeError):
        ZeroConfig().stage = 1
    with pytest.raises(TypeError):
        ZeroConfig(2)


class Awkward:
    """Answers nothing that it is asked."""

    def _raises(self, *_: object) -> None:
        raise ArithmeticError("not of ours")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __len__ = __str__ = __repr__ = _raises
    __int__ = __float__ = __index__ = __iter__ = __getitem__ = __contains__ = _raises
    __hash__ = object.__hash__


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(2),
        torch.zeros(1),
        torch.zeros(0),
        np.zeros(2),
        np.zeros((1, 1)),
        [torch.zeros(2)],
        Awkward(),
        {Awkward(): 1},
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("kind", [ZeroConfig, OffloadConfig, CommConfig, OuterConfig, CheckpointConfig])
def test_an_object_in_the_place_of_any_setting_is_refused_by_the_settings_name(kind, value):
    for name in kind.__dataclass_fields__:
        with pytest.raises(ConfigError, match=rf"`(\w+\.)*{name}` is "):
            kind(**{name: value})


@pytest.mark.parametrize(
    ("taken_out", "value"),
    [(key, value) for key in CUT for value in ([key.split(": ")[1]] if ": " in key else ["none", "auto", 3])],
)
def test_a_setting_that_was_taken_out_is_refused_by_name_with_what_to_do(taken_out, value, tmp_path):
    name, nested = taken_out.split(": ")[0], value
    for key in reversed(name.split(".")):
        nested = {key: nested}
    path = tmp_path / "zero.yaml"
    path.write_text(yaml.safe_dump(nested))
    for said in (nested, str(path), f"{name}={value}", f"stage=3,{name}={value}"):
        with pytest.raises(ConfigError, match=rf"`{re.escape(taken_out)}` was removed from hf_zero") as error:
            ZeroConfig.of(said)
        assert CUT[taken_out] in str(error.value) and len(str(error.value).split()) <= 35


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"stagge": 2}, "unknown key `stagge`; the most similar known key is `stage`"),
        (
            {"offload": {"optimzer": "cpu"}},
            "unknown key `offload.optimzer`; the most similar known key is `offload.optimizer`",
        ),
        ({"learning_rate": 1e-3}, "unknown key `learning_rate`; set it in the training arguments or in the script"),
        ({"humidity": 1}, "unknown key `humidity`; no known key is similar. Known: stage,"),
        ({"stage": True}, "`stage` is True"),
        ({"stage": "two"}, "`stage` is 'two'"),
        ({"stage": "2.0"}, "`stage` is '2.0'"),
        ({"check_replicas_every": "-1"}, "`check_replicas_every` is -1"),
        ({"stage": 4}, "`stage` is 4; allowed: 0, 1, 2, 3"),
        ({"kernels": "fused"}, "`kernels` is 'fused'; allowed: auto, always, never"),
        ({"stage": 2, "prefetch_units": 3}, "`prefetch_units` needs stage 3"),
        ({"stage": 3, "unit_modules": "GPT2 Block"}, "auto, a class name such as GPT2Block"),
        (
            {"stage": 3, "reshard_after_forward": "never"},
            "`reshard_after_forward` is 'never'; allowed: True, False, auto",
        ),
        ({"offload": {"optimizer": "disk"}}, "`offload.optimizer` is 'disk'; allowed: none, cpu, nvme"),
        ({"offload": {"optimizer": "nvme"}}, "`offload.optimizer: nvme` needs `offload.nvme_path`"),
        ({"offload": {"optimizer": "cpu", "nvme_path": "/x"}}, "`offload.nvme_path` needs `offload.optimizer: nvme`"),
        ({"offload": {"optimizer": "nvme", "nvme_path": 3}}, "`offload.nvme_path` is 3; allowed: the path of a folder"),
        ({"offload": {"params": "disk"}}, "`offload.params` is 'disk'; allowed: none, cpu, nvme"),
        ({"offload": {"params": "cpu"}}, "`offload.params: cpu` needs stage 3"),
        ({"stage": 3, "offload": {"params": "nvme"}}, "`offload.params: nvme` needs `offload.nvme_path`"),
        ({"offload": {"activations": "nvme"}}, "`offload.activations: nvme` is not built yet in this version; use cpu"),
        ({"offload": {"ratio": 0.5}}, "`offload.ratio` is 0.5, the offloaded fraction of the state, but"),
        ({"offload": {"ratio": 2}}, "`offload.ratio` is 2; allowed: a number above 0, up to 1"),
        ({"offload": "cpu"}, "`offload` is 'cpu'; allowed: a mapping of optimizer, params"),
        ({"comm": {"shard_group_size": 4.5}}, "`comm.shard_group_size` is 4.5; allowed: auto, a whole number from 2"),
        ({"comm": {"timeout_s": 0}}, "`comm.timeout_s` is 0; allowed: auto, a number of seconds from 0.001"),
        ({"param_dtype": "bf16"}, "`param_dtype` is 'bf16'; allowed: auto, float32, bfloat16, float16"),
        ({"stage": 3, "gather_dtype": "float16"}, "`gather_dtype` is 'float16'; allowed: auto, float32, bfloat16"),
        ({"gather_dtype": "bfloat16"}, "`gather_dtype` needs stage 3"),
        (
            {"stage": 3, "gather_dtype": "bfloat16", "param_dtype": "float16"},
            "`gather_dtype: bfloat16` needs float32 parameters, but `param_dtype: float16` leaves none",
        ),
        ({"bucket_bytes": -1}, "`bucket_bytes` is -1; allowed: a number of bytes above 0"),
        ({"bucket_bytes": "many"}, "`bucket_bytes` is 'many'"),
        ({"stage": 1, "grad_accumulation": "sharded"}, "`grad_accumulation: sharded` needs stage 2"),
        ({"broadcast_buffers": "yes"}, "`broadcast_buffers` is 'yes'; allowed: true, false"),
    ],
)
def test_wrong_settings_name_field_value_and_what_is_allowed(settings, says):
    with pytest.raises(ConfigError) as error:
        ZeroConfig.from_dict(settings)
    assert says in str(error.value)


def test_missing_and_broken_files(tmp_path):
    (tmp_path / "zero2.yaml").write_text("stage: 2")
    with pytest.raises(ConfigError, match=r"no file .*that folder holds zero2\.yaml"):
        ZeroConfig.of(str(tmp_path / "zero3.yaml"))
    (tmp_path / "broken.yaml").write_text("stage: [2")
    with pytest.raises(ConfigError, match="is not valid YAML"):
        ZeroConfig.of(str(tmp_path / "broken.yaml"))
    (tmp_path / "list.yaml").write_text("- stage")
    with pytest.raises(ConfigError, match="holds list, not a mapping"):
        ZeroConfig.of(str(tmp_path / "list.yaml"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("two", "`config` is 'two'; allowed: a stage (0, 1, 2, 3, auto), settings such as stage=2"),
        ("", "`config` is ''"),
        ("stage=2,local", "settings as name=value, separated by commas"),
        ("stage=2,stage.x=1", "`stage.x` is '1'; allowed: nothing: `stage` has a value already"),
        ("5", "`stage` is 5"),
        ("two", "a .yaml path. For stage 2, write 2."),
        ("zero3", "For stage 3, write 3."),
        ("²", "`config` is '²'; allowed: a stage (0, 1, 2, 3, auto)"),
        ("stage=2,stage=3", "`stage` is set twice, to 2 and to '3'. Set it once."),
        ("stage=2020-13-45", "`stage` is '2020-13-45'; allowed: 0, 1, 2, 3"),
        ("stage=[2", "`stage=[2` is not valid YAML, line 1: expected ',' or ']'"),
        ("bucket_bytes=0.5b", "`bucket_bytes` is '0.5b'; allowed: a number of bytes above 0"),
        ("comm.timeout_s=.nan", "`comm.timeout_s` is nan; allowed: auto, a number of seconds from 0.001"),
        ("comm.timeout_s=.inf", "`comm.timeout_s` is inf"),
        ("comm.timeout_s=1e300", "`comm.timeout_s` is 1e+300"),
        (f"bucket_bytes={'9' * 6000}", "bucket_bytes"),
    ],
)
def test_wrong_flags(text, says):
    with pytest.raises(ConfigError) as error:
        ZeroConfig.from_flag(text)
    assert says in str(error.value)


@pytest.mark.parametrize(
    "text", ["nowhere.yaml", "stge=2", "7", "two", "stage=9", "offload.optimizer=disk", "stage=[2"]
)
@pytest.mark.parametrize("name", ["HF_ZERO_CONFIG", "--zero"])
def test_an_error_names_where_the_text_was_said(name, text):
    with pytest.raises(ConfigError, match=rf"^hf_zero config: (`{name}`|in {name},) ") as error:
        ZeroConfig.of(text, name)
    assert str(error.value).count(name) == 1 and len(str(error.value).split()) <= 35


@pytest.mark.parametrize(
    ("quoted", "plain"),
    [
        ({"stage": "2"}, {"stage": 2}),
        ({"stage": " 3 ", "prefetch_units": "2"}, {"stage": 3, "prefetch_units": 2}),
        ({"broadcast_buffers": "False"}, {"broadcast_buffers": False}),
        ({"stage": "3", "reshard_after_forward": "false"}, {"stage": 3, "reshard_after_forward": False}),
        ({"comm": {"sync_every": "1", "late_s": "1e1"}}, {"comm": {"sync_every": 1, "late_s": 10.0}}),
        ({"offload": {"optimizer": "cpu", "ratio": "0.5"}}, {"offload": {"optimizer": "cpu", "ratio": 0.5}}),
    ],
)
def test_a_number_or_switch_in_quotes_is_that_number_or_switch(quoted, plain, tmp_path):
    (tmp_path / "zero.yaml").write_text(yaml.safe_dump(quoted, default_style='"'))
    assert ZeroConfig.of(quoted) == ZeroConfig.of(str(tmp_path / "zero.yaml")) == ZeroConfig.of(plain)
    assert ZeroConfig.of(quoted).to_dict() == ZeroConfig.of(plain).to_dict()


def test_other_objects_are_refused():
    with pytest.raises(ConfigError, match="a stage number, a YAML path"):
        ZeroConfig.of(2.5)
    with pytest.raises(ConfigError, match="`offload` is 'none'"):
        ZeroConfig(offload="none")
    assert ZeroConfig(offload=OffloadConfig()) == ZeroConfig()


def test_a_list_in_a_flag_keeps_its_commas():
    config = ZeroConfig.of("stage=3,unit_modules=[GPT2Block, 'BertLayer'],comm.timeout_s=1e3")
    assert config.unit_modules == ("GPT2Block", "BertLayer") and config.comm.timeout_s == 1000
    path = "/a,b's"
    flag = f'stage=3,offload.params=nvme,offload.nvme_path="{path}"'
    assert ZeroConfig.of(flag).offload.nvme_path == path


def test_a_flag_may_end_like_a_file_name(tmp_path):
    assert ZeroConfig.of("offload.optimizer=nvme,offload.nvme_path=/disk/x.yaml").offload.nvme_path == "/disk/x.yaml"
    (tmp_path / "a=b.yaml").write_text("stage: 1")
    assert ZeroConfig.of(str(tmp_path / "a=b.yaml")).stage == 1


def test_numbers_of_numpy_are_numbers():
    config = ZeroConfig(stage=np.int64(1), broadcast_buffers=np.bool_(False), comm=CommConfig(timeout_s=np.float32(60)))
    assert config == ZeroConfig(stage=1, broadcast_buffers=False, comm=CommConfig(timeout_s=60.0))
    assert type(config.stage) is int and type(config.broadcast_buffers) is bool


def test_a_key_that_stands_twice_in_a_file_is_refused(tmp_path):
    (tmp_path / "twice.yaml").write_text("stage: 2\ncomm: {timeout_s: 60}\nstage: 3")
    with pytest.raises(ConfigError, match=r"twice.yaml is not valid YAML, line 3: the key 'stage' appears twice"):
        ZeroConfig.of(tmp_path / "twice.yaml")


def test_files_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "utf16.yaml").write_text("stage: 2", encoding="utf-16")
    (tmp_path / "long.yaml").write_text("# " + "x" * 2**20)
    for name, says in (("utf16", "is not text in UTF-8"), ("long", "is longer than 64 KiB")):
        with pytest.raises(ConfigError, match=says):
            ZeroConfig.of(tmp_path / f"{name}.yaml")
    with pytest.raises(ConfigError, match=r"cannot be read \(File name too long\)"):
        ZeroConfig.of("a" * 5000 + ".yaml")


def test_deepspeeds_config_is_answered_in_our_words(tmp_path):
    zero = {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "reduce_bucket_size": 5e8,
        "zero_quantized_weights": True,
    }
    (tmp_path / "ds_config.json").write_text(json.dumps({"zero_optimization": zero, "bf16": {"enabled": "auto"}}))
    with pytest.raises(ConfigError) as error:
        ZeroConfig.of(str(tmp_path / "ds_config.json"))
    assert "ds_config.json is a config of DeepSpeed" in str(error.value)
    assert "`stage=3,offload.optimizer=cpu,comm.weights=int8`" in str(error.value)
    assert "or the script: bf16 (without --deepspeed)" in str(error.value)
    assert ZeroConfig.of("stage=3,offload.optimizer=cpu,comm.weights=int8").offload.optimizer == "cpu"
    with pytest.raises(ConfigError, match="it is DeepSpeed's; here it is `bucket_bytes`"):
        ZeroConfig.of({"stage": 2, "reduce_bucket_size": 5e8})
    with pytest.raises(ConfigError, match="is a config of `accelerate launch`, not of hf_zero"):
        ZeroConfig.of({"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP"})


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("16MiB", 2**24),
        ("1.5 GiB", 3 * 2**29),
        ("10 mb", 10**7),
        (512, 512),
        ("5e8", 500_000_000),
        (5e8, 500_000_000),
        ("1e-3 GB", 10**6),
    ],
)
def test_bytes_in_words(text, nbytes):
    assert parse_bytes("x", text) == nbytes


@pytest.mark.parametrize(
    ("settings", "mixed_precision", "gathered"),
    [
        ({"stage": 3}, "bf16", "bfloat16"),
        ({"stage": 3}, "no", "auto"),
        ({"stage": 3}, "fp16", "auto"),
        ({"stage": 2}, "bf16", "auto"),
        ({"stage": 3, "param_dtype": "float32"}, "bf16", "auto"),
        ({"stage": 3, "param_dtype": "bfloat16"}, "bf16", "auto"),
        ({"stage": 3, "gather_dtype": "float32"}, "bf16", "float32"),
        ({"stage": 3, "gather_dtype": "bfloat16"}, "no", "bfloat16"),
    ],
)
def test_bf16_mixed_precision_decides_what_stage_3_gathers(settings, mixed_precision, gathered):
    assert resolve_casts(ZeroConfig(**settings), mixed_precision).gather_dtype == gathered


def test_one_owner_of_the_cast():
    assert "accelerate" in check_cast_owner(ZeroConfig(), "bf16")
    assert check_cast_owner(ZeroConfig(param_dtype="bfloat16"), "no") == "the engine, parameters to bfloat16"
    assert check_cast_owner(ZeroConfig(), "no").startswith("nobody")
    both = check_cast_owner(ZeroConfig(param_dtype="bfloat16"), "bf16")
    assert both == "the engine, parameters to bfloat16; autocast to bf16 (accelerate) for other tensors"
    assert check_cast_owner(ZeroConfig(param_dtype="float32"), "bf16") == "autocast to bf16 (accelerate)"
    with pytest.raises(ConfigError, match=r"autocasts to bfloat16, and the config has `param_dtype: float16`.*or both"):
        check_cast_owner(ZeroConfig(param_dtype="float16"), "bf16")
    assert "accelerate" in check_cast_owner(ZeroConfig(), "fp16")
    assert check_cast_owner(ZeroConfig(param_dtype="float16"), "no") == "the engine, parameters to float16"
    for dtype in ("bfloat16", "float16"):
        with pytest.raises(ConfigError, match=r"mixed_precision='fp16' autocasts.*`param_dtype: float16` without"):
            check_cast_owner(ZeroConfig(param_dtype=dtype), "fp16")
    with pytest.raises(ConfigError, match="autocasts to float16, and the config has `gather_dtype: bfloat16`"):
        check_cast_owner(ZeroConfig(stage=3, gather_dtype="bfloat16"), "fp16")
    assert check_cast_owner(ZeroConfig(), "fp8") == "linear layers to fp8 (torchao), autocast to bf16 (accelerate)"


@pytest.mark.parametrize(
    "settings",
    [
        {"stage": 2},
        {"stage": 0},
        {"stage": "auto"},
        {"stage": 3, "prefetch_units": 0, "offload": {"optimizer": "cpu", "ratio": 0.5}, "unit_modules": "Block"},
        {"stage": 1, "comm": {"sync_every": 4, "outer": {"lr": 1.0}}},
    ],
)
def test_a_config_and_a_plugin_show_what_differs_from_the_defaults_and_no_more(settings):
    config, plugin = ZeroConfig.from_dict(settings), ZeroPlugin(**settings)
    assert eval(repr(config)) == config and eval(repr(plugin)).config == config
    changed = config.changes()
    assert changed == ({**settings, "unit_modules": ("Block",)} if "unit_modules" in settings else settings)
    assert repr(ZeroPlugin(stage=2)) == "ZeroPlugin(stage=2)" == repr(ZeroPlugin())
    assert repr(ZeroPlugin(stage=2, tp_size=2)) == "ZeroPlugin(stage=2, tp_size=2)"


def test_the_types_of_keyword_arguments_agree_with_the_config():
    """Each key with every type that the field has; sections also as mappings."""
    for typed, config in (
        (typed_settings.ZeroSettings, ZeroConfig),
        (typed_settings.OffloadSettings, OffloadConfig),
        (typed_settings.CommSettings, CommConfig),
        (typed_settings.OuterSettings, OuterConfig),
        (typed_settings.CheckpointSettings, CheckpointConfig),
    ):
        hints = typing.get_type_hints(typed)
        assert list(hints) == [field.name for field in dataclasses.fields(config)] and not typed.__required_keys__
        for field in dataclasses.fields(config):
            allowed = set(typing.get_args(hints[field.name])) or {hints[field.name]}
            wanted = set(typing.get_args(field.type)) or {field.type}
            if dataclasses.is_dataclass(field.type):
                wanted.add(getattr(typed_settings, field.type.__name__.replace("Config", "Settings")))
            if field.name == "stage":
                wanted.add(str)  # auto, which the doors resolve
            assert allowed == wanted, field.name
    # By name, as the annotation is for type checkers and editors alone.
    assert ZeroPlugin.__init__.__annotations__["settings"] == "Unpack[ZeroSettings]"


def test_a_class_in_place_of_an_object_is_named():
    with pytest.raises(ConfigError, match=r"config is the class ZeroConfig. Pass an object: ZeroConfig\(...\)"):
        ZeroConfig.of(ZeroConfig)
