"""A real browser for tests of pages: Debian's chromium, driven over loopback by chromedriver.

The driver implements W3C WebDriver, which is JSON over HTTP; `Browser` has the commands that the tests need. Test modules
that use the fixture set `pytest_plugins = ["browser"]`.
"""

import json
import os
import queue
import re
import shutil
import signal
import subprocess
import threading
import urllib.error
import urllib.request

import pytest

PATIENCE = 120  # seconds to wait for one response: the machine may be busy
MISSING = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
FLAGS = """
--headless --no-sandbox --disable-gpu --disable-quic --disable-dev-shm-usage --no-first-run
--disable-background-networking --disable-component-update --disable-sync --hide-scrollbars
""".split()


class Browser:
    """One headless window."""

    def __init__(self, profile):
        self.driver = subprocess.Popen(
            ["chromedriver", "--port=0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self.base = ""
        self.open_url = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        try:
            self.base = f"http://127.0.0.1:{self._port()}/session"
            options = {"args": [*FLAGS, f"--user-data-dir={profile}"], "binary": shutil.which("chromium")}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            self.base += "/" + self.call("", capabilities={"alwaysMatch": wanted})["sessionId"]
        except BaseException:
            self.close()
            raise

    def _port(self):
        """The port that the driver prints when it starts."""
        found = queue.Queue()

        def read():
            for line in self.driver.stdout:
                if match := re.search(r"started successfully on port (\d+)", line):
                    found.put(match[1])

        self.reader = threading.Thread(target=read, daemon=True)
        self.reader.start()
        return found.get(timeout=PATIENCE)

    def call(self, path, method="POST", **body):
        """Send a command and return its value."""
        headers = {"Content-Type": "application/json"}
        content = json.dumps(body).encode() if method == "POST" else None
        request = urllib.request.Request(self.base + path, content, headers, method=method)
        try:
            with self.open_url(request, timeout=PATIENCE) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(error.read().decode()) from None

    def run(self, script, *args):
        """Run a function body in the page and return its result."""
        return self.call("/execute/sync", script=script, args=list(args))

    def cdp(self, cmd, **params):
        """Send a DevTools command."""
        return self.call("/goog/cdp/execute", cmd=cmd, params=params)

    def open(self, path, width=1280, height=900, scheme="light"):
        """Load a file in a window of this size and colour scheme."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.cdp("Emulation.setDeviceMetricsOverride", **size)
        self.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("/url", url=path.as_uri())

    def element(self, selector):
        """The WebDriver path of the first element that matches."""
        found = self.call("/element", using="css selector", value=selector)
        return f"/element/{next(iter(found.values()))}"

    def click(self, selector):
        """Click an element."""
        self.call(self.element(selector) + "/click")

    def type(self, selector, text):
        """Type text into an element."""
        self.call(self.element(selector) + "/value", text=text)

    def text(self, selector):
        """The visible text of an element."""
        return self.run("return document.querySelector(arguments[0]).innerText", selector)

    def texts(self, selector):
        """The texts of all elements that match."""
        return self.run(
            "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)", selector
        )

    def errors(self):
        """The warnings and errors in the console since the last call."""
        logged = self.call("/se/log", type="browser")
        return [e["message"] for e in logged if e["level"] in ("SEVERE", "WARNING")]

    def close(self):
        """End the browser and the driver."""
        try:
            if self.base.count("/") > 3:
                self.call("", method="DELETE")
        finally:
            os.killpg(self.driver.pid, signal.SIGKILL)  # its own process group, see start_new_session above
            self.driver.wait(PATIENCE)
            self.reader.join(PATIENCE)
            self.driver.stdout.close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if MISSING:
        pytest.skip(
            f"not installed: {' and '.join(MISSING)} (Debian: apt-get install chromium chromium-driver)"
        )
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()
