"""The traces source: takes in an engine's spans by OTLP over HTTP, and the exact times of requests that stand in them.

The protocol: https://opentelemetry.io/docs/specs/otlp/#otlphttp. Spans may be dropped on their way, so nothing is
counted by them: they only fill histograms.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from aiohttp import web

from exporter.catalog import Family
from exporter.claims import EXACT_VALUES
from exporter.engines.profile import UNITS, Profile, Signal, SpanRule
from exporter.lifecycle import Lifecycle
from exporter.signals import Reading
from exporter.sources.effects import Effects
from exporter.store import Store

if TYPE_CHECKING:  # an extra, loaded with the first batch
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue

SOURCE = "traces"
PATH = "/v1/traces"
_PROTOBUF, _JSON = "application/x-protobuf", "application/json"
_AT_ONCE = 8  # batches that are being received; further ones are asked to come again
_SLOWEST_SECONDS = 10.0
_LATEST_SECONDS = 60.0  # that a span may come after its end; beyond, the clocks differ
_DEEPEST = 50  # of JSON
_INVALID, _EXHAUSTED = 3, 8  # google.rpc.Code


class TraceSource:
    """Answers at /v1/traces. *profile* is asked with each batch: until the engine is recognised, spans say nothing.

    *max_bytes* is the most that a batch may have, unpacked.
    """

    def __init__(
        self,
        profile: Callable[[], Profile | None],
        store: Store,
        lifecycle: Lifecycle,
        *,
        clock: Callable[[], float],
        model: str = "",
        max_bytes: int = 4 << 20,
    ) -> None:
        self._profile = profile
        self._store = store
        self._effects = Effects(store, lifecycle, clock, model=model, origin="trace")
        self._clock = clock
        self._max_bytes = max_bytes
        self._receiving = 0
        self._tell(0.0)

    def app(self) -> web.Application:
        """The receiver."""
        app = web.Application(client_max_size=self._max_bytes)
        app.router.add_post(PATH, self._receive)
        return app

    async def _receive(self, request: web.Request) -> web.Response:
        kind, began = request.content_type, self._clock()
        if kind not in (_PROTOBUF, _JSON):
            return web.Response(status=415, text=f"send {_PROTOBUF} or {_JSON}\n")
        if self._receiving >= _AT_ONCE:
            return _refusal(kind, 503, _EXHAUSTED, "too many batches at once, come again")
        self._receiving += 1
        try:
            async with asyncio.timeout(_SLOWEST_SECONDS):
                batch = _decoded(kind, await request.read())
        except TimeoutError:
            return _refusal(kind, 408, _EXHAUSTED, "the batch took too long")
        except web.HTTPRequestEntityTooLarge:
            return _refusal(kind, 413, _INVALID, f"a batch may have {self._max_bytes} bytes")
        except (ValueError, web.RequestPayloadError):
            return _refusal(kind, 400, _INVALID, "this is no ExportTraceServiceRequest")
        finally:
            self._receiving -= 1
        self._take(batch)
        self._tell(self._clock() - began)
        return web.Response(body=b"" if kind == _PROTOBUF else b"{}", content_type=kind)

    def _take(self, batch: "ExportTraceServiceRequest") -> None:
        """Observe what the spans say. What another source told until now is told: the first batch only takes over."""
        profile = self._profile()
        told: dict[Family, bool] = {}
        now = self._store.wall()
        for signal, value, ended in _signals(batch, profile.spans if profile else ()):
            family = signal.family
            if family not in told:
                told[family] = self._store.claims.take(family, "trace", EXACT_VALUES)
            if not told[family]:
                ago = now - ended
                self._effects.apply(signal, value, ago=ago if 0 <= ago <= _LATEST_SECONDS else None)

    def _tell(self, seconds: float) -> None:
        self._store.publish(Reading(SOURCE, "trace", ok=True, at=self._store.wall(), seconds=seconds))


def _decoded(kind: str, body: bytes) -> "ExportTraceServiceRequest":
    """The message in *body*. Raises ValueError."""
    from google.protobuf import json_format
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    batch = ExportTraceServiceRequest()
    try:
        if kind == _PROTOBUF:
            batch.ParseFromString(body)
        elif not body.lstrip().startswith(b"{"):
            raise ValueError("no object")
        else:  # ids are hex there and not base64, and mean nothing to us
            json_format.Parse(body, batch, ignore_unknown_fields=True, max_recursion_depth=_DEEPEST)
    except (DecodeError, json_format.ParseError, RecursionError) as error:
        raise ValueError(str(error)) from None
    return batch


def _signals(batch: "ExportTraceServiceRequest", rules: tuple[SpanRule, ...]) -> Iterator[tuple[Signal, float, float]]:
    """What *rules* find in the spans, in base units, and the Unix time at which the span ended."""
    spans = (span for each in batch.resource_spans for scope in each.scope_spans for span in scope.spans)
    for span in spans:
        for rule in rules:
            if rule.name.fullmatch(span.name):
                ended = span.end_time_unix_nano / 1e9
                told = {"duration": (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9}
                told |= {a.key: number for a in span.attributes if (number := _number(a.value)) is not None}
                if told.keys() >= set(rule.has):
                    yield from ((s, told[s.value] * UNITS[s.unit], ended) for s in rule.signals if s.value in told)


def _number(value: "AnyValue") -> float | None:
    kind = value.WhichOneof("value")
    if kind == "double_value":
        return value.double_value
    return float(value.int_value) if kind == "int_value" else None


def _refusal(kind: str, status: int, code: int, message: str) -> web.Response:
    """A google.rpc.Status in the form that was sent; its fields are 1, the code, and 2, the message."""
    headers = {"Retry-After": "1"} if status == 503 else {}
    if kind == _JSON:
        return web.json_response({"code": code, "message": message}, status=status, headers=headers)
    text = message.encode()
    return web.Response(
        status=status, body=bytes((0x08, code, 0x12, len(text))) + text, content_type=kind, headers=headers
    )
