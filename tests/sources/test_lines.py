"""Lines into signals: fields, patterns, pairs, facts, and that it does not matter how the bytes are cut."""

import itertools
import re

import pytest
from harness import Reader
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter import catalog, strictyaml
from exporter.engines import profile as profiles
from exporter.engines.profile import Pattern, Profile, Signal

SEED = "[request_id=xxx] queue_wait_ms=12.3 step_latency_ms=45.6 total_ms=57.9"


def test_the_line_of_the_seed_needs_no_configuration() -> None:
    told = Reader("generic").feed(SEED).told()
    assert told == pytest.approx(
        {
            "request_queue_wait_seconds{model=}": 0.0123,
            "step_latency_seconds{model=,phase=mixed}": 0.0456,
            "request_latency_seconds{model=}": 0.0579,
            "requests_total{model=,outcome=ok}": 1.0,
        }
    )


@pytest.mark.parametrize(
    "line",
    [
        "request_queue_time=0.0123s",
        "INFO request done queue_wait_ms: 12.3, more",
        '{"queue_wait_ms": 12.3, "prompt": "queue_wait_ms=99"}',
        '{"level":"info","msg":"done queue_wait_ms=12.3"}',
        '{"queue_wait": "12.3ms"}',
        'time="2026-11-30T10:00:00Z" level=info msg="done" queue_wait_ms="12.3"',
        "queue_wait_ms=12.3 prompt=queue_wait_ms=5000",
        'queue_wait_ms=12.3 text="my queue_wait_ms=5000 is long"',
        "queue_wait=12300us",
        "queue_wait_ms = 12.3",
    ],
)
def test_fields_are_found_in_every_usual_form_and_nowhere_in_prose(line: str) -> None:
    reader = Reader("generic").feed(line)
    buckets = next(iter(reader.store.histograms[catalog.QUEUE_WAIT].values()))
    assert (buckets.cumulative()[-1], buckets.sum) == (1, pytest.approx(0.0123))


@pytest.mark.parametrize("line", ["queue_wait_ms=-3", "queue_wait_ms=-1e300"])
def test_a_negative_value_is_dropped_and_counted(line: str) -> None:
    reader = Reader("generic").feed(line)
    assert reader.store.histograms == {}
    assert reader.store.counters[catalog.SERIES_DROPPED] == {("stopline_request_queue_wait_seconds",): 1}


@pytest.mark.parametrize(
    "line", ["my_queue_wait_ms=3", "queue_wait_ms=abc", "x.queue_wait_ms=3", "queue_wait_ms=3.4.5"]
)
def test_what_only_resembles_a_field_is_none(line: str) -> None:
    assert Reader("generic").feed(line).store.histograms == {}


def test_a_field_of_your_own_takes_three_lines() -> None:
    own = {"t_sched": Signal("request_queue_wait_seconds", unit="us")}
    told = Reader("generic", fields=own).feed("rid=5 t_sched=12300 fin").told()
    assert told == {"request_queue_wait_seconds{model=}": pytest.approx(0.0123)}


def test_a_line_that_says_the_same_twice_says_it_once_and_your_own_name_counts() -> None:
    own = {"t_sched": Signal("request_queue_wait_seconds", unit="ms")}
    told = Reader("generic", fields=own).feed("queue_wait_ms=50 t_sched=12 prompt_tokens=5 input_tokens=5").told()
    assert told == {"request_queue_wait_seconds{model=}": pytest.approx(0.012), "tokens_total{model=,kind=prompt}": 5.0}


