"""Every query of the boards against a real Prometheus, which holds what real sidecars told of a fleet in trouble."""

import math
import re
from collections.abc import Iterator

import boards
import fleet
import pytest
from boards import Target, filled

PACE = 10.0
RATE = f"{4 * 30_000 / PACE:.0f}ms"
SHOWN = f"{1_800 / PACE:.0f}s"

# Where a query gives nothing: in which of the two states, and why that is right.
SILENT = {
    "headroom / GPU with the least / {{text}}": "trouble: it is below the line",
    "headroom / GPU with the least / {{text}}: over": "quiet: none is below it",
    "headroom / KV cache / used": "trouble: it is over the line",
    "headroom / KV cache / used: over": "quiet: it is not",
    "headroom / ${gpu:text} / share limit": "quiet and trouble: these engines take their memory when they start",
    "lines / Errors: how many, of what share / last error ago": "quiet: there was none",
    "lines / Errors of the last five minutes, by kind / {{kind}}": "quiet: there was none",
    "lines / Memory: what is left / least free": "trouble: it is over",
    "lines / Memory: what is left / least free: over": "quiet: it is not",
    "lines / Values left out / {{family}}": "quiet and trouble: nothing was left out",
    "why / 1  Do requests wait? / explains": "quiet: none is slow",
}


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[fleet.Story, str]]:
    directory = tmp_path_factory.mktemp("boards")
    story = fleet.play(PACE, directory)
    with fleet.prometheus(story, directory) as address:
        yield story, address


def ask(address: str, target: Target, moment: float, **chosen: str) -> list[tuple[dict[str, str], float]]:
    """The last value of each series that the panel shows at *moment*."""
    expression = filled(target.expression, chosen=chosen, rate=RATE, shown=SHOWN)
    expression = re.sub(r"\[5m\]", f"[{300 / PACE:.0f}s]", expression)
    if target.instant:
        found = fleet.ask(address, "query", query=expression, time=moment)["result"]
        return [(one["metric"], float(one["value"][1])) for one in found]
    found = fleet.ask(address, "query_range", query=expression, start=moment - 600 / PACE, end=moment, step=60 / PACE)[
        "result"
    ]
    return [(one["metric"], float(one["values"][-1][1])) for one in found if one["values"][-1][0] > moment - 90 / PACE]


def test_every_query_gives_what_its_panel_shows(story: tuple[fleet.Story, str]) -> None:
    """Prints how many series each query gives, before the incidents and during them."""
    told, address = story
    print("\n| query | quiet | trouble |\n|---|---|---|")
    silent = {}
    for target in boards.targets():
        counts = [len(ask(address, target, moment)) for moment in (told.quiet, told.end - 1)]
        print(f"| {target} | {counts[0]} | {counts[1]} |")
        if states := [state for state, count in zip(("quiet", "trouble"), counts, strict=True) if not count]:
            silent[str(target)] = " and ".join(states)
    assert silent == {name: why.partition(":")[0] for name, why in SILENT.items()}


def test_no_query_gives_what_is_no_number_or_two_series_of_one_name(story: tuple[fleet.Story, str]) -> None:
    told, address = story
    for target in boards.targets():
        answer = ask(address, target, told.end - 1)
        assert not any(math.isnan(value) or math.isinf(value) for _, value in answer), target
        if target.legend != "__auto" and target.board != "stopline-why":
            names = [re.sub(r"\{\{(\w+)\}\}", lambda m: labels.get(m[1], ""), target.legend) for labels, _ in answer]  # noqa: B023
            assert len(set(names)) == len(names), target


def test_every_variable_offers_what_there_is(story: tuple[fleet.Story, str]) -> None:
    told, address = story
    offered = {
        where.rpartition(" ")[2]: {
            labels.get(name, labels.get("text")) if (name := where.rpartition(" ")[2]) != "gpu" else labels["text"]
            for labels, _ in ask(address, Target("", "", "", expression, "", True), told.end - 1)
        }
        - {None}
        for where, expression in boards.expressions().items()
        if " variable " in where
    }
    pods = {member.pod for member in fleet.MEMBERS}
    assert offered["namespace"] == {"sim"}
    assert offered["pod"] == pods - {"plain-0"}
    assert offered["instance"] == {f"{pod}:10777" for pod in pods}
    assert offered["model"] == {"hy3", "hy3-fp8", "queue", "cache", "ring", "unseen", _captured_model()}
    assert len(offered["gpu"]) == sum(len(_uuids(replica)) for replica in told.replicas)
    assert "hy3-memory GPU 7" in offered["gpu"]


