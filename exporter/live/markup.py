"""HTML that cannot be broken by what it holds: all text is escaped, unless it is Html already."""

import html


class Html(str):
    """Markup. Only `tag`, `join` and a file of our own make it."""

    __slots__ = ()


Content = Html | str | None
Attribute = str | float | bool | None


def tag(name: str, /, *content: Content, **attributes: Attribute) -> Html:
    """An element; ``class_`` is class, ``aria_label`` aria-label. None and False leave an attribute out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Html(f"<{name}{written}>{join(*content)}</{name}>")


def join(*content: Content) -> Html:
    """One after the other."""
    return Html("".join(each if isinstance(each, Html) else html.escape(each) for each in content if each))


def _value(value: Attribute) -> str:
    if value is True:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else html.escape(str(value))
