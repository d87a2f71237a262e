"""Whatever is given as a config, there comes a valid config or a short `ConfigError`, and soon."""

import json
import math
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_zero import ZeroPlugin, ZeroTrainingArguments
from hf_zero.config import CommConfig, ConfigError, OffloadConfig, ZeroConfig
from hf_zero.integrations.launcher import CONFIG_VARIABLE, script_call

LONGEST_MESSAGE = 1500
MOST_SECONDS = 10.0
MOST_GROWN_KIB = 150 * 2**10
# Examples of each kind. The slow run has more than 10,000. In the short run, `fuzzed_readers.py` adds thousands of inputs.
FEW, MANY = 12, 1200

KEYS = {
    "": list(ZeroConfig.__dataclass_fields__),
    "offload.": list(OffloadConfig.__dataclass_fields__),
    "comm.": list(CommConfig.__dataclass_fields__),
    "comm.outer.": ["lr", "momentum"],
    "checkpoint.": ["layout", "full_every", "on_failure", "async_save"],
}
NAMES = [prefix + key for prefix, keys in KEYS.items() for key in keys]
LIKELY = [
    0,
    1,
    2,
    3,
    16,
    256,
    0.5,
    60,
    True,
    False,
    None,
    "auto",
    "none",
    "cpu",
    "nvme",
    "node",
    "int8",
    "local",
    "sharded",
]
LIKELY += ["skip", "halve", "stop"]
LIKELY += ["16MiB", "bfloat16", "/tmp/x", "8bit", "sharded", "GPT2Block", ["A", "B"], "stochastic", "always"]
ODD_TEXTS = [
    "²",
    "٢",
    "5e8",
    "1e999",
    "0.5b",
    "9" * 5000,
    "nan",
    "2020-13-45",
    "\x00",
    "\ud800",
    "a" * 20_000,
    "[" * 3000,
    "'",
]
ODD_TEXTS += [
    "!!python/name:os.system",
    "&a [*a]",
    "0b_",
    "1:60:1",
    "<<: 1",
    "- -",
    "{a: b",
    "? x",
    "\ufeff2",
    "-",
    "=",
    "1_0",
]
ODD_VALUES = [math.nan, math.inf, -math.inf, 1e300, 10**400, b"\xff" * 5000, date(2020, 1, 1), object(), int]
ODD_VALUES += [
    np.int64(2),
    np.float32(0.5),
    np.bool_(True),
    np.zeros(3),
    np.str_("cpu"),
    torch.tensor(2),
    torch.zeros(9),
]


def nested(levels: int) -> list:
    value: list = []
    for _ in range(levels):
        value = [value]
    return value


def in_a_circle() -> dict:
    value: dict = {"stage": 2}
    value["comm"] = value
    return value


HOSTILE_YAML = [
    b"\xff\xfe" + "stage: 2".encode("utf-16-le"),
    b"\x00\x01\x02\xff",
    b"a: &a [x, x]\n" + b"".join(b"%c: &%c [*%c, *%c]\n" % (98 + i, 98 + i, 97 + i, 97 + i) for i in range(20)),
    b"a: &a {x: 1}\nb: {<<: [*a, *a]}",
    b"[" * 60_000,
    b"{a: " * 10_000,
    b"- " * 30_000,
    b"stage: 2\nstage: 3",
    b"comm:\n  timeout_s: 1\n  timeout_s: 2",
    b"stage: " + b"9" * 6000,
    b"stage: 0b_",
    b"stage: 2020-13-45",
    b"stage: !!timestamp x",
    b"stage: !!python/object/apply:os.system [true]",
    b"? [a]\n: 2",
    b"? {a: b}\n: 2",
    b"x" * 100_000,
    b"stage: 2\n--- \nstage: 3",
    b"\xef\xbb\xbfstage: 2",
    b"%YAML 9.9\n---\nstage: 2",
    b"stage: *nothing",
    b"null",
    b"",
]