def _captured_model() -> str:
    page = (fleet.FIXTURES / "metrics-idle.txt").read_text()
    return re.search(r'model_name="([^"]+)"', page)[1]  # type: ignore[index]


def _uuids(replica: fleet.Replica) -> set[str]:
    return {dict(labels)["uuid"] for name, labels in replica.series if name == "stopline_gpu_memory_total_bytes"}


def _one(pod: str) -> dict[str, str]:
    """What is chosen when a row of the table of replicas was clicked."""
    return {"instance": f"{pod}:10777"}


STATES = {  # of the lines latency, errors and memory; 3 over the line, 2 not judged, 1 a warning, 0 calm
    "hy3-0": (0, 0, 0),
    "hy3-latency": (3, 0, 0),
    "hy3-errors": (2, 3, 2),
    "hy3-memory": (0, 0, 3),
    "queue-0": (3, 0, 0),
    "cache-0": (3, 0, 3),
    "ring-0": (1, 0, 0),
    "unseen-0": (2, 2, 2),
    "plain-0": (2, 3, 0),  # its requests stand still, for its page does
    "fp8-tp8": (0, 0, 0),
    "fp8-tp4": (0, 0, 0),
}


def test_the_three_lines_are_what_happened_to_each_replica(story: tuple[fleet.Story, str]) -> None:
    told, address = story
    stats = [_the("lines", title, title) for title in ("Latency", "Errors", "Memory")]
    shown = {
        pod: tuple(int(value) for target in stats for _, value in ask(address, target, told.end - 1, **_one(pod)))
        for pod in STATES
    }
    assert shown == STATES
    quiet = {pod: tuple(v for t in stats for _, v in ask(address, t, told.quiet, **_one(pod))) for pod in STATES}
    assert quiet == dict.fromkeys(STATES, (0, 0, 0)) | {"plain-0": (2, 0, 0)}  # nothing was asked of it: no baseline


WHY = {  # of latency, errors and memory; nothing where the line is not judged
    "hy3-0": ("calm", "calm", "calm"),
    "hy3-latency": ("step", "calm", "calm"),
    "hy3-errors": ("", "cuda engine_dead", ""),
    "hy3-memory": ("calm", "calm", "growth headroom"),
    "queue-0": ("queue", "calm", "calm"),
    "cache-0": ("kv_cache", "calm", "kv_cache"),
    "ring-0": ("communication experts", "calm", "calm"),
    "unseen-0": ("", "", ""),
    "plain-0": ("", "stalled", "calm"),
    "fp8-tp8": ("calm", "calm", "calm"),
    "fp8-tp4": ("calm", "calm", "calm"),
}


def test_why_a_line_is_reached_is_what_was_done_to_each_replica(story: tuple[fleet.Story, str]) -> None:
    told, address = story
    asked = [
        (_the("lines", title, f"{{{{{label}}}}} · replicas: {{{{replicas}}}}"), label)
        for title, label in (
            ("Latency: why", "cause"),
            ("Errors: of what kind", "kind"),
            ("Memory: what is over", "reason"),
        )
    ]
    shown = {
        pod: tuple(
            " ".join(sorted(labels[label] for labels, _ in ask(address, target, told.end - 1, **_one(pod))))
            for target, label in asked
        )
        for pod in WHY
    }
    assert shown == WHY
    for n, (target, label) in enumerate(asked):
        reasons = " ".join(each[n] for each in WHY.values()).replace("calm", "").split()
        shown = {labels[label]: int(labels["replicas"]) for labels, _ in ask(address, target, told.end - 1)}
        assert len(shown) == 2, "of the whole fleet the two that most have"
        assert shown == {reason: reasons.count(reason) for reason in shown}


def test_a_gpu_is_at_its_line_when_the_memory_line_is_reached_by_it(story: tuple[fleet.Story, str]) -> None:
    told, address = story
    (target,) = (t for t in boards.targets() if t.panel.startswith("Each GPU") and t.ref == "B")
    for moment in (told.quiet, told.end - 1):
        over = fleet.ask(address, "query", query='stopline:memory:over_line{reason!="kv_cache"}', time=moment)["result"]
        found = ask(address, target, moment)
        assert {labels["pod"] for labels, value in found if value >= 1} == {one["metric"]["pod"] for one in over}
    leaking = {labels["gpu"]: labels["measure"] for labels, value in found if labels["pod"] == "hy3-memory"}
    assert leaking == dict.fromkeys("01234567", "growth")


