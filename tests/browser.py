"""Debian's Chromium, driven by selenium: how a page looks, moves and keeps to itself."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

DRIVER, BROWSER = shutil.which("chromedriver"), shutil.which("chromium")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


class Browser:
    """A browser without a window."""

    def __init__(self):
        options = Options()
        options.binary_location = BROWSER
        for flag in _FLAGS:
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(DRIVER))

    def open(self, path: Path, width=1100, height=900, *, dark=False, media="", scale=1) -> None:
        """Show a file; what was logged before is forgotten."""
        self.look(width, height, dark=dark, media=media, scale=scale)
        self.requests()
        self.complaints()
        self.driver.get(path.absolute().as_uri())

    def look(self, width=1100, height=900, *, dark=False, media="", scale=1) -> None:
        """As a screen of this size, or paper, shows it."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": [scheme]})

    def requests(self) -> list[str]:
        """What was asked for since the last call, whether or not it came."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
        return [params["request"]["url"] for params in sent]

    def complaints(self) -> list[str]:
        """What the console has said since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def run(self, script: str, *arguments):
        """What a script returns."""
        return self.driver.execute_script(script, *arguments)

    def picture(self, whole=False) -> bytes:
        """A PNG of what is in sight, or of all of it."""
        found = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": whole})
        return base64.b64decode(found["data"])

    def close(self) -> None:
        """Done."""
        self.driver.quit()