def test_step_and_communication_times_of_a_parallel_run() -> None:
    told = (
        Reader("generic")
        .feed("step=5 prefill_step_ms=71.9 decode_step_ms=24.2 all_reduce_ms=3.5 all_gather_ms=1.5")
        .told()
    )
    assert told == pytest.approx(
        {
            "step_latency_seconds{model=,phase=prefill}": 0.0719,
            "step_latency_seconds{model=,phase=decode}": 0.0242,
            "step_seconds_total{model=,phase=prefill}": 0.0719,
            "step_seconds_total{model=,phase=decode}": 0.0242,
            "communication_seconds_total{model=,op=all_reduce}": 0.0035,
            "communication_seconds_total{model=,op=all_gather}": 0.0015,
        }
    )


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("allreduce_ms: 3.5", {"communication_seconds_total{model=,op=all_reduce}": 0.0035}),
        ("[rank 0] all_gather_time=1.5ms", {"communication_seconds_total{model=,op=all_gather}": 0.0015}),
        ('{"step": 5, "nccl_ms": 8.5}', {"communication_seconds_total{model=,op=all}": 0.0085}),
        ("NCCL version 2.21.5+cuda12.4", {}),
        ("node1:7:99 [0] NCCL INFO Channel 00/02 :    0   1", {}),
        ("node1:7:99 [0] NCCL INFO Connected all rings, use ring PXN 0 GDR 1", {}),
        ("2026-11-30 10:00:00 INFO using nccl backend over NVLink", {}),
        ("NCCL WARN Cuda failure 'out of memory'", {"errors_total{kind=out_of_memory}": 1}),
    ],
)
def test_what_a_search_for_communication_finds_in_the_log_of_a_parallel_server(line: str, told: dict) -> None:
    assert Reader("generic").feed(line).settle().told() == pytest.approx(told)


SETTINGS = """\
# 配置骨架示例
model:
  name_or_path: /models/your-model     # 固定项 1：模型
  dtype: float16                       # 固定项 2：精度
  max_model_len: 4096                  # 固定项 3：输入长度上限
  num_experts: 8
engine:
  max_num_seqs: 32                     # 固定项 4：最大并发
  gpu_memory_utilization: 0.90         # 固定项，几轮对照不要动
  tensor_parallel_size: 4              # 唯一变量
  pipeline_parallel_size: 1            # 唯一变量
  expert_parallel_degree: 2
"""


@pytest.mark.parametrize(
    "printed",
    [
        SETTINGS,
        "2026-11-30 10:00:00 INFO config: " + ", ".join(re.findall(r"\w+: [\w./-]+(?= |$)", SETTINGS, re.MULTILINE)),
        "2026-11-30 10:00:00 INFO args: "
        + " ".join(f"--{k.replace('_', '-')} {v}" for k, v in re.findall(r"(\w+): ([\w./-]+)", SETTINGS)),
    ],
    ids=["as a file", "in a line", "as a command"],
)
def test_settings_printed_at_the_start_are_facts(printed: str) -> None:
    assert Reader("generic").feed(printed, history=True).told() == {
        "engine_limit{name=max_model_len}": 4096,
        "engine_limit{name=max_running_requests}": 32,
        "engine_limit{name=gpu_memory_utilization}": 0.9,
        "parallelism{dimension=tensor}": 4,
        "parallelism{dimension=pipeline}": 1,
        "parallelism{dimension=expert}": 2,
        "experts{scope=total}": 8,
    }


PAIRS = (
    Pattern("begin", re.compile(r"start id=(?P<id>\w+)"), begin="id"),
    Pattern(
        "end",
        re.compile(r"end id=(?P<id>\w+)"),
        end="id",
        signals=(Signal("request_latency_seconds", value="elapsed"),),
    ),
)


def test_start_and_end_lines_give_latency_by_the_logs_own_clock() -> None:
    text = """\
2026-11-30 10:00:00.000 INFO start id=a
2026-11-30 10:00:01.000 INFO start id=b
2026-11-30 10:00:02.500 INFO end id=a
2026-11-30 10:00:01.250 INFO end id=b
"""
    reader = Reader("generic", patterns=PAIRS).feed(text)
    buckets = next(iter(reader.store.histograms[catalog.LATENCY].values()))
    assert (buckets.cumulative()[-1], buckets.sum) == (2, pytest.approx(2.75))


