"""Spans as real engines sent them, over a real socket: exact times, and what a receiver must withstand."""

import asyncio
import gzip
import json
from pathlib import Path

import aiohttp
import pytest
from aiohttp.test_utils import TestServer
from google.protobuf import json_format
from harness import Clock, Reader
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from exporter import catalog
from exporter.engines import profile as profiles
from exporter.lifecycle import Lifecycle
from exporter.sources import traces
from exporter.sources.traces import TraceSource
from exporter.store import Store

FIXTURES = Path(__file__).parent.parent / "fixtures"
ONE = (FIXTURES / "vllm/0.32.0/otlp-body-1-span.bin").read_bytes()
FOUR = (FIXTURES / "vllm/0.32.0/otlp-body-4-spans.bin").read_bytes()
SGLANG = (FIXTURES / "sglang/0.5.23/otlp-spans.json").read_bytes()
PROTOBUF, JSON = {"Content-Type": "application/x-protobuf"}, {"Content-Type": "application/json"}


def as_json(body: bytes) -> bytes:
    return json_format.MessageToJson(ExportTraceServiceRequest.FromString(body)).encode()


class Receiver:
    """A trace source behind a socket."""

    def __init__(self, engine: str | None = "vllm", **options) -> None:
        self.store = Store(clock=Clock(), wall=Clock())
        profile = profiles.bundled(engine) if engine else None
        self.source = TraceSource(
            lambda: profile, self.store, Lifecycle(has_page=False), clock=Clock(), model="m", **options
        )

    async def __aenter__(self) -> "Receiver":
        self.server = TestServer(self.source.app())
        await self.server.start_server()
        self.session = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()
        await self.server.close()

    async def send(self, body: bytes, headers: dict[str, str] = PROTOBUF) -> tuple[int, bytes]:
        async with self.session.post(self.server.make_url("/v1/traces"), data=body, headers=headers) as answer:
            return answer.status, await answer.read()

    def told(self) -> dict[str, tuple[int, float]]:
        return {
            family.short: (buckets.cumulative()[-1], buckets.sum)
            for family, series in self.store.histograms.items()
            for labels, buckets in series.items()
            if labels == ("m", "trace") and buckets.sum
        }


VLLM = {
    "request_queue_wait_seconds": (1, pytest.approx(1.685099960e-05)),
    "request_time_to_first_token_seconds": (1, pytest.approx(0.158596516)),
    "request_latency_seconds": (1, pytest.approx(1.607631445)),
}


@pytest.mark.parametrize(
    ("body", "headers", "answer"),
    [
        (ONE, PROTOBUF, b""),
        (as_json(ONE), JSON, b"{}"),
        (gzip.compress(ONE), PROTOBUF | {"Content-Encoding": "gzip"}, b""),
        (
            gzip.compress(as_json(ONE)),
            {"Content-Type": "application/json; charset=utf-8", "Content-Encoding": "gzip"},
            b"{}",
        ),
    ],
)
async def test_the_span_of_a_request_gives_its_exact_times(body: bytes, headers: dict, answer: bytes) -> None:
    async with Receiver() as receiver:
        assert await receiver.send(body, headers) == (200, answer)
        assert receiver.told() == VLLM


async def test_batches_add_up_and_other_spans_say_nothing() -> None:
    async with Receiver() as receiver:
        await receiver.send(ONE)
        await receiver.send(FOUR)
        assert {name: count for name, (count, _) in receiver.told().items()} == dict.fromkeys(VLLM, 5)
        assert receiver.told()["request_latency_seconds"][1] == pytest.approx(73.489555, rel=1e-6)


async def test_sglang_waits_in_a_span_of_its_own_and_a_refused_request_counts_for_nothing() -> None:
    async with Receiver("sglang") as receiver:
        assert await receiver.send(SGLANG, JSON) == (200, b"{}")
        assert receiver.told() == {
            "request_queue_wait_seconds": (2, pytest.approx(0.000549888 + 7.7164416)),
            "request_time_to_first_token_seconds": (2, pytest.approx(0.049679718 + 7.752733698)),
            "request_latency_seconds": (2, pytest.approx(0.289150416 + 9.960488528)),
        }


async def test_until_the_engine_is_known_spans_are_taken_in_and_say_nothing() -> None:
    async with Receiver(None) as receiver:
        assert await receiver.send(ONE) == (200, b"")
        assert receiver.told() == {}
        assert receiver.store.readings["traces"].ok


async def test_the_first_batch_only_takes_over_from_who_told_the_same_before() -> None:
    async with Receiver() as receiver:
        receiver.store.observe(catalog.LATENCY, ("m",), 1.6, origin="metrics")
        await receiver.send(ONE)
        assert "request_latency_seconds" not in receiver.told()
        receiver.store.observe(catalog.LATENCY, ("m",), 1.6, origin="metrics")
        await receiver.send(ONE)
        assert receiver.told()["request_latency_seconds"] == (1, pytest.approx(1.607631445))
        counts = {labels: b.cumulative()[-1] for labels, b in receiver.store.histograms[catalog.LATENCY].items()}
        assert counts == {("m", "metrics"): 1, ("m", "trace"): 1}