values = st.recursive(
    st.one_of(
        st.sampled_from(LIKELY),
        st.sampled_from(ODD_TEXTS),
        st.sampled_from(ODD_VALUES),
        st.integers(),
        st.floats(),
        st.text(max_size=20),
        st.builds(nested, st.sampled_from([3, 300])),
        st.builds(in_a_circle),
    ),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


def placed(pairs: list[tuple[str, object]]) -> dict:
    """`[("comm.timeout_s", 1)]` → {"comm": {"timeout_s": 1}}."""
    whole: dict = {}
    for name, value in pairs:
        *path, leaf = name.split(".")
        place = whole
        for step in path:
            place = place.setdefault(step, {})
            if not isinstance(place, dict):
                break
        else:
            place[leaf] = value
    return whole


named = st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(LIKELY) | values), max_size=4)
mappings = named.map(placed) | st.dictionaries(
    values.filter(lambda v: isinstance(v, int | str | float)), values, max_size=3
)
flag_values = st.sampled_from([str(value) for value in LIKELY] + ODD_TEXTS) | st.text(max_size=10)
flags = st.one_of(
    st.lists(st.tuples(st.sampled_from(NAMES), flag_values), max_size=4).map(
        lambda pairs: ",".join(f"{name}={value}" for name, value in pairs)
    ),
    st.text(max_size=40),
    st.text(alphabet="sta ge=2,[]{}'\"*&.:-yml", max_size=40),
    st.sampled_from(
        [*ODD_TEXTS, "two", "zero2", "stage=2,stage=3", "/" + "a" * 5000 + ".yaml", "/proc", ".yaml", "a\x00.yaml"]
    ),
)
yaml_texts = st.one_of(
    st.sampled_from(HOSTILE_YAML),
    st.binary(max_size=60),
    st.text(alphabet="stage: 2\n\t-[]{}&*!|>%@`'\"#,?", max_size=60).map(str.encode),
    named.map(
        lambda pairs: as_yaml(placed([(n, v) for n, v in pairs if isinstance(v, int | str | float | list | None)]))
    ),
)

# One value as people and programs write it: any of YAML's ways to spell a text, a number or nothing at all.
scalars = st.one_of(
    st.sampled_from([str(value) for value in LIKELY] + ODD_TEXTS),
    st.sampled_from(
        [
            ".nan",
            "-.inf",
            ".NaN",
            "1e400",
            "1" * 400,
            "0x" + "f" * 300,
            "0o17",
            "1_000",
            "+2",
            "2.",
            "~",
            "null",
            "yes",
            "Off",
        ]
    ),
    st.sampled_from(
        ["!!str 2", "!!int '2'", "!!float 2", "!!null x", "! 2", "!local 2", "&a 2", "*a", "<<", "? 2", "|", ">-"]
    ),
    st.text(alphabet="автоσ式🚀\u200f\u0301\x85\xa0 a2", max_size=8),
    st.integers().map(str),
    st.floats().map(str),
    st.text(max_size=6).map(lambda text: json.dumps(text)),
)
spelled_keys = st.one_of(
    st.sampled_from([name.rpartition(".")[2] for name in NAMES] + ["offload", "comm", "checkpoint", "outer"]),
    st.sampled_from(
        ["<<", "? stage", "'stage'", '"stage"', "stage ", "Stage", "*a", "&a stage", "-", "", "2", "null", "\u017ftage"]
    ),
)
flow_values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
        st.lists(st.tuples(spelled_keys, inner), max_size=3).map(
            lambda pairs: f"{{{', '.join(f'{key}: {value}' for key, value in pairs)}}}"
        ),
    ),
    max_leaves=5,
)
lines = st.tuples(st.sampled_from(["", "  ", "    ", "\t", "- "]), spelled_keys, st.just("") | flow_values)
documents = st.lists(lines, max_size=6).map(
    lambda found: "\n".join(f"{indent}{key}: {value}" for indent, key, value in found).encode("utf-8", "surrogatepass")
)
# Anchors, aliases and merges in places where they would be followed.
linked = st.tuples(
    st.sampled_from(["[a, *a]", "{x: 1}", "2", "[[]]", "{<<: *a}"]), spelled_keys, st.sampled_from(NAMES)
).map(
    lambda found: f"x: &a {found[0]}\n{found[1]}: *a\n{found[2].rpartition('.')[2]}: {{<<: *a, y: *a}}".encode(
        "utf-8", "surrogatepass"
    )
)


def of_the_variable(text: str) -> ZeroConfig:
    """As `hf_zero.run` reads HF_ZERO_CONFIG."""
    before = os.environ.get(CONFIG_VARIABLE)
    try:
        os.environ[CONFIG_VARIABLE] = text
    except (UnicodeEncodeError, ValueError):
        # No environment can hold it.
        return ZeroConfig()
    try:
        return script_call([__file__]).config
    finally:
        if before is None:
            del os.environ[CONFIG_VARIABLE]
        else:
            os.environ[CONFIG_VARIABLE] = before