def test_orphans_and_clock_steps_are_dropped_and_counted() -> None:
    text = """\
2026-11-30 10:00:05 INFO start id=a
2026-11-30 09:00:05 INFO end id=a
2026-11-30 10:00:06 INFO end id=never
"""
    reader = Reader("generic", patterns=PAIRS).feed(text)
    assert reader.store.histograms == {}
    assert reader.store.counters[catalog.SERIES_DROPPED] == {("stopline_request_latency_seconds",): 2}


def test_openings_that_are_never_closed_are_bounded() -> None:
    reader = Reader("generic", patterns=PAIRS)
    reader.feed("".join(f"start id=r{n}\n" for n in range(10_100)))
    assert len(reader.lines._pairs) == 10_000
    assert reader.store.counters[catalog.SERIES_DROPPED] == {("stopline_request_latency_seconds",): 100}


START = (
    "(APIServer pid=1) INFO 11-30 07:26:03 [api_utils.py:286] non-default args: {'max_num_seqs': 8}\n"
    "(EngineCore pid=2) INFO 11-30 07:26:27 [kv.py:1] GPU KV cache size: 1,048,576 tokens, Maximum\n"
)


def test_history_gives_facts_and_no_counts() -> None:
    iteration = profiles.bundled("vllm").log.patterns[-6].samples
    text = START + "".join(s.line + "\n" for s in iteration)
    text += "(EngineCore pid=2) ERROR 11-30 07:27:27 [core.py:1] CUDA error: boom\n"
    reader = Reader("vllm").feed(text, history=True).settle()
    assert reader.told() == {
        "engine_limit{name=max_running_requests}": 8.0,
        "kv_cache_capacity_tokens{model=,rank=0}": 1048576.0,
        "parallelism{dimension=data}": 1.0,
    }


def test_a_new_start_forgets_the_facts_of_the_last() -> None:
    reader = Reader("vllm").feed(START)
    reader.feed("(APIServer pid=3) INFO 11-30 08:26:03 [api_utils.py:286] non-default args: {'port': 1}\n")
    assert reader.told() == {"parallelism{dimension=data}": 1.0}
    assert reader.lifecycle.phase == "starting"


def test_gauges_of_a_log_that_fell_silent_go_away() -> None:
    line = (
        "(APIServer pid=1) INFO 11-30 05:58:00 [loggers.py:335] Engine 000: Avg prompt throughput: 4.3 tokens/s, "
        "Avg generation throughput: 6.4 tokens/s, Running: 1 reqs, Waiting: 7 reqs, GPU KV cache usage: 12.5%\n"
    )
    reader = Reader("vllm").feed(line)
    assert reader.told()["requests_waiting{model=,rank=0}"] == 7
    assert reader.settle(20).told() != {}
    assert reader.settle(20).told() == {}


def test_a_line_that_carries_the_words_but_not_the_form_is_a_sign_of_a_changed_format() -> None:
    line = "(APIServer pid=1) INFO 11-30 05:58:00 [loggers.py:335] Engine 000: Avg prompt throughput is 5\n"
    reader = Reader("vllm").feed(line)
    assert reader.store.counters[catalog.LOG_UNPARSED] == {("log",): 1}


def test_a_hundred_thousand_ids_make_no_series() -> None:
    reader = Reader("generic")
    text = "".join(
        f"2026-11-30 10:00:00 ERROR request {n} from 10.0.0.{n % 256}:{n} timeout reached\n" for n in range(20_000)
    )
    reader.feed(text).settle()
    assert sum(len(series) for family, series in reader.store.counters.items() if family != catalog.LOG_MATCHED) < 10


LOG = [
    SEED,
    "INFO nothing to see",
    "2026-11-30 10:00:00 ERROR CUDA error: boom",
    "Traceback (most recent call last):",
    '  File "x.py", line 3',
    "torch.OutOfMemoryError: CUDA out of memory.",
    "2026-11-30 10:00:05 INFO queue_wait_ms=7",
    "",
    "\x1b[31m2026-11-30 10:00:06 ERROR connection reset by peer\x1b[0m",
]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(LOG), max_size=40),
    st.lists(st.integers(0, 40), max_size=6),
)
def test_it_does_not_matter_where_chunks_are_cut(lines: list[str], cuts: list[int]) -> None:
    whole = Reader("generic").feed("".join(line + "\n" for line in lines)).settle().told()
    reader = Reader("generic")
    edges = sorted({0, len(lines), *(min(c, len(lines)) for c in cuts)})
    for a, b in itertools.pairwise(edges):
        reader.feed("".join(line + "\n" for line in lines[a:b]))
    assert reader.settle().told() == whole


