"""What the requests ask for: bodies from a file, lengths from a file, or generated ones.

The lengths are not drawn at random but spread evenly over the distribution, in an order that the seed gives: a P99 of
200 requests would else be that of the two longest that chance picked. They are the same at every level, so that two
levels differ in nothing but their concurrency. The words are not: a prompt that was sent before would be answered from
the prefix cache.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal, TypeVar

from exporter.load.result import Condition
from exporter.strictyaml import ConfigError

_T = TypeVar("_T")
Api = Literal["chat", "completions", "generate"]
PATHS: dict[Api, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions", "generate": "/generate"}
TEMPLATE: dict[str, Any] = {"prompt": "{prompt}", "max_tokens": "{output_tokens}", "stream": "{stream}"}
"""Of a body for /generate, where none is given."""

_SYLLABLES = [a + b for a in "bcdfghjklmnprstvwz" for b in "aeiou"]
_SIZE = {"input_tokens", "output_tokens"}
_MOST_TOKENS = 10_000_000  # the longest context that models have
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True, slots=True)
class Lengths:
    """From *least* to *most* tokens, evenly."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """``256`` or ``64-512``. Raises ValueError."""
        match = _RANGE.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"must be a number of tokens such as 256, or a range such as 64-512, got {text!r}")
        least, most = int(match[1]), int(match[2] or match[1])
        if not 1 <= least <= most <= _MOST_TOKENS:
            raise ValueError(f"must be 1 to {_MOST_TOKENS}, the lower end first, got {text!r}")
        return cls(least, most)

    def spread(self, count: int) -> list[int]:
        """*count* lengths from the shortest to the longest, evenly."""
        return _spread(range(self.least, self.most + 1), count)

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}-{self.most}"


@dataclass(frozen=True, slots=True)
class Mix:
    """The requests of a load test, each by its number."""

    api: Api = "completions"
    model: str = ""
    stream: bool = True
    input_tokens: Lengths = Lengths(128, 128)
    """Words of the prompt; most tokenizers make a token or two of each."""
    output_tokens: Lengths = Lengths(64, 64)
    seed: int = 0
    ignore_eos: bool = True
    """Ask for exactly *output_tokens*, as vLLM, SGLang and others understand it."""
    template: dict[str, Any] = field(default_factory=lambda: TEMPLATE)
    """Of a body for /generate."""
    given: tuple[dict[str, Any], ...] = ()
    """Whole bodies, sent as they are in turn."""
    pairs: tuple[tuple[int, int], ...] = ()
    """Lengths of prompt and answer, in turn."""
    source: str = "generated"
    """Where they come from, for the result: generated, or a file by its hash."""

    def bodies(self, count: int, salt: str) -> Iterator[dict[str, Any]]:
        """*count* requests; another *salt* makes other words of the same lengths."""
        if self.given:
            yield from itertools.islice(itertools.cycle(self.given), count)
            return
        random = Random(f"{self.seed}/{salt}")
        for prompt, output in self.lengths(count):
            yield self._made(_words(random, prompt), output)

    def lengths(self, count: int) -> list[tuple[int, int]]:
        """Of *count* prompts and answers, in words and tokens: spread evenly, in an order that the seed gives."""
        random = Random(self.seed)
        if self.pairs:
            pairs = _spread(sorted(self.pairs, key=lambda pair: (pair[1], pair[0])), count)
        else:
            outputs, prompts = self.output_tokens.spread(count), self.input_tokens.spread(count)
            random.shuffle(prompts)
            pairs = list(zip(prompts, outputs, strict=True))
        random.shuffle(pairs)
        return pairs

    def conditions(self) -> dict[str, Condition]:
        """What must be alike in runs that are compared."""
        alike: dict[str, Condition] = {"api": self.api, "stream": self.stream, "requests": self.source}
        if not self.given and not self.pairs:
            alike |= {"input_tokens": str(self.input_tokens), "output_tokens": str(self.output_tokens)}
        return alike if self.given else alike | {"seed": self.seed}

    def _made(self, prompt: str, output: int) -> dict[str, Any]:
        if self.api == "generate":
            values = {"{prompt}": prompt, "{output_tokens}": output, "{stream}": self.stream, "{model}": self.model}
            filled = _filled(self.template, values)
            assert isinstance(filled, dict)
            return filled
        body: dict[str, Any] = {"model": self.model, "max_tokens": output, "stream": self.stream}
        if self.api == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        return body | ({"ignore_eos": True} if self.ignore_eos else {})


def from_file(path: Path) -> dict[str, Any]:
    """Fields of a Mix for the requests in the file at *path*.

    One JSON object is a body; JSON Lines are a body each, or lengths: ``{"input_tokens": 320, "output_tokens": 64}``.
    Raises ConfigError.
    """
    text = _text(path)
    source = f"{path.name}, sha256 {hashlib.sha256(text.encode()).hexdigest()[:12]}"
    whole = _object(text)
    if whole is not None and not _is_size(whole):
        return {"given": (whole,), "source": source}
    rows: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            row = _object(line)
            if row is None:
                raise ConfigError([f"{path}:{number}: not a JSON object; write one request, or its lengths, a line"])
            rows[number] = row
    if not rows:
        raise ConfigError([f"{path}: holds no request"])
    if not any(map(_is_size, rows.values())):
        return {"given": tuple(rows.values()), "source": source}
    for number, row in rows.items():
        if row.keys() != _SIZE or not all(type(n) is int and 0 < n <= _MOST_TOKENS for n in row.values()):
            raise ConfigError(
                [f"{path}:{number}: expected input_tokens and output_tokens, each a whole number, 1 to {_MOST_TOKENS}"]
            )
    return {"pairs": tuple((row["input_tokens"], row["output_tokens"]) for row in rows.values()), "source": source}


def template(path: Path) -> dict[str, Any]:
    """A body for /generate with ``{prompt}``, ``{output_tokens}``, ``{stream}``, ``{model}``. Raises ConfigError."""
    body = _object(_text(path))
    if body is None:
        raise ConfigError([f"{path}: not a JSON object"])
    if "{prompt}" not in json.dumps(body):
        raise ConfigError([f"{path}: holds no {{prompt}}: write it where the text of the request goes"])
    return body


def streams(body: dict[str, Any]) -> bool:
    """Whether *body* asks for a stream."""
    return body.get("stream") is True


def _is_size(row: dict[str, Any]) -> bool:
    """Whether *row* means lengths, and is no body: well-made or not."""
    return bool(row) and row.keys() <= _SIZE


def _filled(value: Any, values: dict[str, Any]) -> Any:
    """*value* with its placeholders replaced; one that is the whole text becomes what it stands for, a number too."""
    if isinstance(value, dict):
        return {key: _filled(inner, values) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, values) for inner in value]
    if not isinstance(value, str):
        return value
    if value in values:
        return values[value]
    return re.sub("|".join(map(re.escape, values)), lambda match: str(values[match[0]]), value)


def _spread(ordered: Sequence[_T], count: int) -> list[_T]:
    """*count* of *ordered*, evenly from the first to the last."""
    return [ordered[int((n + 0.5) * len(ordered) / count)] for n in range(count)]


def _words(random: Random, count: int) -> str:
    return " ".join(random.choice(_SYLLABLES) + random.choice(_SYLLABLES) for _ in range(count))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError([f"{path}: no such file"]) from None
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError([f"{path}: cannot be read: {what}"]) from None


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
