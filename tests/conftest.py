"""Options and fixtures of the whole suite."""

from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/ and review the diff")


@pytest.fixture
def golden(request):
    """Compare text with a checked-in file; with --update-golden rewrite it instead."""

    def check(name: str, actual: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.write_text(actual)
        assert path.read_text() == actual, f"{name} differs; rerun with --update-golden and read the diff"

    return check