STEP = (
    "(APIServer pid=914) INFO 11-30 07:26:{} [loggers.py:199] Engine 000: Iteration(3): {} context requests, 9 context "
    "tokens, {} generation requests, 4 generation tokens, iteration elapsed time: {} ms, GPU KV cache usage: 1.0%"
)
STATS = (
    "(APIServer pid=914) INFO 11-30 07:26:{} [loggers.py:335] Engine 00{}: Avg prompt throughput: 4.3 tokens/s, Avg "
    "generation throughput: 6.4 tokens/s, Running: {} reqs, Waiting: 3 reqs, Preemptions: 5, GPU KV cache usage: 9.5%"
)
VLLM = [
    STEP.format(41, 0, 4, "13.40"),
    STEP.format(42, 0, 4, "13.60"),
    STEP.format(42, 2, 0, "35.20"),
    STEP.format(43, 2, 4, "0.00"),
    STEP.format(43, 2, 4, "99999999999.0"),  # cannot be
    STEP.format(43, "two", 4, "5.0"),  # reads differently
    STATS.format(41, 0, 8),
    STATS.format(42, 1, 7),
    STATS.format(43, 0, 6),
    "(APIServer pid=914) INFO 11-30 07:26:43 [loggers.py:335] 2 Engines Aggregated: Avg prompt throughput: 4.3 tokens/s, "
    "Avg generation throughput: 6.4 tokens/s, Running: 9 reqs, Waiting: 7 reqs, GPU KV cache usage: 50.0%",
    "(APIServer pid=914) INFO 11-30 07:26:44 [async_llm.py:700] Request cmpl-9f2 aborted.",
    "(APIServer pid=914) INFO 11-30 07:26:44 [logger.py:39] Received request r1: prompt: 'all in one line', "
    "params: None, lora_request: None.",
    "(APIServer pid=914) INFO 11-30 07:26:44 [logger.py:39] Received request r1: prompt: 'and in two",
    "ERROR 11-30 07:26:44 [core.py:7] CUDA out of memory', params: None, lora_request: None.",
    "(EngineCore pid=956) ERROR 11-30 07:26:45 [core.py:7] Traceback (most recent call last):",
    "(EngineCore pid=956) ERROR 11-30 07:26:45 [core.py:7] RuntimeError: CUDA error: boom",
    "(EngineCore pid=956) ERROR 11-30 07:26:46 [core.py:9] EngineCore encountered a fatal error.",
    "(APIServer pid=914) INFO 11-30 07:27:03 [api_utils.py:286] non-default args: {'max_num_seqs': 8}",
    "(APIServer pid=914) INFO 11-30 07:29:03 [launcher.py:254] [shutdown] API server: shutdown triggered",
    "2026-11-30T10:00:00.5Z stdout F (APIServer pid=914) INFO 11-30 07:26:44 [async_llm.py:700] Request r aborted.",
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(VLLM), max_size=40), st.lists(st.integers(0, 40), max_size=6))
def test_it_does_not_matter_where_what_is_gathered_is_cut(lines: list[str], cuts: list[int]) -> None:
    """Steps and gauges are put in together, phases and errors at once: every line by itself must give the same."""
    one_by_one, cut = Reader("vllm"), Reader("vllm")
    for line in lines:
        one_by_one.feed(line)
    edges = sorted({0, len(lines), *(min(c, len(lines)) for c in cuts)})
    for a, b in itertools.pairwise(edges):
        cut.feed("".join(line + "\n" for line in lines[a:b]))
    assert cut.settle().told() == pytest.approx(one_by_one.settle().told())
    assert cut.lifecycle.phase == one_by_one.lifecycle.phase
    counters = [reader.store.counters for reader in (cut, one_by_one)]
    for family in (catalog.LOG_MATCHED, catalog.LOG_UNPARSED, catalog.SERIES_DROPPED):
        assert counters[0][family] == counters[1][family]


