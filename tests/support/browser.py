"""Chromium without a window, as a person uses a page. Skips, aloud, where there is none."""

import shutil
from typing import Any, Self

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu",
    "--force-color-profile=srgb", "--disable-background-networking", "--no-first-run",
)  # fmt: skip


class Browser:
    """One tab. Leaving the context ends it."""

    def __init__(self) -> None:
        binary = next(filter(None, map(shutil.which, _BROWSERS)), None)
        driver = shutil.which("chromedriver")
        if binary is None or driver is None:
            pytest.skip("no Chromium and chromedriver on the PATH: the chat page was NOT tested")
        options = webdriver.ChromeOptions()
        options.binary_location = binary
        for option in _OPTIONS:
            options.add_argument(option)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options, Service(driver))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.quit()

    def open(self, url: str, width: int = 960, height: int = 760) -> None:
        self.resize(width, height)
        self.driver.get(url)
        self.complaints()

    def resize(self, width: int, height: int) -> None:
        """What the page has to itself, in CSS pixels."""
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> Any:
        """The last that there is."""
        return self.all(selector)[-1]

    def texts(self, selector: str) -> list[str]:
        return [element.text for element in self.all(selector)]

    def run(self, script: str) -> Any:
        """What a script in the page returns; no policy of the page's binds it."""
        return self.driver.execute_script(script)

    def press(self, *keys: str) -> None:
        """Keys to what has the focus."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def fill(self, selector: str, text: str) -> None:
        element = self.one(selector)
        element.clear()
        element.send_keys(text)

    def ask(self, question: str) -> None:
        """Write a message and send it."""
        self.one("#text").send_keys(question, Keys.ENTER)

    def complaints(self) -> list[str]:
        """What the console has said since the last call: errors of scripts, what a policy has
        kept from happening, requests that failed."""
        return [
            one["message"] for one in self.driver.get_log("browser") if one["level"] == "SEVERE"
        ]
