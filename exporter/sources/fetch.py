"""One GET of the engine's server: bounded in time and size, and what goes wrong told in a word."""

import asyncio
import base64
import errno
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import aiohttp

_ACCEPT = "text/plain;version=0.0.4,*/*;q=0.1"  # who names OpenMetrics is given it, whatever the order of preference
_MOST_REDIRECTS = 3
_NOBODY = "(is the server up, and is this its address?)"


class Unreadable(Exception):
    """One attempt failed in a way that is to be expected; *reason* is from a closed set."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason} {detail}".strip())
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Access:
    """How the endpoint is reached: deadline in seconds, cap of the answer in bytes, who we are."""

    timeout: float = 0.9
    max_bytes: int = 16 << 20
    token_file: Path | None = None
    user: str = ""
    password_file: Path | None = None

    def headers(self) -> dict[str, str]:
        """Read anew at each request: tokens are rotated. Raises Unreadable."""
        headers = {"Accept": _ACCEPT}
        try:
            if self.token_file is not None:
                headers["Authorization"] = f"Bearer {self.token_file.read_text().strip()}"
            elif self.password_file is not None:
                password = self.password_file.read_text().strip()
                credentials = base64.b64encode(f"{self.user}:{password}".encode()).decode()
                headers["Authorization"] = f"Basic {credentials}"
        except OSError as error:
            raise Unreadable("credentials", f"{error.filename}: {error.strerror}") from None
        return headers


@dataclass(frozen=True, slots=True)
class Server:
    """Where the engine answers; *url* without a slash at its end."""

    url: str
    session: aiohttp.ClientSession
    access: Access

    async def get(self, path: str) -> tuple[str, bool]:
        """The body as text and whether it is OpenMetrics. Raises Unreadable."""
        headers = self.access.headers()
        try:
            async with asyncio.timeout(self.access.timeout):
                return await self._follow(self.url + path, headers)
        except TimeoutError:
            raise Unreadable("timeout", f"no answer in {self.access.timeout:g} s") from None
        except aiohttp.ClientSSLError as error:
            raise Unreadable("tls", str(error)) from None
        except aiohttp.ClientConnectorError as error:
            refused = error.os_error.errno == errno.ECONNREFUSED
            raise Unreadable("refused" if refused else "unreachable", f"{error} {_NOBODY}") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Unreadable("broken", str(error) or type(error).__name__) from None

    async def _follow(self, url: str, headers: dict[str, str]) -> tuple[str, bool]:
        """The body at *url*, or where that leads on the same server; never elsewhere, least of all with a token."""
        for _ in range(_MOST_REDIRECTS):
            async with self.session.get(url, headers=headers, allow_redirects=False) as response:
                target = urljoin(url, response.headers.get("Location", ""))
                if response.status in (301, 302, 307, 308) and urlsplit(target)[:2] == urlsplit(url)[:2]:
                    url = target
                    continue
                if response.status != 200:
                    raise Unreadable(f"http_{response.status}", url)
                body = await _capped(response.content, self.access.max_bytes)
                told = "Content-Length" in response.headers or "Transfer-Encoding" in response.headers
                if not told and b"\n" in body and not body.endswith(b"\n"):
                    raise Unreadable("broken", "it ends within a line, and nothing tells whether it was cut")
                return body.decode("utf-8", "replace"), "openmetrics" in response.content_type
        raise Unreadable("broken", "the server redirects in a circle")


async def _capped(content: aiohttp.StreamReader, limit: int) -> bytes:
    body = bytearray()
    async for piece in content.iter_chunked(1 << 16):
        body += piece
        if len(body) > limit:
            raise Unreadable("too_large", f"more than {limit} bytes")
        await asyncio.sleep(0)
    return bytes(body)
