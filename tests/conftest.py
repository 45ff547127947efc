"""Options and fixtures of the whole suite."""

from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


_LONG = (
    *("test_pages.py", "test_boards_live.py", "test_judge.py", "test_replay.py", "test_rules.py", "test_faults.py"),
    *(
        "test_soak.py",
        "test_sidecar.py",
        "test_attack.py",
        "test_demo.py",
        "test_webfile.py",
        "test_ramp.py",
        "test_real_llamacpp.py",
    ),
)


def pytest_collection_modifyitems(items):
    """Long files first: each goes to one worker whole, and the last to begin one keeps all others waiting."""
    items.sort(key=lambda item: _LONG.index(item.path.name) if item.path.name in _LONG else len(_LONG))


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
