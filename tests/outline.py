"""What is in an HTML page, for tests: the same whoever wrote it, we or a browser."""

from html.parser import HTMLParser


class Outline(HTMLParser):
    """What is in a page: elements with their attributes, and all text, as a browser has them."""

    VOID = ("meta", "link")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == [], "elements that are not closed"

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attributes)))
        if name not in self.VOID:
            self._open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self._open.pop() == name

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self._open):
            self.text += data

    def having(self, attribute: str) -> list[str | None]:
        return [attributes[attribute] for _, attributes in self.elements if attribute in attributes]

    def holds(self, part: "Outline") -> bool:
        """Whether *part* is in it, element by element and word by word."""
        size = len(part.elements)
        starts = range(len(self.elements) - size + 1)
        return part.text in self.text and any(self.elements[n : n + size] == part.elements for n in starts)
