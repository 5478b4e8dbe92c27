"""A page in headless Chromium; where there is none, tests that need it say so and are skipped."""

from __future__ import annotations

import base64
import shutil
from pathlib import Path

import pytest

FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars"
).split()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Headless Chromium, which writes down what its console says."""
    binary = shutil.which("chromium") or shutil.which("chromium-browser")
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no chromium here; type: apt-get install chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium here; type: pip install selenium")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = webdriver.Chrome(options=options, service=Service(driver))
    yield opened
    opened.quit()


class Window:
    """A page in the browser. After each test the console must have said nothing."""

    def __init__(self, browser, path):
        self.browser, self.path = browser, path
        self.show()

    def show(self, *, width: int = 1280, scheme: str = "light") -> None:
        metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        self.browser.get(self.path.as_uri())

    def picture(self, path: Path) -> bytes:
        """The whole page as a PNG, written to `path`."""
        asked = {"format": "png", "captureBeyondViewport": True}
        content = base64.b64decode(self.browser.execute_cdp_cmd("Page.captureScreenshot", asked)["data"])
        path.write_bytes(content)
        return content

    def js(self, code: str, *arguments):
        return self.browser.execute_script(f"return {code}", *arguments)

    def press(self, selector: str, *keys: str) -> None:
        self.browser.execute_script("document.querySelector(arguments[0]).focus()", selector)
        for key in keys:
            self.browser.switch_to.active_element.send_keys(key)

    def column(self, key: str) -> list[str]:
        return self.js(
            "[...document.querySelectorAll('#ledger tbody tr:not(.group) .c-' + arguments[0])].map(c => c.dataset.sort)",
            key,
        )
