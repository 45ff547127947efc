"""One variable at a time: a command sets it to each of its values, the load stays the same."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from exporter.load.cause import cause
from exporter.load.level import summary
from exporter.load.ramp import Bench, applied
from exporter.load.result import Condition, Run

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
    Raises ConfigError if the command fails or the server does not come back.
    """
    runs: list[Run] = []
    for variable in variables:
        of_server = [name for name in fixed if name != CONCURRENCY]
        if variable.name == CONCURRENCY and command is not None and of_server:
            await bench.run(applied(command, fixed[of_server[0]]))
        of_variable: list[Run] = []
        for value in variable.values:
            if bench.over:
                bench.notes.append(f"{bench.over}: {variable.name} was not tried from {value} on")
                break
            level = int(value) if variable.name == CONCURRENCY else concurrency
            if variable.name != CONCURRENCY and command is not None:
                await bench.run(applied(command, value))
            await bench.prepare()
            measured = await bench.measure(level)
            if not measured.requests:
                continue
            conditions, identity = await bench.describe()
            given = {name: value for name, value in fixed.items() if name not in (CONCURRENCY, variable.name)}
            own = {} if variable.name == CONCURRENCY else {variable.name: value}
            found = summary([measured])
            if of_variable:
                found = msgspec.structs.replace(found, cause=cause(found, of_variable[0].levels[0]))
            of_variable.append(Run(conditions | given | own, [found], level, identity=identity, varied=variable.name))
        runs += of_variable
    return runs