def of_an_argument(text: str) -> ZeroConfig:
    """As Trainer's arguments read `--zero`."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ZeroTrainingArguments(output_dir=folder, zero=text, use_cpu=True, report_to=[])
    plugin = arguments.parallelism_config
    assert isinstance(plugin, ZeroPlugin)
    plugin.stop_watching()
    return plugin.config


def as_yaml(value: object) -> bytes:
    try:
        return yaml.safe_dump(value).encode("utf-8", "surrogatepass")
    except (yaml.YAMLError, RecursionError, ValueError):
        # Values that no YAML file can hold.
        return b"stage: 2"


def assert_valid_or_refused(make: Callable[[], ZeroConfig]) -> None:
    """A valid config that plain JSON can hold, or a `ConfigError` that fits a screen."""
    began, most = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        config = make()
    except ConfigError as error:
        message = str(error)
        assert message.startswith(("hf_zero config: ", "hf_zero: ")) and len(message) < LONGEST_MESSAGE, message[:3000]
        message.encode("utf-8")
    else:
        assert type(config) is ZeroConfig
        assert ZeroConfig.from_dict(config.to_dict()) == config
        assert ZeroConfig.from_dict(json.loads(json.dumps(config.to_dict(), allow_nan=False))) == config
    assert time.process_time() - began < MOST_SECONDS
    if sys.platform == "linux":
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most < MOST_GROWN_KIB


def keyword_arguments(pairs: list[tuple[str, object]]) -> ZeroConfig:
    whole = placed(pairs)
    kinds = {"offload": OffloadConfig, "comm": CommConfig}
    for name, kind in kinds.items():
        section = whole.get(name)
        if isinstance(section, dict) and set(section) <= set(kind.__dataclass_fields__):
            whole[name] = kind(**section)
    return ZeroConfig(**whole)


JUDGED = {
    "flags": (flags, lambda text, _: ZeroConfig.of(text)),
    "mappings": (mappings, lambda mapping, _: ZeroConfig.of(mapping)),
    "keyword arguments": (named, lambda pairs, _: keyword_arguments(pairs)),
    "yaml": (yaml_texts, lambda text, path: ZeroConfig.of(written(path, text))),
    "spelled yaml": (documents | linked, lambda text, path: ZeroConfig.of(written(path, text))),
    "words": (flags, lambda text, _: script_call([f"--zero={text}", __file__, "--its-own"]).config),
    "variable": (
        flags | documents.map(lambda text: text.decode("utf-8", "replace")),
        lambda text, _: of_the_variable(text),
    ),
    "argument": (flags, lambda text, _: of_an_argument(text)),
    "anything": (values, lambda value, _: ZeroConfig.of(value)),
}


def written(path: Path, text: bytes) -> Path:
    path.write_bytes(text)
    return path


def assert_each_valid_or_refused(kind: str, path: Path, examples: int, derandomize: bool) -> None:
    strategy, make = JUDGED[kind]

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=derandomize,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def whatever_is_given(given_value):
        assert_valid_or_refused(lambda: make(given_value, path))

    whatever_is_given()


@pytest.mark.parametrize("kind", JUDGED)
def test_a_valid_config_or_a_short_config_error(kind, tmp_path):
    assert_each_valid_or_refused(kind, tmp_path / "zero.yaml", FEW, derandomize=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", JUDGED)
def test_thousands_of_them(kind, tmp_path):
    assert_each_valid_or_refused(kind, tmp_path / "zero.yaml", MANY, derandomize=False)


@pytest.mark.parametrize("text", HOSTILE_YAML, ids=lambda text: repr(text[:24]))
def test_hostile_yaml(text, tmp_path):
    assert_valid_or_refused(lambda: ZeroConfig.of(written(tmp_path / "zero.yaml", text)))


@pytest.mark.parametrize(
    "value", [*ODD_VALUES, -(10**5000), nested(50_000), in_a_circle()], ids=lambda value: str(type(value))
)
@pytest.mark.parametrize(
    "name", ["stage", "bucket_bytes", "comm.timeout_s", "unit_modules", "offload.nvme_path", "offload"]
)
def test_odd_values(name, value):
    assert_valid_or_refused(lambda: ZeroConfig.of(placed([(name, value)])))
