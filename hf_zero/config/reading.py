"""Text into settings: YAML files and command-line values.

Whatever the text, what comes is plain Python values in mappings and lists of a few levels, or a `ConfigError`.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import yaml

from .checks import ConfigError, cut, refuse, shown

_MOST_TEXT_BYTES = 64 * 2**10
_MOST_LEVELS = 8
_TOO_DEEP = f"there are more than {_MOST_LEVELS} levels"


def read_yaml(path: Path) -> Any:
    """What a YAML file holds. Raises `ConfigError` where it cannot be read."""
    where = cut(str(path))
    try:
        if path.is_dir():
            raise ConfigError(f"hf_zero config: {where!r} is a folder. Give the YAML file in it, or a stage number.")
        if not path.is_file():
            near = sorted(p.name for p in path.parent.glob("*.y*ml"))[:8] if path.parent.is_dir() else []
            found = f"that folder holds {cut(', '.join(near))}" if near else "there is no YAML file in that folder"
            raise ConfigError(f"hf_zero config: no file {where!r}; {found}. Give a YAML path or a stage number.")
        with path.open("rb") as file:
            text = file.read(_MOST_TEXT_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"hf_zero config: {where} cannot be read ({error.strerror}). Give the path of a YAML file, or a stage number."
        ) from error
    try:
        return parse(text.decode("utf-8-sig"), where)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"hf_zero config: {where} is not text in UTF-8. Give a YAML file such as one with the line `stage: 2`."
        ) from error


def parse(text: str, where: str) -> Any:
    """A YAML text's value.

    Args:
        where: what the text is, for errors.
    """
    if len(text.encode("utf-8", "surrogatepass")) > _MOST_TEXT_BYTES:
        raise ConfigError(
            f"hf_zero config: {where} is longer than {_MOST_TEXT_BYTES // 2**10} KiB; settings are a few lines of YAML."
        )
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = cut(getattr(error, "problem", None) or str(error).partition("\n")[0])
        raise ConfigError(f"hf_zero config: {where} is not valid YAML{line}: {problem}.") from error


def settings_of(text: str) -> dict[str, Any]:
    """`stage=2,comm.timeout_s=60` → {"stage": 2, "comm": {"timeout_s": 60}}, values read as YAML."""
    if len(text) > _MOST_TEXT_BYTES:
        raise refuse("config", text, "settings as name=value, separated by commas: a line of them")
    settings: dict[str, Any] = {}
    for part in _parts(text):
        name, equals, value = part.partition("=")
        if not equals:
            raise refuse("config", text, "settings as name=value, separated by commas")
        name = name.strip()
        *path, leaf = name.split(".")
        place = settings
        for step in path:
            place = place.setdefault(step, {})
            if not isinstance(place, Mapping):
                raise refuse(cut(name), value, f"nothing: `{cut(step)}` has a value already")
        if leaf in place:
            raise ConfigError(
                f"hf_zero config: `{cut(name)}` is said twice, as {shown(place[leaf])} and as {shown(value)}. Say it once."
            )
        place[leaf] = parse(value, f"`{cut(name)}={cut(value)}`")
    return settings


def _parts(text: str) -> list[str]:
    """The text between commas that are outside of brackets and quotes."""
    parts, start, depth, quote, before = [], 0, 0, "", ","
    for place, sign in enumerate(text):
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"" and before in "=[{,:":
            # Elsewhere it is an apostrophe in a word.
            quote = sign
        elif sign in "[{":
            depth += 1
        elif sign in "]}":
            depth -= 1
        elif sign == "," and depth <= 0:
            parts.append(text[start:place])
            start = place + 1
        before = before if sign == " " else sign
    return [*parts, text[start:]]


class _Loader(yaml.SafeLoader):
    """YAML's plain values: no tags, dates or repeated nodes, each key once, and `1e3` for a number as in YAML 1.2."""

    yaml_implicit_resolvers: ClassVar = {
        sign: [(tag, form) for tag, form in resolvers if not tag.endswith(":timestamp")]
        for sign, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str):
        super().__init__(text)
        self._level = 0

    def fetch_flow_collection_start(self, token: type[yaml.Token]) -> None:
        # Here already: the scanner looks far ahead, in time that grows with the square of the level.
        if self.flow_level == _MOST_LEVELS:
            raise yaml.scanner.ScannerError(problem=_TOO_DEEP, problem_mark=self.get_mark())
        super().fetch_flow_collection_start(token)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            if isinstance(self.anchors.get(event.anchor), yaml.CollectionNode):
                raise _not_taken("an alias of a mapping or list; write out what it stands for", event)
        elif event.tag not in (None, "!"):
            raise _not_taken("a tag; write the plain value", event)
        if self._level == _MOST_LEVELS:
            raise yaml.composer.ComposerError(problem=_TOO_DEEP, problem_mark=event.start_mark)
        self._level += 1
        node = super().compose_node(parent, index)
        self._level -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in keys:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {shown(key.value)} stands there twice", problem_mark=key.start_mark
                )
            keys.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def _not_taken(what: str, event: yaml.Event) -> yaml.YAMLError:
    return yaml.composer.ComposerError(problem=f"there is {what}", problem_mark=event.start_mark)
