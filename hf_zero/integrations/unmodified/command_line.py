"""The words behind `-m hf_zero.run`: which config, which script, and the script's own arguments."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...config import ConfigError, ZeroConfig
from ...config.checks import shown

CONFIG_VARIABLE = "HF_ZERO_CONFIG"
HOW_TO = "accelerate launch ... -m hf_zero.run --zero 2 script.py --its-own arguments"


@dataclass(frozen=True, kw_only=True)
class ScriptCall:
    """A script to run, as it would be called without hf_zero.

    Attributes:
        config: what `--zero` says, or else HF_ZERO_CONFIG.
        script: path of a Python file, or name of a module.
        is_module: whether `script` is the name of a module, as behind `python -m`.
        arguments: the script's own.
    """

    config: ZeroConfig
    script: str
    is_module: bool
    arguments: tuple[str, ...]


def script_call(words: Sequence[str]) -> ScriptCall:
    """What a command line asks for.

    Raises:
        ConfigError: there is no config, it is not valid, or there is no such script.
    """
    parser = argparse.ArgumentParser(
        prog="hf_zero.run",
        usage=HOW_TO.replace("script.py", "[script.py | -m module]"),
        description="Trains an unmodified script with hf_zero.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--zero", metavar="X", help="A stage (0, 1, 2, 3, auto), a YAML file, or settings such as stage=2,..."
    )
    parser.add_argument("-m", "--module", action="store_true", help="The script is the name of a module.")
    parser.add_argument("script", help="A Python file, or a module's name behind -m.")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="The script's own arguments.")
    said = parser.parse_args(list(words))
    if not said.module:
        _refuse_missing(said.script)
    return ScriptCall(
        config=_config(said.zero), script=said.script, is_module=said.module, arguments=tuple(said.arguments)
    )


def _config(said: str | None) -> ZeroConfig:
    if said is not None:
        return ZeroConfig.of(said, "--zero")
    inherited = os.environ.get(CONFIG_VARIABLE)
    if not inherited:
        raise ConfigError(
            "hf_zero: no config was given. Say it before the script: `--zero 2 script.py --its-own arguments`, or set "
            f"{CONFIG_VARIABLE}. --zero takes a stage (0, 1, 2, 3, auto), a YAML file, or settings such as "
            "stage=2,grad_accumulation=local."
        )
    return ZeroConfig.of(inherited, CONFIG_VARIABLE)


def _refuse_missing(script: str) -> None:
    if not Path(script).exists():
        raise ConfigError(
            f"hf_zero: there is no script {shown(script)} in {Path.cwd()}. hf_zero.run takes the path of a Python file, or "
            "`-m` and a module's name."
        )
