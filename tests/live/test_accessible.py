"""The live page by the rules of axe-core, in both themes, wide and on a phone: no violation in any state."""

import html
import importlib.resources
import json
import re
from pathlib import Path

import states
from aiohttp import web
from aiohttp.test_utils import TestServer
from browser import browse

from exporter.live import page

AXE = importlib.resources.files("axe_core_python").joinpath("axe.min.js").read_text(encoding="utf-8")
RUN = """
axe.run(document, { resultTypes: ["violations"] }).then((result) => parent.postMessage(
  result.violations.flatMap((broken) => broken.nodes.map((node) => `${broken.id}: ${node.html}: ${node.failureSummary}`)),
));
"""
HARNESS = """<!doctype html><link rel="icon" href="data:,"><pre id="found"></pre><script>
(async () => {
  const found = {};
  for (const [name, width] of %s) {
    const frame = document.createElement("iframe");
    frame.width = width;
    frame.height = 3000;
    const told = new Promise((done) => addEventListener("message", (event) => done(event.data), { once: true }));
    frame.src = name;
    document.body.append(frame);
    found[name] = await told;
    frame.remove();
  }
  document.getElementById("found").textContent = JSON.stringify(found);
})();
</script>"""
DARK = "(prefers-color-scheme: dark)"
SHOWN = {
    f"{state.__name__}-{theme}": (state, theme, width)
    for state in (states.quiet, states.calm, states.incident, states.errors, states.memory)
    for theme, width in (("light", 1300), ("dark", 390))
}


def rendered(name: str) -> str:
    """A page whose own script has made way for axe, in one theme whatever the browser prefers."""
    state, theme, _ = SHOWN[name]
    text = page.render(state()).replace(page._JS, AXE + RUN)
    assert DARK in text
    return text.replace(DARK, "all" if theme == "dark" else "not all")


async def violations(pages: dict[str, str], widths: dict[str, int], profile: Path) -> dict[str, list[str]]:
    async def index(_: web.Request) -> web.Response:
        return web.Response(text=HARNESS % json.dumps(list(widths.items())), content_type="text/html")

    async def one(request: web.Request) -> web.Response:
        return web.Response(text=pages[request.match_info["name"]], content_type="text/html")

    app = web.Application()
    app.add_routes([web.get("/", index), web.get("/{name}", one)])
    async with TestServer(app) as server:
        dom, console = await browse(str(server.make_url("/")), profile)
    assert console == []
    found = re.search('<pre id="found">(.*?)</pre>', dom, re.DOTALL)
    assert found
    return json.loads(html.unescape(found[1]))


async def test_no_state_breaks_a_rule_of_accessibility(tmp_path: Path) -> None:
    widths = {name: width for name, (_, _, width) in SHOWN.items()}
    found = await violations({name: rendered(name) for name in SHOWN}, widths, tmp_path)
    assert found == {name: [] for name in SHOWN}


async def test_a_page_that_breaks_some_is_found_out(tmp_path: Path) -> None:
    broken = rendered("calm-light").replace(' lang="en"', "", 1).replace("<h1>", '<img src="data:,"><h1>', 1)
    (found,) = (await violations({"broken": broken}, {"broken": 1300}, tmp_path)).values()
    assert sorted(each.partition(":")[0] for each in found) == ["html-has-lang", "image-alt"]