def test_what_was_gathered_before_an_engine_died_does_not_revive_it() -> None:
    death = "(EngineCore pid=956) ERROR 11-30 07:26:46 [core.py:9] EngineCore encountered a fatal error.\n"
    steps = 30 * (VLLM[0] + "\n")
    after = "(EngineCore pid=956) ERROR 11-30 07:26:47 [core.py:9] Dumping scheduler stats\n"
    assert Reader("vllm").feed(steps + death + after).lifecycle.phase == "dead"
    assert Reader("vllm").feed(death + after + steps).lifecycle.phase == "serving"


def test_steps_that_are_gathered_count_as_one_by_one() -> None:
    """Of 0.0 ms, too: it is at or below the first bound."""
    reader = Reader("vllm").feed("\n".join(VLLM[:6]))
    decode = reader.store.histograms[catalog.STEP_LATENCY]["", "decode", "log"]
    mixed = reader.store.histograms[catalog.STEP_LATENCY]["", "mixed", "log"]
    assert (decode.cumulative()[-1], decode.sum) == (2, pytest.approx(0.027))
    assert (mixed.cumulative()[0], mixed.cumulative()[-1], mixed.sum) == (1, 1, 0.0)
    assert reader.store.counters[catalog.LOG_UNPARSED] == {("log",): 1}
    assert reader.store.counters[catalog.SERIES_DROPPED] == {("stopline_step_latency_seconds",): 1}


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=2000))
def test_any_bytes_are_read_without_an_exception(data: bytes) -> None:
    for engine in ("vllm", "generic"):
        Reader(engine).feed(data + b"\n").settle()


@pytest.mark.parametrize("engine", profiles.names())
def test_a_flood_of_bait_takes_no_time_worth_telling(engine: str) -> None:
    """Long lines that hold every literal of the profile and fit no pattern: nothing may backtrack badly."""
    profile = profiles.bundled(engine)
    literals = [literal for pattern in profile.log.patterns for literal in pattern.literals]
    literals += [*profile.log.fields, *profile.log.errors.gates, *profiles.shared().gates]
    line = " ".join(literals * 20)
    Reader(engine).feed((line + "\n") * 20).settle()


PARALLEL = """
engine: acme
log:
  records: ['\\[(?:DP(?P<rank>\\d+))?(?: ?PP(?P<pipeline>\\d+))?(?: ?TP(?P<tensor>\\d+))?\\] ', 'INFO ']
  processes: ['Worker(?:_DP(?P<rank>\\d+))?(?:_PP(?P<pipeline>\\d+))?(?:_TP(?P<tensor>\\d+))?']
  patterns:
    - name: start
      regex: 'begin'
      phase: starting
    - name: weights
      regex: 'weights (?P<gib>\\d+) GiB'
      startup: true
      signals: [{signal: rank_weights_bytes, value: gib, unit: GiB, labels: {rank: $rank.$pipeline.$tensor}}]
    - name: load
      regex: 'load (?P<n>\\d+)'
      signals: [{signal: requests_running, value: n}]
    - name: balance
      regex: 'busiest (?P<times>\\S+) times the mean'
      signals: [{signal: expert_balance_ratio, value: '1', over: times}]
    - name: idle
      regex: 'from idle'
      spoils: [step]
    - name: step
      regex: '(?P<batch>\\d+) requests at (?P<speed>\\S+) tokens/s'
      signals: [{signal: step_latency_seconds, value: batch, over: speed, labels: {phase: decode}}]
    - name: totals
      regex: '(?:RANK (?P<rank>\\d+) )?finished (?P<n>\\d+)'
      signals: [{signal: requests_total, value: n, total: true, labels: {outcome: ok}}]
"""
ACME = strictyaml.parse(PARALLEL, Profile, "acme.yaml")


