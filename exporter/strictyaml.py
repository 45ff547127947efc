"""YAML into typed values, strictly: every problem as ``file:line: key: problem``, all of them at once.

PyYAML alone takes the last of two equal keys, makes ``on`` a boolean and ``12:30`` a number, and knows no
unknown key. Here each plain scalar is read as the type of the field it is for, and nothing is dropped.
"""

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NewType, TypeVar, Union

import yaml

Seconds = NewType("Seconds", float)
"""A duration; written as 500ms, 10s, 5m, 1h, 7d."""
Size = NewType("Size", int)
"""A number of bytes; written as 1024, 64KiB, 1MiB, 1GiB."""

_T = TypeVar("_T")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_YAML_BOOL = re.compile(r"(?i:yes|no|on|off|true|false)")
_NULLS = ("", "~", "null")
_BEYOND = 1e18
_FAST = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MOST_VALUES = 100_000


class ConfigError(ValueError):
    """A file or a flag that cannot be used. *problems* are whole lines for people, in file order."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class _Invalid(ValueError):
    """What is wrong with one scalar."""


def load(path: Path, kind: type[_T], *, ours: bool = False) -> _T:
    """The file at *path* as a *kind* (a dataclass); an empty file is one with all defaults.

    A file of *ours* is read by libyaml, many times faster, where PyYAML has it. Raises ConfigError with every problem
    found.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError([f"{path}: no such file"]) from None
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError([f"{path}: cannot be read: {what}"]) from None
    return parse(text, kind, str(path), ours=ours)


def parse(text: str, kind: type[_T], name: str, *, ours: bool = False) -> _T:
    """Like load(), for *text* that is already here; *name* stands for the file in messages."""
    try:  # libyaml has no bound for how deep it goes, and words of its own for what is wrong
        node = yaml.compose(text, _FAST if ours else yaml.SafeLoader)
    except RecursionError:
        raise ConfigError([f"{name}:1: nested too deeply"]) from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError([f"{name}:{line}: not YAML: {error.problem}"]) from None
    except yaml.YAMLError as error:
        raise ConfigError([f"{name}:1: not YAML: {str(error).splitlines()[0]}"]) from None
    reader = _Reader(name)
    if node is None:
        return parse("{}", kind, name)
    value = reader.value(node, kind, "")
    if reader.problems:
        raise ConfigError([text for _, text in sorted(reader.problems, key=lambda p: p[0])])
    return typing.cast(_T, value)


class _Reader:
    def __init__(self, name: str) -> None:
        self.name = name
        self.problems: list[tuple[int, str]] = []
        self.values = 0

    def problem(self, node: yaml.Node, key: str, text: str) -> None:
        line = node.start_mark.line + 1
        self.problems.append((line, f"{self.name}:{line}: {key + ': ' if key else ''}{text}"))

    def value(self, node: yaml.Node, kind: Any, key: str) -> Any:
        """*node* as a *kind*; None after a problem was noted."""
        self.values += 1
        if self.values > _MOST_VALUES:  # an alias is counted each time it is used
            raise ConfigError([f"{self.name}: more than {_MOST_VALUES} values; is one list repeated by its alias?"])
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if origin in (Union, types.UnionType):
            return self._union(node, args, key)
        if dataclasses.is_dataclass(kind):
            return self._struct(node, kind, key)
        if origin is dict:
            return self._mapping(node, args[1], key)
        if origin is tuple:
            if not isinstance(node, yaml.SequenceNode):
                hint = f"; write [{_seen(node)}]" if isinstance(node, yaml.ScalarNode) else ""
                return self.problem(node, key, f"expected a list, got {_seen(node)}{hint}")
            return tuple(self.value(n, args[0], f"{key}[{i}]") for i, n in enumerate(node.value))
        if not isinstance(node, yaml.ScalarNode):
            return self.problem(node, key, f"expected {_wanted(kind)}, got {_seen(node)}")
        try:
            return _scalar(node, kind)
        except ValueError as error:
            return self.problem(node, key, str(error))

    def _union(self, node: yaml.Node, kinds: tuple[Any, ...], key: str) -> Any:
        if types.NoneType in kinds and _is_null(node):
            return None
        shaped = [k for k in kinds if k is not types.NoneType and _fits(node, k)]
        rest = [k for k in kinds if k is not types.NoneType]
        if not shaped and len(rest) > 1:
            return self.problem(node, key, f"expected {' or '.join(map(_wanted, rest))}, got {_seen(node)}")
        return self.value(node, (shaped or rest)[0], key)

    def _pairs(self, node: yaml.Node, key: str) -> list[tuple[str, yaml.Node, yaml.Node]]:
        if not isinstance(node, yaml.MappingNode):
            self.problem(node, key, f"expected a mapping, got {_seen(node)}")
            return []
        pairs: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key_node, value_node in node.value:
            name = str(key_node.value)
            path = f"{key}.{name}" if key else name
            if name in pairs:
                first = pairs[name][0].start_mark.line + 1
                self.problem(key_node, path, f"given twice, first on line {first}")
            pairs.setdefault(name, (key_node, value_node))
        return [(name, k, v) for name, (k, v) in pairs.items()]

    def _mapping(self, node: yaml.Node, kind: Any, key: str) -> dict[str, Any]:
        return {name: self.value(v, kind, f"{key}.{name}" if key else name) for name, _, v in self._pairs(node, key)}

    def _struct(self, node: yaml.Node, kind: Any, key: str) -> Any:
        fields, hints = _fields(kind)
        values: dict[str, Any] = {}
        sound = True
        for name, key_node, value_node in self._pairs(node, key):
            path = f"{key}.{name}" if key else name
            if name in fields:
                before = len(self.problems)
                values[name] = self.value(value_node, hints[name], path)
                sound &= len(self.problems) == before
            else:
                near = difflib.get_close_matches(name, fields, 1)
                hint = f"did you mean {near[0]!r}?" if near else "known are: " + ", ".join(fields)
                self.problem(key_node, path, f"unknown key ({hint})")
        for name, field in fields.items():
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            if required and name not in values:
                self.problem(node, f"{key}.{name}" if key else name, "is required")
                sound = False
        if not sound:
            return None
        try:
            return kind(**values)
        except ConfigError as error:  # several problems at once
            for text in error.problems:
                self._about(node, key, text)
        except ValueError as error:
            self._about(node, key, str(error))
        return None

    def _about(self, node: yaml.Node, key: str, text: str) -> None:
        """Note what a type says of its values; a text that begins with a key's name stands at that key.

        ``key: text`` and ``key.inner: text`` lead further in.
        """
        inner, colon, rest = text.partition(": ")
        for name, key_node, value_node in self._pairs(node, key) if isinstance(node, yaml.MappingNode) else ():
            path = f"{key}.{name}" if key else name
            if colon and inner.startswith(f"{name}."):
                self._about(value_node, path, f"{inner.removeprefix(name + '.')}: {rest}")
                return
            if colon and inner == name:
                self.problem(key_node, path, rest)
                return
            if text.startswith(f"{name} "):
                self.problem(key_node, path, text.removeprefix(f"{name} "))
                return
        self.problem(node, key, text)


