"""How the boards ask: the series of the replicas that are selected, and names for them that always work.

`namespace` and `pod` are not there in a plain scrape; a variable's All is the regular expression `.*`, which a label
that is absent matches too.
"""

REPLICA = "cluster, namespace, job, pod, instance"
SELECTED = 'namespace=~"$namespace", pod=~"$pod", instance=~"$instance"'
MODEL = 'model=~"$model"'
RATE = "$__rate_interval"
RULES_WINDOW = "5m"
"""Of the recorded quantiles; what stands beside one of them in a panel is read over the same time."""


def matching(name: str, /, *matchers: str, **equal: str) -> str:
    return (
        f"{name}{{{', '.join([*matchers, *(f'{label}={chr(34)}{value}{chr(34)}' for label, value in equal.items())])}}}"
    )


def of(name: str, /, *matchers: str, window: str = "", over: str = "", **equal: str) -> str:
    """Series that have no label `model`, of the selected replicas, by the model that each serves.

    *over* is a function of their last *window*.
    """
    series = matching(name, SELECTED, *matchers, **equal)
    if over:
        series = f"{over}({series}[{window}])"
    return f"({series} and on ({REPLICA}) {matching('stopline:replica:model', SELECTED, MODEL)})"


def of_model(name: str, /, *matchers: str, window: str = "", **equal: str) -> str:
    """Series that have it themselves."""
    return matching(name, SELECTED, MODEL, *matchers, **equal) + (f"[{window}]" if window else "")


def of_config(name: str, /, *matchers: str, **equal: str) -> str:
    """Series by model and configuration, over all replicas: of the configurations that the selected ones run."""
    return f"({matching(name, MODEL, *matchers, **equal)} and on (config) {matching('stopline:config:info', SELECTED)})"


def alive(expression: str) -> str:
    """Without the replicas whose engine is down: what it has left free there is no room."""
    return f"({expression} unless on ({REPLICA}) {of('stopline:engine:down')})"


def per_second(name: str, /, *matchers: str, **equal: str) -> str:
    return of(name, *matchers, over="rate", window=RATE, **equal)


def increase(name: str, /, *matchers: str, **equal: str) -> str:
    return of(name, *matchers, over="increase", window=RATE, **equal)


def quantile(q: float, name: str, /, *matchers: str, by: str = "", **equal: str) -> str:
    """Of a histogram's observations on all selected replicas together; nothing where there were none."""
    labels = f"{by}, le" if by else "le"
    series = of_model(name, *matchers, window=RULES_WINDOW, **equal)
    return f"histogram_quantile({q}, sum by ({labels}) (rate({series}))) >= 0"


def how_many(series: str, among: str) -> str:
    """How many series there are, 0 where there is none *among* some; nothing where these are not there either."""
    return f"count({series}) or 0 * count({among})"


def counted(series: str, label: str, most: int) -> str:
    """Of each value of *label* a series of value 1, whose label `replicas` says how many replicas have it.

    Of more values than *most* those that most replicas have.
    """
    replicas = f"topk({most}, count by ({label}) (group by ({REPLICA}, {label}) ({series})))"
    return f'count_values by ({label}) ("replicas", {replicas})'


def replica(expression: str) -> str:
    """With a label `replica`: the pod, or where there is none the scraped address."""
    named = f'label_replace({expression}, "replica", "$1", "instance", "(.*)")'
    return f'label_replace({named}, "replica", "$1", "pod", "(.+)")'


def labelled(expression: str, **labels: str) -> str:
    """With further labels, of the same value on every series."""
    for name, value in labels.items():
        expression = f'label_replace({expression}, "{name}", "{value}", "", "")'
    return expression


def worst(n: int, expression: str, by: str = "topk") -> str:
    """The *n* series that were highest (or, with bottomk, lowest) in what is shown, the same ones all along."""
    over = "max" if by == "topk" else "min"
    return f"({expression}) and {by}({n}, {over}_over_time(({expression})[$__range:] @ end()))"


def threshold(line: str, told: str, aggregate: str = "min") -> str:
    """The selected replicas' setting, the strictest where they differ; not where there is nothing to hold against it.

    A line alone would look like something that is judged.
    """
    return f"{aggregate}({of('stopline:threshold:latest', line=line)}) and on () count({told})"
