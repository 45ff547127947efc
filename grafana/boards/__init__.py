"""The boards, each in a module of its own, in the order of their links."""

from . import capacity, headroom, lines, why

BOARDS = (lines, headroom, why, capacity)