@cache
def _fields(kind: Any) -> tuple[dict[str, dataclasses.Field[Any]], dict[str, Any]]:
    """What a dataclass can be given, and of which types."""
    fields = {f.name: f for f in dataclasses.fields(kind) if f.init and not f.name.startswith("_")}
    return fields, typing.get_type_hints(kind)


def _scalar(node: yaml.ScalarNode, kind: Any) -> Any:
    text, plain = node.value, not node.style
    if "\0" in text:
        raise _Invalid("holds a NUL character, which no path and no name can")
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if text in choices:
            return text
        near = difflib.get_close_matches(text, choices, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise _Invalid(f"expected one of {', '.join(choices)}, got {text!r}{hint}")
    if kind is str:
        if plain and _YAML_BOOL.fullmatch(text):
            raise _Invalid(f'{text} is a boolean in YAML; for the word write "{text}" in quotes')
        return text
    if kind is bool:
        if plain and text in ("true", "false"):
            return text == "true"
        raise _Invalid(f"expected true or false, got {text!r}")
    if typing.get_origin(kind) is re.Pattern:
        try:
            return re.compile(text)
        except (re.error, OverflowError, RecursionError) as error:
            raise _Invalid(f"not a regular expression: {error}") from None
    if kind is Path:
        return Path(text)
    return _number(text, kind)


def _number(text: str, kind: Any) -> Any:
    if kind in (Seconds, Size):
        units: dict[str, Any] = _SECONDS if kind is Seconds else _BYTES
        match = _QUANTITY.fullmatch(text)
        if match is None or match[2] not in units:
            raise _Invalid(f"expected {_wanted(kind)}, got {text!r}")
        amount = float(match[1]) * units[match[2]]
        if not amount < _BEYOND:
            raise _Invalid(f"expected {_wanted(kind)}, got one beyond all measure")
        return amount if kind is Seconds else int(amount)
    try:
        number = kind(text)
        if not abs(number) < _BEYOND:
            raise ValueError
        return number
    except ValueError:
        raise _Invalid(f"expected {_wanted(kind)}, got {text!r}") from None


def _fits(node: yaml.Node, kind: Any) -> bool:
    """Whether *node* has the outer shape of *kind*."""
    if isinstance(node, yaml.MappingNode):
        return dataclasses.is_dataclass(kind) or typing.get_origin(kind) is dict
    if isinstance(node, yaml.SequenceNode):
        return typing.get_origin(kind) is tuple
    return not dataclasses.is_dataclass(kind) and typing.get_origin(kind) not in (dict, tuple)


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and not node.style and node.value in _NULLS


def _seen(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    return "nothing" if _is_null(node) else repr(node.value)


def _wanted(kind: Any) -> str:
    origin = typing.get_origin(kind)
    if origin is Literal:
        return "one of " + ", ".join(typing.get_args(kind))
    if origin is tuple:
        return "a list"
    if origin is dict or dataclasses.is_dataclass(kind):
        return "a mapping"
    if origin is re.Pattern:
        return "a regular expression"
    return {
        str: "text",
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        Seconds: "a duration such as 500ms, 10s or 5m",
        Size: "a size such as 4096, 64KiB or 1GiB",
        Path: "a path",
    }.get(kind, str(kind))
