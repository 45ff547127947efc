"""Stopline: a Prometheus exporter and alerting sidecar for LLM inference servers."""

__version__ = "0.1.0"
