"""The page as people use it, in a real browser on a real server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from axe_core_python.selenium import Axe
from selenium.webdriver import Chrome
from selenium.webdriver.common.keys import Keys

from helpers import WAIT_SECONDS, SchedulerOutput, is_idle, wait_until
from helpers_browser import Page, start_browser
from helpers_server import END, ServerUnderTest, make_server
from test_server_tools import TEMPLATE, WEATHER

pytestmark = pytest.mark.slow

Visit = Callable[..., tuple[ServerUnderTest, Page]]


@pytest.fixture(scope="module")
def driver() -> Iterator[Chrome]:
    driver = start_browser()
    yield driver
    driver.quit()


@pytest.fixture
def visit(driver: Chrome) -> Iterator[Visit]:
    """A new server and its page; afterwards nothing may have been said in the console."""
    pages: list[Page] = []
    with ExitStack() as stack:

        def start(say: str = "Hello there.", **options: Any) -> tuple[ServerUnderTest, Page]:
            server = make_server(**options)
            stack.callback(server.serving.close)
            server.sampler.script = [*say.encode(), END]
            pages.append(Page(driver, stack.enter_context(server.live())))
            return server, pages[0]

        yield start
        complaints = [complaint for page in pages for complaint in page.complaints()]
        driver.get("about:blank")  # no more requests of it while its server stops
    assert complaints == []


class Steps:
    """Lets an engine go on step by step."""

    def __init__(self, server: ServerUnderTest) -> None:
        self._allowed = threading.Semaphore(0)
        server.runner.on_step = self._wait

    def _wait(self, output: SchedulerOutput) -> None:
        assert self._allowed.acquire(timeout=WAIT_SECONDS)

    def allow(self, number: int) -> None:
        self._allowed.release(number)


def slowly(output: SchedulerOutput) -> None:
    time.sleep(0.01)


def test_an_answer_streams_and_says_what_it_cost(visit: Visit) -> None:
    server, page = visit("Hello there.")
    steps = Steps(server)
    page.until(lambda: page.text("state") == "ready")
    page.ask("Hi")
    steps.allow(5)
    page.until(lambda: page.answers() == ["Hello"])
    assert page.is_shown("stop") and not page.is_shown("send")
    steps.allow(100)
    page.until(lambda: page.answers() == ["Hello there."])
    page.until(lambda: page.is_shown("send"))
    assert "13 tokens" in page.log() and "tokens/s" in page.log() and "prompt of" in page.log()
    assert page.text("announcer").startswith("Answered. 13 tokens")


def test_a_conversation_goes_on_and_begins_anew(visit: Visit) -> None:
    _, page = visit("Yes.")
    page.ask("First")
    page.until(lambda: page.answers() == ["Yes."] and page.is_shown("send"))
    page.ask("Second")
    page.until(lambda: page.answers() == ["Yes.", "Yes."] and page.is_shown("send"))
    assert page.log().count("prompt of") == 2 and "First" in page.log()
    page.element("new-chat").click()
    page.until(lambda: page.is_shown("welcome") and page.answers() == [])
    assert page.focused() == "prompt"


def test_the_map_and_the_figures_change_while_requests_run(visit: Visit) -> None:
    server, page = visit(num_blocks=4096)
    server.sampler.script = [*b"ab"]
    server.runner.on_step = slowly
    page.until(lambda: page.text("num-held") == "0")
    before = page.map_pixels()
    page.ask("Hi")
    page.until(lambda: page.text("num-running") == "1" and page.text("num-held") not in ("0", "–"))
    held, during = page.text("num-held"), page.map_pixels()
    assert during != before
    page.until(lambda: page.text("num-held") not in (held, "0"))
    assert page.map_pixels() not in (before, during)
    assert [row.split()[-1] for row in page.each_request("tr", "innerText")] == ["running"]
    page.press(Keys.ESCAPE)
    page.until(lambda: page.text("num-held") == "0" and page.all("#requests tr") == [])
    assert "0 of 4,096 held" in page.map_label() and "0 free but remembered" not in page.map_label()
    assert page.map_pixels() != before


@pytest.mark.parametrize("how", ["button", "escape"])
def test_stopping_frees_the_blocks_and_the_conversation_goes_on(visit: Visit, how: str) -> None:
    server, page = visit(num_blocks=4096)
    server.sampler.script = [*b"ab"]
    steps = Steps(server)
    page.ask("Hi")
    steps.allow(10)
    page.until(lambda: any(page.answers()))
    if how == "button":
        page.element("stop").click()
    else:
        page.press(Keys.ESCAPE)
    page.until(lambda: page.is_shown("send"))
    steps.allow(10**6)
    wait_until(lambda: is_idle(server.llm.stats()))
    assert "stopped" in page.log()
    server.sampler.script = [*b"Fine.", END]
    page.ask("And now?")
    page.until(lambda: page.answers()[-1] == "Fine.")


def test_a_crowd_shows_how_a_prefix_is_shared(visit: Visit) -> None:
    server, page = visit(num_blocks=4096)
    server.sampler.script = [*b"ab"]
    server.runner.on_step = slowly
    page.element("crowd-size").clear()
    page.element("crowd-size").send_keys("6", Keys.ENTER)
    page.until(lambda: page.text("num-running") == "6")
    assert len(page.all("#requests tr")) == 6
    assert ", 0 of them shared" not in page.map_label()
    all_requests = page.map_pixels()
    page.run("document.querySelectorAll('#requests button')[2].click()")
    assert page.each_request("button", "ariaPressed")[2] == "true"
    assert page.map_pixels() != all_requests
    page.until(lambda: page.text("crowd-state") == "6 of 6 answered")
    page.until(lambda: page.text("hit-rate") not in ("0 %", "–") and page.text("num-running") == "0")


def test_the_page_asks_for_the_key_and_keeps_it_for_the_tab(visit: Visit) -> None:
    _, page = visit("Yes.", api_keys=("the key",))
    page.until(lambda: page.is_shown("key-dialog"))
    assert page.focused() == "key"
    page.press("wrong", Keys.ENTER)
    page.until(lambda: page.text("key-error") == "That key is not known here." and page.is_shown("key-dialog"))
    page.press("the key", Keys.ENTER)
    page.until(lambda: not page.is_shown("key-dialog") and page.text("state") == "ready")
    page.driver.refresh()
    page.until(lambda: page.text("state") == "ready")
    assert not page.is_shown("key-dialog")
    page.ask("Hi")
    page.until(lambda: page.answers() == ["Yes."])
    assert page.run("return localStorage.length") == 0
    page.element("key-button").click()
    page.until(lambda: page.is_shown("key-dialog"))


def test_who_has_no_key_is_not_asked_over_and_over(visit: Visit) -> None:
    _, page = visit(api_keys=("the key",))
    page.until(lambda: page.is_shown("key-dialog"))
    page.press(Keys.ESCAPE)
    page.until(lambda: page.text("state") == "needs a key" and page.is_shown("key-button"))
    assert not page.is_shown("key-dialog")
    page.element("key-button").click()
    page.until(lambda: page.is_shown("key-dialog"))


def test_what_the_server_refuses_is_shown_and_may_be_sent_again(visit: Visit) -> None:
    _, page = visit("Fine.")
    page.fill(repetition_penalty="0")
    page.ask("Hi")
    page.until(lambda: page.all("#log .error"))
    (error,) = page.all("#log .error")
    assert "repetition_penalty=0" in error.text and error.get_attribute("role") == "alert"
    page.until(lambda: page.is_shown("send"))
    assert page.element("prompt").get_property("value") == "Hi"
    page.fill(repetition_penalty="1")
    page.ask("")
    page.until(lambda: page.answers()[-1] == "Fine.")
    page.until(lambda: page.is_shown("send"))
    assert f"prompt of {len('<user>Hi') + 1 + len('<assistant>')}" in page.log()


def test_json_that_is_none_is_not_sent(visit: Visit) -> None:
    server, page = visit()
    for name in ("tools", "schema"):
        page.fill(**{name: "{nonsense"})
        page.ask("Hi")
        page.until(lambda name=name: "no JSON" in page.text(f"{name}-error"))
        assert page.element(name).get_attribute("aria-invalid") == "true"
        assert page.focused() == name
        page.element(name).clear()
    assert server.llm.stats().num_steps == 0
    assert page.element("prompt").get_property("value") == "HiHi"


def test_the_controls_are_what_is_sent(visit: Visit) -> None:
    """A seed, a temperature and the system prompt decide the answer, and so does the number of answers."""
    _, page = visit("ab", num_blocks=4096)
    page.fill(system="Be brief.", n="2", max_tokens="1", temperature="0.5", top_p="0.9", top_k="5", seed="7")
    page.ask("Hi")
    page.until(lambda: page.is_shown("send") and page.answers() == ["a", "a"])
    length = len("<system>Be brief.<end><user>Hi<end><assistant>") - 2 * len("<end>") + 2
    assert f"prompt of {length}" in page.log() and "2 tokens" in page.log()
    assert "cut at the limit" in page.log()


def test_a_schema_is_sent(visit: Visit) -> None:
    """The server refuses this one."""
    _, page = visit()
    page.fill(schema='{"type": "nonsense"}')
    page.ask("Hi")
    page.until(lambda: page.all("#log .error"))
    assert "Invalid type: nonsense" in page.all("#log .error")[0].text


def test_a_call_is_shown_and_its_result_goes_back(visit: Visit) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    server, page = visit(call, template=TEMPLATE)
    page.fill(tools=json.dumps([WEATHER]))
    page.ask("Weather?")
    page.until(lambda: page.all(".call") and page.is_shown("send"))
    (box,) = page.all(".call")
    assert "Calls weather" in box.text and '"Bern"' in box.text
    server.sampler.script = [*b"Sunny.", END]
    page.all(".call input")[0].send_keys("sun", Keys.TAB)
    page.press(Keys.ENTER)
    page.until(lambda: page.answers()[-1] == "Sunny.")


def test_markup_of_the_model_and_of_the_user_stays_text(visit: Visit) -> None:
    attack = '<img src=x onerror="document.title=1"><script>document.title=2</script>'
    _, page = visit(attack)
    page.ask(attack)
    page.until(lambda: page.answers() == [attack] and page.is_shown("send"))
    assert page.all("#log img, #log script") == []
    assert page.driver.title == "paged-backend"


def test_the_keyboard_is_enough(visit: Visit) -> None:
    _, page = visit("Yes.")
    page.until(lambda: page.text("state") == "ready")
    page.press(Keys.TAB)
    page.press(Keys.ENTER)  # the link that skips to the message box
    page.until(lambda: page.focused() == "prompt")
    page.press("One", Keys.SHIFT, Keys.ENTER, Keys.SHIFT, "two", Keys.ENTER)
    page.until(lambda: page.answers() == ["Yes."])
    assert "One\ntwo" in page.log()


def test_no_two_buttons_are_called_alike(visit: Visit) -> None:
    """By those who hear them, while nothing runs and while everything does."""
    server, page = visit(num_blocks=4096)
    server.sampler.script = [*b"ab"]
    server.runner.on_step = slowly

    def names() -> list[str]:
        return [button.accessible_name for button in page.all("button") if button.is_displayed()]

    idle = names()
    page.ask("Hi")
    page.element("crowd-button").click()
    page.until(lambda: page.is_shown("stop") and page.text("crowd-button") == "Stop")
    busy = names()
    assert "Send the crowd" in idle and len(set(idle)) == len(idle)
    assert "Stop the crowd" in busy and len(set(busy)) == len(busy)


@pytest.mark.parametrize(
    ("size", "scheme"), [("wide", "light"), ("wide", "dark"), ("narrow", "light"), ("narrow", "dark")]
)
def test_axe_finds_nothing_to_complain_about(visit: Visit, size: str, scheme: str) -> None:
    _, page = visit("Yes.", num_blocks=4096)
    page.look(size, scheme)
    page.fill(repetition_penalty="0")
    page.ask("Hi")
    page.until(lambda: page.all("#log .error"))
    page.fill(repetition_penalty="1", tools="[nonsense")
    page.ask("Hi")
    page.until(lambda: page.text("tools-error"))
    check_accessible(page)
    assert page.run("return document.documentElement.scrollWidth <= innerWidth")


def test_axe_finds_nothing_to_complain_about_in_the_dialog(visit: Visit) -> None:
    _, page = visit(api_keys=("the key",))
    page.until(lambda: page.is_shown("key-dialog"))
    check_accessible(page)


def test_nothing_overflows_on_the_narrowest_screens(visit: Visit) -> None:
    _, page = visit("word " * 40)
    page.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 320, "height": 600, "deviceScaleFactor": 1, "mobile": True}
    )
    page.ask("x" * 200)
    page.until(lambda: page.is_shown("send") and page.answers()[0].startswith("word"))
    assert page.run("return document.documentElement.scrollWidth") == 320


def check_accessible(page: Page) -> None:
    found = Axe().run(page.driver)
    assert [(item["id"], [node["html"] for node in item["nodes"]]) for item in found["violations"]] == []
    assert len(found["passes"]) > 10
