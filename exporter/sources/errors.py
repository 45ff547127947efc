"""Which lines of a log are failures, of which kind, and how many lines are one failure."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from exporter.catalog import ERROR_KINDS
from exporter.engines.profile import ErrorRules
from exporter.lifecycle import Lifecycle
from exporter.sources.peel import ERROR, Record, seconds_of

_PRECEDENCE = {kind: rank for rank, kind in enumerate(ERROR_KINDS)}
_OUTLIVE_DEATH = ("out_of_memory", "cuda", "collective")
_TRACEBACK = "Traceback (most recent call last)"
_CHAIN = ("During handling of the above", "The above exception was")
_TYPED = re.compile(r"(?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception|Interrupt|Exit|Warning|Timeout): ")
_QUOTED = re.compile(r"Worker failed with error ['\"]")
_PROSE = re.compile(r"""(?<!\w)(?:"(?=[^"]*\s)|'(?=[^']*\s))""")  # a quote that opens more than a word
_GROUP = re.compile(r" +\| ")  # the margin of a group of exceptions
_IN_ONE_LINE = re.compile(r"[^'\"]*Traceback \(most recent call last\):\\n")  # escaped by the server, as Triton does
_QUIET = 0.3  # seconds without a further line after which a complete record is judged
_QUIET_OPEN = 1.5  # the same while a traceback has not come to its exception
_REMEMBERED = 64  # messages: a failure is told by eight ranks in the same words
_SHORT = 500
_LEAP_YEAR = 366 * 86400.0
_MAX_LINES = 5000
_NEXT = 2  # lines to look at after a traceback began, to see whether its lines carry no mark of their own
_AMID = 64  # the same within such a traceback: lines of other ranks and threads may stand between


@dataclass(slots=True)
class _Block:
    """One record that says error, with the lines that belong to it.

    *ignored* says that by its message it is none, *pardoned* the same by the last exception that tells. *fatal* says
    that it was open when another record told the death of the engine: it may tell the cause.
    """

    key: tuple[str, str]
    when: float | None
    last_at: float
    ignored: bool
    pardoned: bool = False
    fatal: bool = False
    kinds: set[str] = field(default_factory=set)
    in_traceback: bool = False
    lines: int = 0


class Errors:
    """Groups lines into failures and counts each once.

    A record is an error if its own level says so, or, where it has none, its shape. It is judged when the next
    record of its process begins, or by time if none comes; of the kinds its message and its exceptions fit, it is
    the one of highest precedence, for the last exception of a crash often only follows the cause. What stands in
    quotes may be a client's text, and makes no kind. The same kind within *window* seconds is the same failure (eight
    ranks print one crash eight times). After the engine has said that it stops, nothing counts until it starts again;
    after it died, only what may have killed it. *last* is when each kind was counted, shared by the logs of one engine.
    """

    def __init__(
        self,
        rules: ErrorRules,
        shared: ErrorRules,
        lifecycle: Lifecycle,
        count: Callable[[str], None],
        *,
        window: float = 10.0,
        last: dict[str, tuple[float | None, float]] | None = None,
    ) -> None:
        self.gates = tuple(dict.fromkeys((*rules.gates, *shared.gates)))
        self._kinds = [  # what the engine says in its own words stands above what those words mean elsewhere
            kind for kinds in (rules.kinds, shared.kinds) for kind in sorted(kinds, key=lambda k: _PRECEDENCE[k.kind])
        ]
        self._shapes = (*rules.shapes, *shared.shapes)
        self._context = (*rules.context, *shared.context)
        self._client = (*rules.client, *shared.client)
        self._access = (*rules.access, *shared.access)
        self._judge = lru_cache(_REMEMBERED)(self._judge_message)
        self._lifecycle = lifecycle
        self._count = count
        self._window = window
        self._blocks: dict[str, _Block] = {}
        self._last = {} if last is None else last
        self._died_in: int | None = None
        self.following = 0
        """So many of the next lines may belong to an error though they hold none of the gates: they are to be given."""

    def remember(self, before: "Errors") -> None:
        """Go on where *before* stops, as after a reload: what it counted is not to be counted again."""
        self._blocks, self._died_in = before._blocks, before._died_in
        self._last.update(before._last)

    def line(self, record: Record, now: float) -> None:
        """One line; *now* is monotonic seconds."""
        self.following = max(0, self.following - 1)
        block = self._blocks.get(record.process)
        if block is not None and self._continues(block, record):
            if block.in_traceback and not record.shaped:
                self.following = _AMID
            self._add(block, record.text, now)
            return
        interleaved = record.shaped and record.level != ERROR  # another thread's line amid a traceback
        if block is not None and not (interleaved and block.in_traceback):
            self.close(record.process)
        if self._is_access(record, now):
            return
        if record.level == ERROR or (not record.level and self._shaped(record.text)):
            self._open(record, now)

    def settle(self) -> None:
        """Judge everything that is open: the engine enters another phase of its life."""
        for process in list(self._blocks):
            self.close(process)

    def flush(self, now: float) -> None:
        """Judge what has been complete for a while."""
        for process, block in list(self._blocks.items()):
            if now - block.last_at >= (_QUIET_OPEN if block.in_traceback else _QUIET):
                self.close(process)

    def close(self, process: str) -> None:
        """Judge the record of *process*, as of when its last line came."""
        block = self._blocks.pop(process)
        if not (block.ignored or block.pardoned):
            kind = min(block.kinds or {"other"}, key=_PRECEDENCE.__getitem__)
            self._event(kind, block.when, block.last_at, fatal=block.fatal)

    # within

    def _continues(self, block: _Block, record: Record) -> bool:
        if block.lines > _MAX_LINES:
            return False
        if record.shaped:
            return record.level == ERROR and bool(record.place) and (record.time, record.place) == block.key
        text = record.text
        return block.in_traceback or text[:1] in ("", " ", "\t") or text.startswith((_TRACEBACK, *_CHAIN))

    def _open(self, record: Record, now: float) -> None:
        self._blocks.pop(record.process, None)
        block = _Block(
            key=(record.time, record.place),
            when=seconds_of(record.time) if record.time else None,
            last_at=now,
            ignored=self._lifecycle.phase == "stopping" or any(regex.match(record.text) for regex in self._context),
        )
        self._blocks[record.process] = block
        text = f"{record.text}\n{record.stack}" if record.stack else record.text
        if _IN_ONE_LINE.match(text):
            text = text.replace(r"\n", "\n")
        first, *rest = text.split("\n")
        self._add(block, first, now)
        for line in rest:
            if self._continues(block, Record(line)) or self._shaped(line):
                self._add(block, line, now)

    def _add(self, block: _Block, text: str, now: float) -> None:
        block.last_at = now
        block.lines += 1
        if block.in_traceback and (margin := _GROUP.match(text)):
            text = text[margin.end() :]
        text, traceback, _ = text.partition(_TRACEBACK)
        if text.strip() and not text.startswith(_CHAIN) and not (block.in_traceback and text[0].isspace()):
            self._classify(block, text)
            block.in_traceback = False
        if traceback:
            block.in_traceback = True
            self.following = max(self.following, _NEXT)

    def _classify(self, block: _Block, text: str) -> None:
        """Take the kind that *text* tells, if any."""
        kind, client = self._judge(text) if len(text) <= _SHORT else self._judge_message(text)
        if kind:
            block.kinds.add(kind)
        if client:
            block.ignored |= block.lines == 1
            block.pardoned = True
        elif kind:
            block.pardoned = False

    def _judge_message(self, text: str) -> tuple[str | None, bool]:
        """The kind that *text* tells, and whether it is a client's mistake."""
        forms = [text.removeprefix('"')]  # of msg="..."
        if typed := _TYPED.match(forms[0]):
            forms.append(forms[0][typed.end() :])
        quoted = _QUOTED.match(forms[-1])
        cause = self._kind([forms[-1][quoted.end() :]]) if quoted else None
        return cause or self._kind(forms), any(_said(regex, forms) for regex in self._client)

    def _kind(self, forms: list[str]) -> str | None:
        return next((k.kind for k in self._kinds if _said(k.regex, forms)), None)

    def _shaped(self, text: str) -> bool:
        return text.startswith(_TRACEBACK) or any(regex.match(text) for regex in self._shapes)

    def _is_access(self, record: Record, now: float) -> bool:
        for regex in self._access:
            if match := regex.match(record.text):
                kind = "rejected" if match["status"] == "503" else "server_error"
                if self._lifecycle.phase != "stopping" and not self._dead:
                    self._last[kind] = (None, now)
                    self._count(kind)
                return True
        return False

    @property
    def _dead(self) -> bool:
        return self._died_in == self._lifecycle.lives

    def _event(self, kind: str, when: float | None, now: float, *, fatal: bool = False) -> None:
        if self._dead and kind not in _OUTLIVE_DEATH and not (fatal and kind != "other"):
            return
        if last := self._last.get(kind):
            apart = abs(when - last[0]) if when is not None and last[0] is not None else now - last[1]
            apart = min(apart, abs(apart - _LEAP_YEAR))  # a clock without a year begins anew
            if apart < self._window:
                return
        self._last[kind] = (when, now)
        self._count(kind)
        if kind == "engine_dead":
            self._died_in = self._lifecycle.lives
            self._lifecycle.enter("dead")
            for block in self._blocks.values():
                block.fatal = True


def _said(regex: re.Pattern[str], forms: Iterable[str]) -> bool:
    """Whether one of *forms* begins as *regex* says, without looking into quotes that *regex* does not name."""
    for form in forms:
        if match := regex.match(form):
            prose = None if re.search("['\"]", regex.pattern) else _PROSE.search(form)
            if prose is None or prose.start() >= match.end():
                return True
    return False