@pytest.mark.parametrize(
    ("before", "rank"),
    [
        ("[] ", "0"),
        ("[TP3] ", "3"),
        ("[DP1 PP0 TP3] ", "1.0.3"),
        ("[DP1 TP3] ", "1.3"),
        ("[PP2] ", "2"),
        ("(Worker_TP12 pid=4) INFO ", "12"),
        ("(Worker_DP1_PP0_TP3 pid=4) INFO ", "1.0.3"),
        ("(Worker pid=4) INFO ", "0"),
        ("(EngineCore pid=4) INFO ", "0"),
    ],
)
def test_the_start_of_a_line_tells_the_rank(before: str, rank: str) -> None:
    told = Reader(ACME).feed(f"{before}weights 2 GiB").told()
    assert told == {f"rank_weights_bytes{{rank={rank}}}": 2.0**31}


def test_gauges_without_a_rank_of_their_own_are_the_data_parallel_ranks() -> None:
    reader = Reader(ACME).feed("[DP0 TP0] load 3\n[DP1 TP0] load 5\n(Worker_DP2_TP0 pid=1) INFO load 7\n")
    assert reader.told() == {f"requests_running{{model=,rank={rank}}}": n for rank, n in ((0, 3), (1, 5), (2, 7))}


@pytest.mark.parametrize("digits", [7, 100, 5000])
def test_a_rank_of_any_length_ends_nothing(digits: int) -> None:
    rank = "7" * digits
    told = Reader(ACME).feed(f"[DP{rank}] load 3\nRANK {rank} finished 3\n[TP{rank}] weights 2 GiB\n").told()
    assert set(told.values()) <= ({3.0, 2.0**31, 1.0} if digits == 7 else {1.0, 2.0})


def test_a_hundred_and_thirty_ranks_count_each_once_and_none_is_stale() -> None:
    reader = Reader(ACME)
    for turn in range(20):
        reader.feed("".join(f"[DP{rank}] RANK {rank} finished {turn}\n[DP{rank}] load {turn}\n" for rank in range(130)))
    told = reader.told()
    assert told["requests_total{model=,outcome=ok}"] == 130 * 19
    assert {told[f"requests_running{{model=,rank={rank}}}"] for rank in range(130)} == {19}


@pytest.mark.parametrize(("times", "balance"), [("1.25", {0.8}), ("0", set()), ("nan", set()), ("-2", set())])
def test_one_over_a_number(times: str, balance: set[float]) -> None:
    told = Reader(ACME).feed(f"[] busiest {times} times the mean").told()
    assert {v for k, v in told.items() if k.startswith("expert_balance_ratio")} == balance


def test_what_a_line_spoils_is_not_believed_and_each_rank_spoils_its_own() -> None:
    reader = Reader(ACME)
    for line in (
        "[DP0] 4 requests at 1 tokens/s",  # the first ever
        "[DP0] 4 requests at 100 tokens/s",
        "[DP1] from idle",
        "[DP0] 4 requests at 100 tokens/s",
        "[DP0] from idle",
        "[DP0] 4 requests at 1 tokens/s",
        "[DP0] 4 requests at 100 tokens/s",
        "[] begin",
        "[DP0] 4 requests at 1 tokens/s",
    ):
        reader.feed(line)
    buckets = reader.store.histograms[catalog.STEP_LATENCY]["", "decode", "log"]
    assert (buckets.cumulative()[-1], buckets.sum) == (3, pytest.approx(0.12))


