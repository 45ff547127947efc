"""The lines of the bench's table."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; *instead* is what *of* takes, *ratio* how many times Stopline's that is."""

    what: str
    unit: str
    stopline: float
    instead: float | None = None
    of: str = ""
    ratio: float | None = None

    @classmethod
    def beside(cls, what: str, unit: str, stopline: float, instead: float, of: str) -> "Row":
        """With the ratio of the two."""
        return cls(what, unit, stopline, instead, of, instead / stopline)
