"""``python -m exporter`` is ``stopline``."""

from exporter.cli import main

main()
