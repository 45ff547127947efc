"""The literal that every match of a regular expression contains: what to look for before trying the regex.

Searching bytes for a literal runs at gigabytes a second; a regex tried on every line does not (an alternation of
literals is slower than all the searches together).
"""

import re
from functools import cache
from typing import Any

_MIN = 3


@cache
def literals_of(regex: re.Pattern[str]) -> tuple[str, ...]:
    """The longest run of plain characters that every match of *regex* contains, as a tuple of one.

    Empty if there is none of at least three characters, or if case is ignored: every line must then be tried.
    """
    if regex.flags & re.IGNORECASE:
        return ()
    try:
        parsed: Any = re._parser.parse(regex.pattern, regex.flags)  # type: ignore[attr-defined]
    except (AttributeError, re.error):
        return ()
    runs: list[str] = [""]
    _collect(parsed, runs)
    best = max(runs, key=len)
    return (best,) if len(best) >= _MIN else ()


def _collect(parsed: Any, runs: list[str]) -> None:
    """Append to *runs* the runs of literals that must occur; a new run starts wherever anything may stand."""
    for operator, argument in parsed:
        name = str(operator)
        if name == "LITERAL" and argument >= 0x20:
            runs[-1] += chr(argument)
        elif name == "SUBPATTERN":  # (group, flags on, flags off, inside)
            if argument[1]:
                runs.append("")
            else:
                _collect(argument[3], runs)
        elif name == "MAX_REPEAT" and argument[0] >= 1:  # (least, most, inside): at least once
            runs.append("")
            _collect(argument[2], runs)
            runs.append("")
        elif name != "AT":
            runs.append("")
