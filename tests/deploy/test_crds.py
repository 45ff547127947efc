"""The custom resources that ship against their schemas, and that these schemas refuse what an API server would drop."""

import copy

import jsonschema
import pytest
from manifests import DEPLOY, Manifest, check_schemas, kustomize, parsed

EVERYTHING = ("podmonitor", "rules", "examples/two-nodes")


def shipped(kind: str) -> Manifest:
    """One of this *kind*."""
    found = [m for directory in EVERYTHING for m in parsed(kustomize(DEPLOY / "kustomize" / directory))]
    return copy.deepcopy(next(m for m in found if m["kind"] == kind))


@pytest.mark.parametrize("directory", EVERYTHING)
def test_what_ships_is_known(directory: str) -> None:
    check_schemas(parsed(kustomize(DEPLOY / "kustomize" / directory)))


@pytest.mark.parametrize(
    ("kind", "path", "value", "problem"),
    [
        ("PodMonitor", ("podMetricsEndpoints", 0, "intervall"), "15s", "'intervall' was unexpected"),
        ("PodMonitor", ("podMetricsEndpoints", 0, "interval"), "often", "'often'"),
        ("PodMonitor", ("selector",), "stopline", "'stopline'"),
        ("PrometheusRule", ("groups", 0, "rules", 0, "fore"), "5m", "'fore' was unexpected"),
        ("PrometheusRule", ("groups", 0, "interval"), "5 minutes", "'5 minutes'"),
        ("LeaderWorkerSet", ("leaderWorkerTemplate", "restartPolicy"), "Never", "'Never' is not one of"),
        ("LeaderWorkerSet", ("leaderWorkerTemplate", "leader"), {}, "'leader' was unexpected"),
    ],
)
def test_a_mistake_is_found(kind: str, path: tuple[str | int, ...], value: object, problem: str) -> None:
    manifest = shipped(kind)
    place = manifest["spec"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError) as caught:
        check_schemas([manifest])
    causes = [caught.value, *(c for c in caught.value.context or ())]
    assert any(problem in cause.message for error in causes for cause in (error, *(error.context or ())))
