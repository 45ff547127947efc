"""One variable at a time: a command sets it to each of its values, the load stays the same."""

import shlex
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import msgspec

from exporter.load.bench import Bench
from exporter.load.cause import cause
from exporter.load.level import summary
from exporter.load.result import Condition, Level, Run
from exporter.strictyaml import ConfigError

CONCURRENCY = "concurrency"


@dataclass(frozen=True, slots=True)
class Variable:
    """What is varied, and over which values."""

    name: str
    values: tuple[Condition, ...]

    @classmethod
    def parse(cls, text: str) -> "Variable":
        """``batch=1,2,4,8``. Raises ValueError."""
        name, equals, rest = text.partition("=")
        values = tuple(value.strip() for value in rest.split(","))
        if not name or not equals or not all(values):
            raise ValueError(f"must be NAME=VALUE,VALUE,… such as batch=1,2,4,8, got {text!r}")
        if len(set(values)) < len(values):
            raise ValueError(f"names a value twice: {text!r}")
        if name == CONCURRENCY and not all(value.isdigit() and int(value) for value in values):
            raise ValueError(f"concurrency must be whole numbers above 0, got {rest!r}")
        return cls(name, tuple(int(value) if value.isdigit() else value for value in values))


async def sweep(
    bench: Bench, variables: Sequence[Variable], *, command: str | None, concurrency: int, fixed: dict[str, Condition]
) -> list[Run]:
    """A run for each value of each variable, one level each.

    *command* sets the value of a variable that is the server's; *fixed* holds what each has while another is varied.
    Raises ConfigError if the command fails, or the server does not come back, before anything was measured.
    """
    runs: list[Run] = []
    for variable in variables:
        try:
            async for run in _values(bench, variable, command, concurrency, fixed):
                runs += [run]
        except ConfigError as error:  # what was measured before is worth its table
            if not runs:
                raise
            bench.notes.append(f"{variable.name}: {error}")
    return runs


async def _values(
    bench: Bench, variable: Variable, command: str | None, concurrency: int, fixed: dict[str, Condition]
) -> AsyncIterator[Run]:
    """A run for each value of *variable*. Raises ConfigError."""
    others = {name: value for name, value in fixed.items() if name not in (CONCURRENCY, variable.name)}
    if variable.name == CONCURRENCY and command is not None and others:
        await bench.run(applied(command, next(iter(others.values()))))
    first: Level | None = None
    for value in variable.values:
        own: dict[str, Condition] = {}
        level = int(value) if variable.name == CONCURRENCY else concurrency
        if variable.name != CONCURRENCY and command is not None:
            own = {variable.name: value}
            await bench.run(applied(command, value))
        await bench.prepare()
        measured = await bench.measure(level) if not bench.over else None
        if measured is None or not (measured.complete or any(r.error for r in measured.requests)):
            bench.notes.append(f"{bench.over}: {variable.name} was not measured from {value} on")
            return
        conditions, identity = await bench.describe()
        found = summary([measured])
        first = first or found
        found = msgspec.structs.replace(found, cause=cause(found, first) if found is not first else "")
        yield Run(conditions | others | own, [found], level, identity=identity, varied=variable.name)


def applied(command: str, value: Condition) -> str:
    """*command* with ``{value}`` replaced, quoted for the shell."""
    return command.replace("{value}", shlex.quote(str(value)))
