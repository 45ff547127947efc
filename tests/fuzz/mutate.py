"""Inputs near to real ones: captures that are cut, mixed and spoilt. Without guidance, but thousands a second."""

from collections.abc import Callable, Sequence
from random import Random

WORDS = (
    *(
        b"\n",
        b"\r",
        b"\0",
        b" ",
        b"\t",
        b"\x1b[31m",
        b"\xff",
        b"\xc2\x9b",
        "\u0663".encode(),
        b"{",
        b"}",
        b"[",
        b"]",
        b"(",
    ),
    *(b'"', b"'", b"\\", b":", b"#", b"=", b"-1", b"0", b"NaN", b"+Inf", b"1e400", b"1_0", b"9" * 400, b"{}" * 40),
    *(
        b" stdout F ",
        b" stderr P ",
        b'","stream":"stderr"}',
        b"(EngineCore pid=1) ",
        b"[rank0]: ",
        b"ERROR ",
        b"INFO: ",
    ),
    *(
        b"Traceback (most recent call last):\n",
        b"CUDA out of memory",
        b"500 Internal Server Error",
        b"# TYPE ",
        b"_total",
    ),
    *(b"&a", b"*a", b"<<: *a", b"!!binary ", b"? ", b"- ", b"|\n", b"%YAML 1.1\n", b"---\n", b"(?:a+)+$", b"[" * 200),
)


def mutated(random: Random, seeds: Sequence[bytes]) -> bytes:
    """One of *seeds* with some changes, at most about three times as long."""
    data = bytearray(random.choice(seeds))
    for _ in range(random.randint(1, 4)):
        random.choice(_CHANGES)(random, data, seeds)
    return bytes(data)


def grown(random: Random, seeds: Sequence[bytes], size: int) -> bytes:
    """*size* bytes made of many such, the first byte that of the first."""
    data = bytearray()
    while len(data) < size:
        data += mutated(random, seeds)
    return bytes(data[:size])


def _replace(random: Random, data: bytearray, _: Sequence[bytes]) -> None:
    if data:
        data[random.randrange(len(data))] = random.randrange(256)


def _insert(random: Random, data: bytearray, _: Sequence[bytes]) -> None:
    at = random.randint(0, len(data))
    data[at:at] = random.choice(WORDS)


def _delete(random: Random, data: bytearray, _: Sequence[bytes]) -> None:
    at = random.randint(0, len(data))
    del data[at : at + random.choice((1, 4, 30, 500))]


def _repeat(random: Random, data: bytearray, _: Sequence[bytes]) -> None:
    at, to = random.randint(0, len(data)), random.randint(0, len(data))
    data[to:to] = data[at : at + random.choice((4, 30, 500))]


def _mix(random: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    other = random.choice(seeds)
    at, to = random.randint(0, len(other)), random.randint(0, len(data))
    data[to:to] = other[at : at + random.choice((30, 200, 1000))]


def _end(random: Random, data: bytearray, _: Sequence[bytes]) -> None:
    del data[random.randint(0, len(data)) :]


_CHANGES: tuple[Callable[[Random, bytearray, Sequence[bytes]], None], ...] = (
    *(_replace, _replace, _insert, _insert, _delete, _repeat, _mix, _end),
)
