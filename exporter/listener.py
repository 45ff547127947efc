"""An address on which an application answers, whose TLS can change while it does."""

import asyncio
import ssl

from aiohttp import web


class Listener:
    """Listens for *runner*, which must be set up and is not cleaned up here."""

    def __init__(self, runner: web.AppRunner) -> None:
        self._runner = runner
        self._servers: list[asyncio.Server] = []

    async def open(self, host: str | None, port: int, tls: ssl.SSLContext | None) -> tuple[str, int]:
        """The address that is listened on, the first of several. Raises OSError if it cannot be had."""
        loop, server = asyncio.get_running_loop(), self._runner.server
        assert server is not None
        self._servers = [await loop.create_server(server, host, port, ssl=tls, backlog=128)]
        name: tuple[str, int] = self._servers[0].sockets[0].getsockname()[:2]
        return name

    async def renew(self, tls: ssl.SSLContext | None) -> None:
        """Speak *tls* with whoever comes from now on; who is connected stays. The port is never closed meanwhile."""
        loop, server = asyncio.get_running_loop(), self._runner.server
        assert server is not None
        old, sockets = self._servers, [s.dup() for server in self._servers for s in server.sockets]
        self._servers = [await loop.create_server(server, sock=s, ssl=tls, backlog=128) for s in sockets]
        for each in old:
            each.close()

    def close(self) -> None:
        for server in self._servers:
            server.close()
