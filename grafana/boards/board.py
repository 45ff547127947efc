"""What all boards share: variables, links to each other, alerts as annotations."""

from grafana_foundation_sdk.builders.dashboard import (
    AnnotationQuery,
    Dashboard,
    DashboardLink,
    DatasourceVariable,
    QueryVariable,
)
from grafana_foundation_sdk.models import dashboard as models

from .panels import AMBER, DATASOURCE, STATES, Shown, query, values, words
from .promql import REPLICA, SELECTED, matching, of

LINES, HEADROOM, WHY, CAPACITY = "stopline-lines", "stopline-headroom", "stopline-why", "stopline-capacity"
TITLES = {
    LINES: "Stopline / Stop lines",
    HEADROOM: "Stopline / Headroom, live",
    WHY: "Stopline / Why is it slow",
    CAPACITY: "Stopline / Capacity",
}


def alerts(names: str, state: str) -> str:
    """Of the selected replicas; those of a whole configuration, or of all, have no pod and show while All is chosen."""
    found = matching("ALERTS", f'alertname=~"{names}"', f'alertstate=~"{state}"', SELECTED)
    return f"({found} unless on ({REPLICA}) {matching('stopline:replica:model', f'model!~{chr(34)}$model{chr(34)}')})"


UNSEEN = "cannot be judged: no rule of Stopline has been evaluated for these replicas"
FIRING = alerts("Stopline.+", "firing")


def begin(uid: str, about: str, *, since: str = "now-1h", refresh: str = "30s") -> Dashboard:
    """An empty board. Classic schema of Grafana 10; newer ones bring it up to theirs when they load it."""
    board = (
        Dashboard(TITLES[uid])
        .uid(uid)
        .description(about)
        .tags(["stopline", "llm"])
        .time(since, "now")
        .refresh(refresh)
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .readonly()
    )
    for variable in _variables():
        board = board.with_variable(variable)
    for other, title in TITLES.items():
        if other != uid:
            board = board.link(_link(other, title.removeprefix("Stopline / ")))
    return board.annotation(_Alerts())


def state(line: str, title: str, about: str = "", *, legend: str = "", width: int = 8, height: int = 4) -> Shown:
    """One of the three lines as a word in its colour, from the series that the alert rules record."""
    return values(
        title,
        about or f"State of the {line} line on the worst of the selected replicas, as the alert rules have it.",
        query(f"max({of('stopline:line:state', line=line)})", legend or title, instant=True),
        unit="short",
        empty=UNSEEN,
        width=width,
        height=height,
        filled=True,
        named=False,
    ).mappings(words(STATES))


def _variables() -> list[DatasourceVariable | QueryVariable]:
    """`instance` is the scraped address, which alone tells replicas apart where a scrape sets no pod."""
    datasource = DatasourceVariable("datasource").label("Data source").type("prometheus")
    datasource = datasource.current(models.VariableOption(text="default", value="default"))
    return [
        datasource,
        listed("namespace", "Namespace", "label_values(stopline:replica:model, namespace)"),
        listed("model", "Model", 'label_values(stopline:replica:model{namespace=~"$namespace"}, model)'),
        listed("pod", "Pod", 'label_values(stopline:replica:model{namespace=~"$namespace", model=~"$model"}, pod)'),
        listed(
            "instance",
            "Instance",
            'label_values(stopline:replica:model{namespace=~"$namespace", model=~"$model", pod=~"$pod"}, instance)',
        ),
    ]


def listed(name: str, label: str, query: str, *, regex: str = "") -> QueryVariable:
    """A choice of several values, at first all: `.*`, which also matches a label that is not there."""
    variable = (
        QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query({"query": query, "refId": f"{name}-variable", "qryType": 3 if query.startswith("query_result") else 1})
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(text=["All"], value=["$__all"], selected=True))
    )
    return variable.regex(regex) if regex else variable


def _link(uid: str, title: str) -> DashboardLink:
    return (
        DashboardLink(title)
        .type(models.DashboardLinkType.LINK)
        .url(f"/d/{uid}")
        .icon("dashboard")
        .tooltip(f"{title}, for the same replicas and the same time")
        .include_vars(True)
        .keep_time(True)
        .target_blank(False)
    )


class _Alerts(AnnotationQuery):
    """What fires, marked on every time series."""

    def __init__(self) -> None:
        super().__init__()
        self._internal = _Annotation(name="Alerts", datasource=DATASOURCE, icon_color=AMBER, expr=FIRING)


class _Annotation(models.AnnotationQuery):
    """With the keys of a Prometheus annotation, which the library's type does not have."""

    def to_json(self) -> dict[str, object]:
        return super().to_json() | {
            "titleFormat": "{{alertname}}",
            "textFormat": "{{severity}}: {{pod}} {{instance}} {{kind}}",
            "tagKeys": "line",
            "step": "30s",
        }
