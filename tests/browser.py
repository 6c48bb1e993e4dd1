"""A headless Chromium to test pages in, driven by its DevTools protocol over two pipes."""

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


class Browser:
    """One page of a browser; `errors` is what its console complained of.

    Args:
        home: an empty folder for the browser's own files.
    """

    def __init__(self, home: Path) -> None:
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        # The browser reads requests from file descriptor 3 and writes answers to 4.
        command = f"exec {CHROMIUM} --headless --no-sandbox --disable-gpu --disable-dev-shm-usage "
        command += f"--remote-debugging-pipe --user-data-dir={home} about:blank "
        command += f"3<&{theirs_in} 4>&{theirs_out}"
        self.process = subprocess.Popen(
            ["bash", "-c", command],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"HOME": str(home)},
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.requests, self.answers = open(ours_out, "wb", 0), open(ours_in, "rb")
        self.errors, self.count, self.session = [], 0, None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters) -> dict:
        """Do it, and return the answer; what happens meanwhile is looked through for errors."""
        self.count += 1
        request = {"id": self.count, "method": method, "params": parameters}
        if self.session:
            request["sessionId"] = self.session
        self.requests.write(json.dumps(request).encode() + b"\0")
        while True:
            message = self.message()
            if message.get("id") == self.count:
                assert "error" not in message, message
                return message["result"]

    def message(self) -> dict:
        """The next answer or event."""
        read = bytearray()
        while (sign := self.answers.read(1)) != b"\0":
            assert sign, "the browser has ended"
            read += sign
        message = json.loads(read)
        event, parameters = message.get("method"), message.get("params")
        if event == "Runtime.exceptionThrown" or (
            event == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "assert")
        ):
            self.errors.append(parameters)
        if event == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(parameters["entry"])
        return message

    def open(self, page: Path, fragment: str = "", width: int = 1280, dark: bool = False) -> None:
        """Load a page from the disk and wait until it is there."""
        self.errors.clear()
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        # The same page with another fragment would not be loaded again.
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=page.as_uri() + fragment)
        self.run("new Promise(done => document.readyState === 'complete' ? done() : onload = done)")

    def run(self, script: str) -> object:
        """The value of a JavaScript expression."""
        options = {"returnByValue": True, "awaitPromise": True}
        answer = self.call("Runtime.evaluate", expression=script, **options)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def centre(self, selector: str) -> tuple[float, float]:
        """Where the middle of an element is in the window, into which it is scrolled."""
        script = """(node => {
            node.scrollIntoView({ block: "center" });
            const { x, y, width, height } = node.getBoundingClientRect();
            return [x + width / 2, y + height / 2];
        })"""
        return tuple(self.run(f"{script}(document.querySelector({json.dumps(selector)}))"))

    def mouse(self, kind: str, x: float, y: float) -> None:
        """`kind`: mousePressed, mouseMoved or mouseReleased."""
        options = {"button": "left", "buttons": int(kind != "mouseReleased"), "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **options)

    def click(self, selector: str) -> None:
        """Press and release the mouse on an element."""
        x, y = self.centre(selector)
        self.mouse("mousePressed", x, y)
        self.mouse("mouseReleased", x, y)

    def drag(self, selector: str, by: float) -> None:
        """Draw an element `by` pixels to the right, in four moves."""
        x, y = self.centre(selector)
        self.mouse("mousePressed", x, y)
        for part in range(1, 5):
            self.mouse("mouseMoved", x + by * part / 4, y)
        self.mouse("mouseReleased", x + by, y)

    def key(self, name: str) -> None:
        """Press and release a key, such as "ArrowRight"."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name)

    def picture(self, path: Path, whole: bool = True) -> None:
        """A screenshot, of the whole page or of what the window shows."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def close(self) -> None:
        """End the browser."""
        self.session = None
        self.call("Browser.close")
        self.process.wait(timeout=60)
        self.requests.close()
        self.answers.close()