@pytest.mark.parametrize(
    ("lines", "finished"),
    [
        (["finished 10", "finished 12", "finished 12", "finished 15"], 5),
        (["finished 10", "finished 12", "finished 3"], 5),  # a restart that no line told
        (["begin", "finished 10", "finished 12"], 12),
        (["finished 10", "begin", "finished 4"], 4),
        (["RANK 0 finished 10", "RANK 1 finished 2", "RANK 0 finished 11", "RANK 1 finished 5"], 4),
    ],
)
def test_a_total_that_lines_repeat_counts_by_what_it_grew(lines: list[str], finished: int) -> None:
    reader = Reader(ACME)
    for line in lines:
        reader.feed(f"[] {line}")
    assert reader.told()["requests_total{model=,outcome=ok}"] == finished


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            ("value: n, total: true, labels: {outcome: ok}", "value: n, over: m, labels: {outcome: ok}"),
            "no group named 'm'",
        ),
        (("$rank.$pipeline.$tensor", "$host"), "no group named 'host'"),
        (("spoils: [step]", "spoils: [stop]"), "pattern idle: spoils 'stop', no such pattern"),
        (
            ("signal: requests_running, value: n", "signal: requests_running, value: n, total: true"),
            "total: is for counters",
        ),
    ],
)
def test_a_mistake_in_the_newer_keys_is_told(change: tuple[str, str], problem: str) -> None:
    with pytest.raises(strictyaml.ConfigError, match=problem):
        strictyaml.parse(PARALLEL.replace(*change), Profile, "acme.yaml")


WEIGHTED = """
engine: acme
log:
  patterns:
    - name: steps
      regex: 'mean (?P<ms>\\S+) ms of (?P<n>\\S+) steps'
      signals:
        - {signal: step_latency_seconds, value: ms, unit: ms, weight: n, labels: {phase: decode}}
        - {signal: tokens_total, value: n, labels: {kind: generation}}
    - name: batch
      regex: '(?P<batch>\\d+) requests(?:, each (?P<each>\\S+) tokens)?, (?P<speed>\\S+) tokens/s'
      signals:
        - {signal: step_latency_seconds, value: batch, times: each, over: speed, weight: '40', labels: {phase: mixed}}
        - {signal: step_seconds_total, value: batch, times: each, over: speed, weight: '40', labels: {phase: mixed}}
"""


@pytest.mark.parametrize(
    ("ms", "n", "observed"),
    [
        ("20", "5", 5),
        ("20", "9" * 400, 0),
        ("20", "9" * 300, 0),
        ("9" * 400, "5", 0),
        ("9" * 12, "5", 0),  # thirty years
        ("nan", "inf", 0),
        ("-1", "-1", 0),
        ("20", "many", 0),
    ],
)
def test_no_number_in_a_line_is_too_much(ms: str, n: str, observed: int) -> None:
    reader = Reader(strictyaml.parse(WEIGHTED, Profile, "acme.yaml"))
    for _ in range(3):
        reader.feed(f"mean {ms} ms of {n} steps")
    found = reader.store.histograms.get(catalog.STEP_LATENCY, {}).get(("", "decode", "log"))
    assert (found.cumulative()[-1] if found else 0) == 3 * observed
    assert all(value < 1e19 for series in reader.store.counters.values() for value in series.values())
    if not observed:
        assert reader.store.counters[catalog.SERIES_DROPPED]["stopline_step_latency_seconds",] == 3


@pytest.mark.parametrize(
    ("line", "step"), [("6 requests, 300 tokens/s", 0.02), ("6 requests, each 1.5 tokens, 300 tokens/s", 0.03)]
)
def test_a_line_that_stands_for_so_many_steps_each_time(line: str, step: float) -> None:
    told = Reader(strictyaml.parse(WEIGHTED, Profile, "acme.yaml")).feed(line).told()
    assert told == pytest.approx(
        {"step_latency_seconds{model=,phase=mixed}": 40 * step, "step_seconds_total{model=,phase=mixed}": 40 * step}
    )


@pytest.mark.parametrize(
    "line", ["rid=5 total_time_ms=57.9ms", "rid=5 total_time_ms=57.9", "rid=5 request_latency=57.9ms"]
)
def test_a_unit_in_the_line_is_that_of_the_field_and_not_of_what_it_counts(line: str) -> None:
    told = Reader("generic").feed(line).told()
    assert told == pytest.approx({"request_latency_seconds{model=}": 0.0579, "requests_total{model=,outcome=ok}": 1.0})
