"""Is the Stopline of this container alive? ``python -m exporter.alive``: exit 0 or 1, for a container's health check.

Asks the port of STOPLINE_WEB_LISTEN_ADDRESS, in plain HTTP or TLS, whichever is spoken there; a certificate is not
verified, for it is our own. Only the standard library is loaded.
"""

import http.client
import os
import ssl
import sys

_TIMEOUT_SECONDS = 2.0
_DEFAULT_PORT = 10777


def is_alive(port: int, host: str = "127.0.0.1") -> bool:
    """Whether /-/healthy answers. Where a client's certificate is wanted, that it says so is enough."""
    connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_SECONDS)
    try:
        return _status(connection) == 200
    except (OSError, http.client.HTTPException):
        pass
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    encrypted = http.client.HTTPSConnection(host, port, timeout=_TIMEOUT_SECONDS, context=context)
    try:
        encrypted.connect()
    except OSError:
        return False
    try:
        return _status(encrypted) == 200
    except (ssl.SSLError, ConnectionError):  # it wants to see a certificate
        return True
    except (OSError, http.client.HTTPException):
        return False


def _status(connection: http.client.HTTPConnection) -> int:
    try:
        connection.request("GET", "/-/healthy")
        return connection.getresponse().status
    finally:
        connection.close()


if __name__ == "__main__":
    host, _, port = os.environ.get("STOPLINE_WEB_LISTEN_ADDRESS", "").rpartition(":")
    sys.exit(not is_alive(int(port or _DEFAULT_PORT), host.strip("[]") or "127.0.0.1"))