def span(**attributes: float) -> bytes:
    batch = ExportTraceServiceRequest()
    one = batch.resource_spans.add().scope_spans.add().spans.add(name="llm_request")
    for name, value in attributes.items():
        one.attributes.add(key=f"gen_ai.latency.{name}").value.double_value = value
    return batch.SerializeToString()


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), 1e9])
async def test_times_that_cannot_be_are_dropped_and_counted(value: float) -> None:
    async with Receiver() as receiver:
        assert await receiver.send(span(e2e=value, time_in_queue=0.5)) == (200, b"")
        assert receiver.told() == {"request_queue_wait_seconds": (1, 0.5)}
        assert receiver.store.counters[catalog.SERIES_DROPPED] == {("stopline_request_latency_seconds",): 1}


async def test_spans_that_end_before_they_began_are_dropped() -> None:
    batch = json.loads(SGLANG)
    for each in batch["resourceSpans"][0]["scopeSpans"][0]["spans"]:
        each["startTimeUnixNano"], each["endTimeUnixNano"] = each["endTimeUnixNano"], each["startTimeUnixNano"]
    async with Receiver("sglang") as receiver:
        await receiver.send(json.dumps(batch).encode(), JSON)
        assert "request_queue_wait_seconds" not in receiver.told()


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"\xff\xff", PROTOBUF, 400),
        (ONE[:-5], PROTOBUF, 400),
        (b"{", JSON, 400),
        (b"[]", JSON, 400),
        (b"\xff", JSON, 400),
        (b'{"resourceSpans":' + b"[" * 4_000, JSON, 400),
        (b'{"resourceSpans": 5}', JSON, 400),
        (ONE, {"Content-Type": "text/plain"}, 415),
        (ONE, {"Content-Type": "application/grpc"}, 415),
        (b"\0" * 5000, PROTOBUF, 413),
        (gzip.compress(b"\0" * 50_000_000), PROTOBUF | {"Content-Encoding": "gzip"}, 413),
    ],
)
async def test_a_bad_batch_is_answered_as_the_protocol_says(body: bytes, headers: dict, status: int) -> None:
    async with Receiver(max_bytes=4096) as receiver:
        got, answer = await receiver.send(body, headers)
        assert got == status
        if headers == JSON:
            assert json.loads(answer) == {"code": 3, "message": "this is no ExportTraceServiceRequest"}
        assert receiver.told() == {}
        assert await receiver.send(ONE) == (200, b"")
        assert receiver.told() == VLLM


async def test_a_refusal_is_a_status_message() -> None:
    async with Receiver() as receiver:
        _, answer = await receiver.send(b"\xff\xff")
        assert answer == b"\x08\x03\x12\x24this is no ExportTraceServiceRequest"


async def test_other_methods_and_paths_are_not_there() -> None:
    async with Receiver() as receiver, receiver.session.get(receiver.server.make_url("/v1/traces")) as answer:
        assert answer.status == 405


async def test_too_many_batches_at_once_are_asked_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "_AT_ONCE", 1)
    async with Receiver() as receiver:
        port = receiver.server.port
        _, slow = await asyncio.open_connection("127.0.0.1", port)
        slow.write(
            b"POST /v1/traces HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-protobuf\r\nContent-Length: 9\r\n\r\n"
        )
        await slow.drain()
        while not receiver.source._receiving:
            await asyncio.sleep(0.01)
        async with receiver.session.post(receiver.server.make_url("/v1/traces"), data=ONE, headers=PROTOBUF) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        slow.close()
        while receiver.source._receiving:
            await asyncio.sleep(0.01)
        assert await receiver.send(ONE) == (200, b"")


async def test_a_batch_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "_SLOWEST_SECONDS", 0.05)
    async with Receiver() as receiver:
        reader, slow = await asyncio.open_connection("127.0.0.1", receiver.server.port)
        slow.write(
            b"POST /v1/traces HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
        )
        assert b" 408 " in await reader.readline()
        slow.close()


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.binary(max_size=200), st.binary(max_size=20).map(lambda b: ONE[:30] + b + ONE[30:])))
def test_any_bytes_are_a_batch_or_are_refused(body: bytes) -> None:
    for kind in ("application/x-protobuf", "application/json"):
        try:
            batch = traces._decoded(kind, body)
        except ValueError:
            continue
        list(traces._signals(batch, profiles.bundled("vllm").spans))


def test_a_log_that_tells_the_same_says_nothing_more_once_traces_do() -> None:
    reader = Reader("sglang")
    reader.store.claims.take(catalog.QUEUE_WAIT, "trace", ("trace", "log", "metrics"))
    line = "[2026-11-30 06:55:00] ReqTimeStats(rid=abc, input_len=4): queue_duration=0.64ms, forward_duration=1.00ms\n"
    assert reader.feed(line).store.histograms == {}
