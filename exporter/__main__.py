"""The command ``stopline``, also as ``python -m exporter``."""

import signal
import sys


def main() -> None:
    """Run it. What asks ``stopline run`` to reload while it starts is heard once it has started, and never ends it."""
    if sys.argv[1:2] == ["run"]:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    from exporter.cli import main as command  # which takes a while to load

    command()


if __name__ == "__main__":
    main()
