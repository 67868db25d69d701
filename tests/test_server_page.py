"""The page's files and the map behind it, as HTTP; `test_page_in_browser.py` has the page itself."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import paged_backend.server
from helpers import WAIT_SECONDS
from helpers_server import ServerUnderTest, make_models, make_server, refusal
from paged_backend.server.app import create_app

STATIC = Path(paged_backend.server.__file__).parent / "static"
FILES = ["/", *(f"/static/{path.name}" for path in sorted(STATIC.iterdir()) if path.name != "index.html")]
KEY = {"Authorization": "Bearer key"}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerUnderTest]:
    server = make_server(api_keys=("key",))
    yield server
    server.serving.close()


class References(HTMLParser):
    """What a page loads, and what it has of scripts and styles in itself."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.inline: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "link", "img"):
            self.found.append(given.get("src") or given.get("href") or "")
        self.inline += [name for name in given if name == "style" or name.startswith("on")]


@pytest.mark.parametrize("path", FILES)
async def test_every_file_comes_without_a_key_and_forbids_what_the_page_does_not_need(
    server: ServerUnderTest, path: str
) -> None:
    answer = await server.get(path)
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    kinds = {"/": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    assert answer.headers["content-type"].startswith(kinds[path.rpartition(".")[2]])


@pytest.mark.parametrize("path", FILES)
async def test_a_browser_that_has_a_file_is_told_so(server: ServerUnderTest, path: str) -> None:
    first = await server.get(path)
    again = await server.get(path, headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert (await server.get(path, headers={"If-None-Match": '"other"'})).status_code == 200


def test_the_page_loads_its_own_files_only_and_by_relative_addresses() -> None:
    page = References((STATIC / "index.html").read_text())
    assert page.found and page.inline == []
    assert [address for address in page.found if f"/{address}" not in FILES] == []
    scripts = {path.name: path.read_text() for path in STATIC.glob("*.js")}
    imports = [name for text in scripts.values() for name in re.findall(r'from "\./(.+?)"', text)]
    assert set(imports) | {"main.js"} == set(scripts)


def test_no_script_makes_markup_of_text() -> None:
    text = "".join(path.read_text() for path in STATIC.glob("*.js"))
    assert re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text) == []


async def test_the_map_needs_the_key(server: ServerUnderTest) -> None:
    assert refusal(await server.get("/paged/kv_map"), 401)["code"] == "invalid_api_key"
    assert (await server.get("/paged/kv_map", headers=KEY)).status_code == 200


async def test_without_ui_there_is_neither_page_nor_map() -> None:
    server = make_server(ui=False, api_keys=("key",))
    for path in (*FILES, "/paged/kv_map"):
        assert (await server.get(path)).status_code == 401
        assert (await server.get(path, headers=KEY)).status_code == 404
    server.serving.close()


async def test_the_map_shows_who_holds_what_while_requests_run() -> None:
    server = make_server()
    before = (await server.get("/paged/kv_map")).json()
    assert (before["object"], before["model"], before["requests"]) == ("kv_map", "fake", [])
    server.runner.on_step = lambda output: time.sleep(0.005)
    running = asyncio.create_task(server.complete(["hello " * 5] * 2, max_tokens=1000, ignore_eos=True))
    during = await until_map(server, lambda shown: shown["stats"]["num_running"] == 2)
    assert sum(during["cells"]["num_shared"]) == 7
    assert [(request["number"], request["num_prompt_tokens"]) for request in during["requests"]] == [(0, 30), (1, 30)]
    assert during["time"] > before["time"]
    running.cancel()
    await until_map(server, lambda shown: shown["stats"]["num_free_blocks"] == shown["stats"]["num_blocks"])
    server.serving.close()


async def test_the_map_is_bounded_however_many_blocks_there_are() -> None:
    server = make_server(num_blocks=4000, max_model_len=12_000)
    await server.complete("x" * 10_000, max_tokens=1)
    shown = (await server.get("/paged/kv_map")).json()
    assert shown["blocks_per_cell"] == 2
    assert {len(column) for column in shown["cells"].values()} == {1250}
    server.serving.close()


async def test_watchers_who_ask_at_once_cost_the_engine_one_look() -> None:
    server = make_server()
    looks = []
    kv_map = server.llm.kv_map
    server.llm.kv_map = lambda max_cells: (looks.append(max_cells), kv_map(max_cells))[1]  # type: ignore[method-assign]
    answers = await asyncio.gather(*(server.get("/paged/kv_map") for _ in range(50)))
    assert {answer.status_code for answer in answers} == {200}
    assert len(looks) == 1
    del server.llm.kv_map
    server.serving.close()


async def test_the_map_goes_on_while_the_server_drains_and_holds_nothing_up() -> None:
    server = make_server()
    server.models.is_draining = True
    assert (await server.get("/paged/kv_map")).status_code == 200
    assert server.models.num_active == 0
    server.serving.close()


async def test_the_map_is_of_the_model_that_is_named() -> None:
    server = make_server(served_model_names=("a", "b"))
    for path in ("/paged/kv_map", "/paged/kv_map?model=b"):
        assert (await server.get(path)).json()["model"] == "a"
    assert refusal(await server.get("/paged/kv_map?model=nope"), 404)["code"] == "model_not_found"
    server.serving.close()


async def test_before_the_model_is_loaded_the_map_says_so() -> None:
    models = make_models()
    server = ServerUnderTest(None, None, None, models, create_app(models))  # type: ignore[arg-type]
    assert refusal(await server.get("/paged/kv_map"), 503)["code"] == "loading"
    assert (await server.get("/")).status_code == 200


async def until_map(server: ServerUnderTest, condition: Any) -> Any:
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            shown = (await server.get("/paged/kv_map")).json()
            if condition(shown):
                return shown
            await asyncio.sleep(0.02)
