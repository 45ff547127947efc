"""Panels as all boards have them: each with a unit, a title, a description, and a text for when there is no data.

A panel without data must never look calm, so that text says what cannot be judged and why.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from grafana_foundation_sdk.builders import (
    barchart,
    bargauge,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    text,
    timeseries,
)
from grafana_foundation_sdk.builders import (
    common as parts,
)
from grafana_foundation_sdk.builders.dashboard import Row
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from grafana_foundation_sdk.models.text import TextMode

GREEN, AMBER, RED, BLUE, GREY = "green", "orange", "red", "blue", "#8e8e8e"
UNJUDGED = "purple"
"""Of what cannot be judged: none of the three colours of a stop line."""
DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
Shown = Builder[models.Panel]
STATES = {0: ("calm", GREEN), 1: ("warning", AMBER), 2: ("not judged", UNJUDGED), 3: ("OVER THE LINE", RED)}
"""Of the recorded series stopline:line:state."""

Panel = TypeVar(
    "Panel",
    timeseries.Panel,
    stat.Panel,
    table.Panel,
    statetimeline.Panel,
    bargauge.Panel,
    barchart.Panel,
    heatmap.Panel,
)


def query(expression: str, legend: str = "", *, instant: bool = False, rows: bool = False) -> prometheus.Dataquery:
    """*rows*: for a table, at the end of the time that is shown."""
    made = prometheus.Dataquery().expr(expression).legend_format(legend or "__auto").datasource(DATASOURCE)
    made = made.instant() if instant or rows else made.range()
    if rows:
        made = made.format(PromQueryFormat.TABLE)
    return made


def _ask(panel: Panel, queries: Iterable[prometheus.Dataquery]) -> Panel:
    for number, each in enumerate(queries):
        panel = panel.with_target(each.ref_id(chr(ord("A") + number)))
    return panel


def _begin(panel: Panel, title: str, about: str, unit: str, empty: str, width: int, height: int) -> Panel:
    panel = panel.title(title).description(about).unit(unit).no_value(empty)
    return panel.datasource(DATASOURCE).span(width).height(height)


# time series


def lines(
    title: str,
    about: str,
    *queries: prometheus.Dataquery,
    unit: str,
    empty: str,
    width: int = 8,
    height: int = 8,
    fill: int = 8,
    floor: float | None = 0,
    legend: bool = True,
) -> timeseries.Panel:
    """A time series panel; *floor* is the least that the axis shows."""
    shown = parts.VizLegendOptions().show_legend(legend).placement(common.LegendPlacement.BOTTOM)
    panel = (
        _begin(timeseries.Panel(), title, about, unit, empty, width, height)
        .legend(shown.display_mode(common.LegendDisplayMode.LIST).calcs([]))
        .tooltip(parts.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING))
        .draw_style(common.GraphDrawStyle.LINE)
        .line_width(2)
        .fill_opacity(fill)
        .show_points(common.VisibilityMode.NEVER)
        .span_nulls(90_000)  # two evaluations of the rules that failed; a longer gap is shown as one
    )
    if floor is not None:
        panel = panel.axis_soft_min(floor) if floor else panel.min(0)
    return _ask(panel, queries)


def stacked(panel: timeseries.Panel) -> timeseries.Panel:
    return (
        panel.stacking(parts.StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
        .fill_opacity(70)
        .line_width(1)
    )


def _custom(name: str, value: Any) -> models.DynamicConfigValue:
    return models.DynamicConfigValue(id_val=f"custom.{name}", value=value)


def color(value: str) -> models.DynamicConfigValue:
    return models.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": value})


def limit(tone: str = RED) -> list[models.DynamicConfigValue]:
    """How a line is drawn that others are held against: dashed, without filling, not stacked."""
    return [
        color(tone),
        _custom("lineStyle", {"fill": "dash", "dash": [8, 6]}),
        _custom("fillOpacity", 0),
        _custom("lineWidth", 2),
        _custom("stacking", {"mode": "none", "group": "none"}),
    ]


def line(tone: str) -> list[models.DynamicConfigValue]:
    return [color(tone), _custom("fillOpacity", 0), _custom("stacking", {"mode": "none", "group": "none"})]


def right(unit: str, label: str, **bounds: float) -> list[models.DynamicConfigValue]:
    """On an axis of its own."""
    given = [models.DynamicConfigValue(id_val=name, value=value) for name, value in bounds.items()]
    return [
        models.DynamicConfigValue(id_val="unit", value=unit),
        _custom("axisPlacement", "right"),
        _custom("axisLabel", label),
        *given,
    ]


# single values


def words(values: dict[int, tuple[str, str]]) -> list[models.ValueMapping]:
    """Numbers shown as words, each with its colour."""
    results = {
        str(number): models.ValueMappingResult(text=name, color=tone, index=at)
        for at, (number, (name, tone)) in enumerate(values.items())
    }
    return [models.ValueMap(options=results)]


def words_column(tones: dict[str, str], width: int) -> list[models.DynamicConfigValue]:
    """A column of a table whose words have colours."""
    options = {name: {"text": name, "color": tone, "index": at} for at, (name, tone) in enumerate(tones.items())}
    return [
        models.DynamicConfigValue(id_val="mappings", value=[{"type": "value", "options": options}]),
        _custom("cellOptions", {"type": "color-background", "mode": "basic"}),
        _custom("width", width),
    ]


def colored(tone: str) -> list[models.DynamicConfigValue]:
    """A column of a table that stands out."""
    return [color(tone), _custom("cellOptions", {"type": "color-text"})]


def gauge_column(tone: str = "") -> list[models.DynamicConfigValue]:
    """A column of ratios drawn as bars; without a *tone* coloured by its thresholds."""
    return [
        _custom("cellOptions", {"type": "gauge", "mode": "basic"}),
        models.DynamicConfigValue(id_val="min", value=0),
        models.DynamicConfigValue(id_val="max", value=1),
        *([color(tone)] if tone else []),
    ]


def nearness(width: int) -> list[models.DynamicConfigValue]:
    """A column of shares of a line drawn as bars that are full, and red, from 1 on."""
    return [*shares(0.75, 1, width), *gauge_column()]


def shares(amber: float, red: float, width: int) -> list[models.DynamicConfigValue]:
    """A column of ratios, coloured by how near they are to 1; an empty cell has no colour."""
    colours = ((None, "transparent"), (0, GREEN), (amber, AMBER), (red, RED))
    marks = [{"value": value, "color": tone} for value, tone in colours]
    return [
        models.DynamicConfigValue(id_val="noValue", value="-"),
        models.DynamicConfigValue(id_val="unit", value="percentunit"),
        models.DynamicConfigValue(id_val="decimals", value=0),
        models.DynamicConfigValue(id_val="thresholds", value={"mode": "absolute", "steps": marks}),
        models.DynamicConfigValue(id_val="color", value={"mode": "thresholds"}),
        _custom("cellOptions", {"type": "color-background", "mode": "basic"}),
        _custom("width", width),
    ]


def from_value(value: float, tone: str) -> list[models.DynamicConfigValue]:
    """Coloured from *value* on."""
    marks = [{"value": None, "color": "text"}, {"value": value, "color": tone}]
    return [
        models.DynamicConfigValue(id_val="thresholds", value={"mode": "absolute", "steps": marks}),
        models.DynamicConfigValue(id_val="color", value={"mode": "thresholds"}),
    ]


def steps(*pairs: tuple[float | None, str]) -> dashboard.ThresholdsConfig:
    made = [models.Threshold(value=value, color=tone) for value, tone in pairs]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(made)


def values(
    title: str,
    about: str,
    *queries: prometheus.Dataquery,
    unit: str,
    empty: str,
    width: int = 8,
    height: int = 4,
    filled: bool = False,
    named: bool = True,
    tone: str = "text",
) -> stat.Panel:
    """Numbers to be read from afar; *filled* gives them their colour as background, *named* their legend below."""
    panel = (
        _begin(stat.Panel(), title, about, unit, empty, width, height)
        .reduce_options(parts.ReduceDataOptions().calcs(["lastNotNull"]).values(False).fields(""))
        .orientation(common.VizOrientation.VERTICAL if filled else common.VizOrientation.AUTO)
        .text_mode(common.BigValueTextMode.VALUE_AND_NAME if named else common.BigValueTextMode.VALUE)
        .color_mode(common.BigValueColorMode.BACKGROUND_SOLID if filled else common.BigValueColorMode.VALUE)
        .graph_mode(common.BigValueGraphMode.NONE)
        .justify_mode(common.BigValueJustifyMode.CENTER)
        .thresholds(steps((None, tone)))
    )
    return _ask(panel, queries)


def phrases(
    title: str,
    about: str,
    expression: str,
    label: str,
    spoken: Mapping[str, tuple[str, str]],
    *,
    empty: str,
    width: int,
    height: int,
) -> stat.Panel:
    """A word of the series' *label* as a phrase that is read from afar, and small above it on how many replicas.

    *expression* is from `promql.counted`; *spoken* has the phrase and its colour for each word. Several stand below each
    other.
    """
    asked = query(expression, f"{{{{{label}}}}} · replicas: {{{{replicas}}}}", instant=True)
    panel = values(title, about, asked, unit="short", empty=empty, width=width, height=height)
    panel = panel.orientation(common.VizOrientation.HORIZONTAL).wide_layout(False)
    for word, (phrase, tone) in spoken.items():
        mapping = {"type": "value", "options": {"1": {"text": phrase, "color": tone, "index": 0}}}
        panel = panel.override_by_regexp(
            f"/^{word} /", [models.DynamicConfigValue(id_val="mappings", value=[mapping]), color(tone)]
        )
    return panel


def levels(
    title: str,
    about: str,
    *queries: prometheus.Dataquery,
    unit: str,
    empty: str,
    columns: str,
    width: int = 24,
    height: int = 8,
) -> barchart.Panel:
    """Bars by concurrency, and beside each other one for each value of the label *columns*."""
    panel = (
        _begin(barchart.Panel(), title, about, unit, empty, width, height)
        .orientation(common.VizOrientation.VERTICAL)
        .stacking(common.StackingMode.NONE)
        .show_value(common.VisibilityMode.AUTO)
        .group_width(0.75)
        .bar_width(0.95)
        .fill_opacity(85)
        .line_width(0)
        .axis_soft_min(0)
        .x_field(f"concurrency\\{columns}")
        .legend(
            parts.VizLegendOptions()
            .show_legend(True)
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
            .calcs([])
        )
        .tooltip(parts.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
    )
    panel = _ask(panel, queries)
    number = {"conversions": [{"targetField": "concurrency", "destinationType": "number"}]}
    matrix = {"columnField": columns, "rowField": "concurrency", "valueField": "Value", "emptyValue": "null"}
    for name, options in (
        ("convertFieldType", number),
        ("sortBy", {"sort": [{"field": "concurrency"}]}),
        ("groupingToMatrix", matrix),
    ):
        panel = panel.with_transformation(models.DataTransformerConfig(id_val=name, options=options))
    return panel


def bars(
    title: str,
    about: str,
    *queries: prometheus.Dataquery,
    unit: str,
    empty: str,
    width: int = 8,
    height: int = 6,
) -> bargauge.Panel:
    panel = (
        _begin(bargauge.Panel(), title, about, unit, empty, width, height)
        .reduce_options(parts.ReduceDataOptions().calcs(["lastNotNull"]).values(False).fields(""))
        .orientation(common.VizOrientation.HORIZONTAL)
        .display_mode(common.BarGaugeDisplayMode.BASIC)
        .value_mode(common.BarGaugeValueMode.TEXT)
        .name_placement(common.BarGaugeNamePlacement.LEFT)
        .show_unfilled(True)
        .min_viz_height(16)
        .max_viz_height(40)
        .min_viz_width(8)
        .sizing(common.BarGaugeSizing.AUTO)
    )
    return _ask(panel, queries)


# more of them


def rows(
    title: str,
    about: str,
    *queries: prometheus.Dataquery,
    unit: str = "short",
    empty: str,
    columns: Sequence[tuple[str, str]],
    width: int = 24,
    height: int = 8,
    sort: str = "",
    descending: bool = True,
) -> table.Panel:
    """A table of instant queries; *columns* are those that are kept, in their order, each with its heading.

    A column is a label, or `Value` (`Value #A` where there are several queries).
    """
    kept = dict(columns)
    panel = _begin(table.Panel(), title, about, unit, empty, width, height).show_header(True)
    panel = panel.cell_height(common.TableCellHeight.SM).align(common.FieldTextAlignment.AUTO).inspect(False)
    several = len(queries) > 1
    panel = _ask(panel, queries)
    if several:
        panel = panel.with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
    panel = panel.with_transformation(
        models.DataTransformerConfig(id_val="filterFieldsByName", options={"include": {"names": list(kept)}})
    )
    panel = panel.with_transformation(
        models.DataTransformerConfig(
            id_val="organize",
            options={
                "indexByName": {name: at for at, name in enumerate(kept)},
                "renameByName": {name: heading for name, heading in kept.items() if heading != name},
                "excludeByName": {},
            },
        )
    )
    if sort:
        panel = panel.sort_by([parts.TableSortByFieldState().display_name(sort).desc(descending)])
    return panel


def joined(
    title: str,
    about: str,
    first: str,
    labels: Sequence[tuple[str, str]],
    asked: Mapping[str, str],
    *,
    after: Sequence[tuple[str, str]] = (),
    **options: Any,
) -> table.Panel:
    """A table with a row for each series of *first*: its *labels*, and a column for each of *asked* (PromQL by heading).

    *after* are further labels, in the last columns; all *options* are those of `rows`.
    """
    letters = (chr(ord("B") + at) for at in range(len(asked)))
    numbers = [(f"Value #{letter}", head) for letter, head in zip(letters, asked, strict=True)]
    queries = (query(each, rows=True) for each in (first, *asked.values()))
    return rows(title, about, *queries, columns=[*labels, *numbers, *after], **options)


def cells(
    unit: str | None = None,
    mapped: dict[int, tuple[str, str]] | None = None,
    *,
    decimals: int | None = None,
    width: int | None = None,
    link: tuple[str, str] | None = None,
    optional: bool = False,
    hidden: bool = False,
) -> list[models.DynamicConfigValue]:
    """How a column of a table is shown; in an *optional* one an empty cell means nothing."""
    found = []
    if optional:
        found.append(models.DynamicConfigValue(id_val="noValue", value="-"))
    if hidden:
        found.append(_custom("hidden", True))
    if unit:
        found.append(models.DynamicConfigValue(id_val="unit", value=unit))
    if decimals is not None:
        found.append(models.DynamicConfigValue(id_val="decimals", value=decimals))
    if width is not None:
        found.append(_custom("width", width))
    if mapped:
        unknown = {"match": "null", "result": {"text": "not judged", "color": UNJUDGED, "index": len(mapped)}}
        both = [*(each.to_json() for each in words(mapped)), {"type": "special", "options": unknown}]
        found.append(models.DynamicConfigValue(id_val="mappings", value=both))
        found.append(_custom("cellOptions", {"type": "color-background", "mode": "basic"}))
    if link:
        title, url = link
        found.append(models.DynamicConfigValue(id_val="links", value=[{"title": title, "url": url}]))
    return found


def states(
    title: str,
    about: str,
    *queries: prometheus.Dataquery,
    mapped: dict[int, tuple[str, str]],
    empty: str,
    width: int = 24,
    height: int = 8,
) -> statetimeline.Panel:
    """Each series a bar over time, coloured by what *mapped* says of its value."""
    panel = (
        _begin(statetimeline.Panel(), title, about, "short", empty, width, height)
        .mappings(words(mapped))
        .show_value(common.VisibilityMode.NEVER)
        .merge_values(True)
        .row_height(0.8)
        .fill_opacity(90)
        .line_width(0)
        .legend(
            parts.VizLegendOptions()
            .show_legend(True)
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
        )
        .tooltip(parts.VizTooltipOptions().mode(common.TooltipDisplayMode.SINGLE))
        .thresholds(steps((None, GREY)))
    )
    return _ask(panel, queries)


def heat(
    title: str, about: str, *queries: prometheus.Dataquery, unit: str, empty: str, width: int = 8, height: int = 8
) -> heatmap.Panel:
    """A Prometheus histogram over time; each bucket's count a cell."""
    panel = (
        _begin(heatmap.Panel(), title, about, unit, empty, width, height)
        .calculate(False)
        .color(heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges").steps(64).exponent(0.5))
        .y_axis(heatmap.YAxisConfig().unit(unit).axis_placement(common.AxisPlacement.LEFT))
        .cell_gap(0)
        .show_value(common.VisibilityMode.NEVER)
        .hide_legend()
        .hide_from(parts.HideSeriesConfig().viz(False).legend(False).tooltip(False))
    )
    return _ask(panel, [each.format(PromQueryFormat.HEATMAP) for each in queries])


def markdown(title: str, about: str, content: str, width: int, height: int) -> text.Panel:
    return (
        text.Panel().title(title).description(about).mode(TextMode.MARKDOWN).content(content).span(width).height(height)
    )


def row(title: str) -> Row:
    return dashboard.Row(title)
