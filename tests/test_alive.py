"""A container's health check: right about plain HTTP, TLS, a wanted certificate, and nobody at all."""

import asyncio
import subprocess
import sys

import pytest
from realengine import free_port
from test_webfile import pki, serve, tls, written

from exporter.alive import is_alive

__all__ = ["pki", "serve"]


async def test_it_is_alive_whatever_it_speaks(serve, pki, tmp_path) -> None:
    plain = await serve(written(tmp_path, ""))
    assert await asyncio.to_thread(is_alive, plain.sidecar.address[1])
    for n, more in enumerate(
        ({}, {"client_auth_type": "RequireAndVerifyClientCert", "client_ca_file": str(pki / "ca.pem")})
    ):
        (tmp_path / str(n)).mkdir()
        running = await serve(written(tmp_path / str(n), tls(pki, **more)))
        assert await asyncio.to_thread(is_alive, running.sidecar.address[1])


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "[::1]:{}", ":{}"])
def test_nobody_there_is_exit_1(address: str) -> None:
    environment = {"STOPLINE_WEB_LISTEN_ADDRESS": address.format(free_port())}
    assert subprocess.run([sys.executable, "-m", "exporter.alive"], env=environment, check=False).returncode == 1
