"""The page in headless Chromium, as its users see it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from helpers import WAIT_SECONDS, wait_until

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SIZES = {"wide": (1280, 860), "narrow": (400, 800)}


def start_browser() -> Chrome:
    """Skips the test, and says what is missing, where there is no Chromium with its driver."""
    browser, driver = next(filter(None, map(shutil.which, BROWSERS)), None), shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("needs Chromium and its driver (Debian's packages chromium and chromium-driver)")
    options = ChromeOptions()
    options.binary_location = browser
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return Chrome(options, ChromeService(driver))


class Page:
    """One visit of the page."""

    def __init__(self, driver: Chrome, url: str) -> None:
        self.driver = driver
        self.look("wide", "light")
        driver.get(f"{url}/")

    def look(self, size: str, scheme: str) -> None:
        width, height = SIZES[size]
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def element(self, name: str) -> WebElement:
        """By its id."""
        return self.driver.find_element(By.ID, name)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, name: str) -> str:
        """By its id, also if it is hidden."""
        return str(self.element(name).get_property("textContent"))

    def answers(self) -> list[str]:
        return [str(element.get_property("textContent")) for element in self.all(".answer .text")]

    def each_request(self, element: str, name: str) -> list[str]:
        """A property of such an element in each row of the list of requests, in one call: rows are made anew while one
        looks."""
        rows = f"document.querySelectorAll('#requests {element}')"
        return list(self.run(f"return Array.from({rows}, element => element.{name})"))

    def log(self) -> str:
        return self.text("log")

    def run(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def ask(self, text: str) -> None:
        self.element("prompt").send_keys(text, Keys.ENTER)

    def fill(self, **fields: str) -> None:
        """Fields of the options by their ids."""
        self.run("document.getElementById('options').open = true")
        for name, text in fields.items():
            self.element(name).clear()
            self.element(name).send_keys(text)

    def press(self, *keys: str) -> None:
        """Wherever the focus is."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def focused(self) -> str:
        return str(self.driver.switch_to.active_element.get_attribute("id"))

    def is_shown(self, name: str) -> bool:
        return bool(self.element(name).is_displayed())

    def map_pixels(self) -> str:
        return str(self.run("return document.getElementById('map').toDataURL()"))

    def map_label(self) -> str:
        return str(self.element("map").get_attribute("aria-label"))

    def until(self, condition: Callable[[], object], seconds: float = WAIT_SECONDS) -> None:
        wait_until(lambda: bool(condition()), seconds)

    def complaints(self) -> list[str]:
        """What the console got, but for answers with a status of 400 and more, which the page reports itself."""
        entries = self.driver.get_log("browser")
        return [entry["message"] for entry in entries if "Failed to load resource" not in entry["message"]]