def test_what_is_shown_is_what_the_engines_did(story: tuple[fleet.Story, str]) -> None:
    """Against the simulator itself, which needs no metric to know."""
    told, address = story
    replicas = {replica.name: replica for replica in told.replicas}

    def shown(board: str, panel: str, legend: str, pod: str) -> float:
        ((_, value),) = ask(address, _the(board, panel, legend), told.end, **_one(pod))
        return value

    leak, slow, full = replicas["hy3-memory"].engine, replicas["hy3-latency"].engine, replicas["cache-0"].engine
    free = leak.config.gpu_memory_bytes - leak.gpu_memory_used_bytes
    below = "{{text}}: over"
    assert shown("headroom", "GPU with the least", below, "hy3-memory") == pytest.approx(free, rel=0.05)
    assert shown("lines", "Memory: what is left", "least free: over", "hy3-memory") == pytest.approx(free, rel=0.05)
    assert free < 2**30
    weights = leak.config.weights_bytes
    assert shown("headroom", "${gpu:text}", "weights", "hy3-memory") == pytest.approx(weights, rel=0.01)
    assert shown("why", "2  Is the step slower?", "times", "hy3-latency") == pytest.approx(3, rel=0.2)
    assert shown("why", "Running and waiting", "places", "hy3-latency") == slow.config.max_running_requests
    assert (
        shown("headroom", "KV cache", "used: over", "cache-0")
        > 0.95
        > 0.5
        > shown("headroom", "KV cache", "used", "hy3-0")
    )
    assert shown("headroom", "For lack of KV cache", "preempted in 5 min", "cache-0") > 0
    assert shown("why", "Running and waiting", "running", "cache-0") <= full.config.max_running_requests
    assert shown("why", "4  Communication?", "share", "ring-0") == pytest.approx(0.6, abs=0.01)
    assert shown("why", "Balance of experts", "{{replica}}", "ring-0") == pytest.approx(0.55)
    assert shown("lines", "Errors: how many, of what share", "in 5 min", "hy3-0") == 0


def test_what_a_real_engine_told_is_shown_of_a_plain_scrape(story: tuple[fleet.Story, str]) -> None:
    """No namespace and no pod: what an alert's link leaves out is All, and what it gives is the scraped address."""
    told, address = story
    page = (fleet.FIXTURES / "metrics-c8.txt").read_text()
    running = float(re.search(r"(?m)^vllm:num_requests_running{.*} (\S+)$", page)[1])  # type: ignore[index]
    target = _the("why", "Running and waiting", "running")
    assert running > 0
    for chosen in ({"instance": "plain-0:10777"}, {"namespace": "", "pod": ""}):
        assert [value for _, value in ask(address, target, told.end - 1, **chosen)] == [running]
    replicas = ask(address, _the("lines", "Each replica", "A"), told.end - 1, **_one("plain-0"))
    assert [labels["replica"] for labels, _ in replicas] == ["plain-0:10777"]


def test_two_layouts_stand_beside_each_other_with_their_limits(story: tuple[fleet.Story, str]) -> None:
    told, address = story
    model = {"model": "hy3-fp8"}
    first = ask(address, _the("capacity", "Limit and knee", "A"), told.end, **model)
    layouts = {labels["config"]: labels["layout"] for labels, _ in first}
    assert sorted(layouts.values()) == ["TP4 PP1", "TP8 PP1"]
    limits, knees, best = (
        {
            layouts[labels["config"]]: value
            for labels, value in ask(address, _the("capacity", "Limit and knee", ref), told.end, **model)
        }
        for ref in "BCD"
    )
    assert limits["TP8 PP1"] > limits["TP4 PP1"]
    assert best["TP8 PP1"] > best["TP4 PP1"]
    assert all(limits[layout] <= knees[layout] for layout in limits)
    for panel in ("P99 by concurrency", "Throughput by concurrency"):
        levels = ask(address, _the("capacity", panel, "A"), told.end, **model)
        both = {
            layout: {labels["concurrency"] for labels, _ in levels if labels["layout"] == layout} for layout in limits
        }
        assert all({"1", "2", "4", "8", "16", "32", "64"} <= found for found in both.values()), (panel, both)


def _the(board: str, panel: str, legend: str) -> Target:
    (found,) = (
        t
        for t in boards.targets()
        if t.board == f"stopline-{board}"
        and t.panel == panel
        and legend in (t.legend, t.ref if t.legend == "__auto" else "")
    )
    return found
