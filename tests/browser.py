"""A headless Chromium to test pages in, driven by its DevTools protocol over two pipes."""

import json
import os
import shutil
import subprocess
from pathlib import Path

CHROMIUM = shutil.which("chromium")


class Browser:
    """One page of a browser; `errors` is what its console complained of."""

    def __init__(self, home: Path) -> None:
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        # The browser reads requests from file descriptor 3 and writes answers to 4.
        command = f"exec {CHROMIUM} --headless --no-sandbox --disable-gpu --disable-dev-shm-usage "
        command += f"--remote-debugging-pipe --user-data-dir={home} about:blank "
        command += f"3<&{theirs_in} 4>&{theirs_out} >{home}/log 2>&1"
        environment = os.environ | {"HOME": str(home)}
        options = {"pass_fds": (theirs_in, theirs_out), "env": environment}
        self.process = subprocess.Popen(["bash", "-c", command], **options)
        os.close(theirs_in)
        os.close(theirs_out)
        self.requests, self.answers = os.fdopen(ours_out, "wb", 0), os.fdopen(ours_in, "rb")
        self.errors, self.count, self.session = [], 0, {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        answer = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = {"sessionId": answer["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters) -> dict:
        """The answer to a request; what happens meanwhile is looked through for errors."""
        self.count += 1
        request = {"id": self.count, "method": method, "params": parameters} | self.session
        self.requests.write(json.dumps(request).encode() + b"\0")
        while True:
            read = bytearray()
            while (sign := self.answers.read(1)) != b"\0":
                assert sign, "the browser has ended"
                read += sign
            message = json.loads(read)
            if message.get("id") == self.count:
                assert "error" not in message, message
                return message["result"]
            event, about = message.get("method"), message.get("params", {})
            level = about.get("type") or about.get("entry", {}).get("level")
            if event == "Runtime.exceptionThrown" or level in ("error", "assert"):
                self.errors.append(about)

    def open(self, page: Path, fragment: str = "", width: int = 1280, scheme="light") -> None:
        """Load a page from the disk and wait until it is there."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        wanted = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[wanted])
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

    def text(self, selector: str) -> str:
        """What an element says."""
        return self.run(f"document.querySelector({json.dumps(selector)}).textContent")

    def drag(self, selector: str, by: float = 0.0) -> None:
        """Press the mouse on an element, move it `by` pixels to the right, let it go."""
        script = """(node => {
            node.scrollIntoView({ block: "center" });
            const { x, y, width, height } = node.getBoundingClientRect();
            return [x + width / 2, y + height / 2];
        })"""
        x, y = self.run(f"{script}(document.querySelector({json.dumps(selector)}))")
        events = [("mousePressed", 0.0), ("mouseReleased", by)]
        events[1:1] = [("mouseMoved", by * part / 4) for part in range(1, 5) if by]
        for kind, moved in events:
            held = {"button": "left", "buttons": int(kind != "mouseReleased"), "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, x=x + moved, y=y, **held)

    def key(self, name: str) -> None:
        """Press and release a key, such as "ArrowRight"."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name)

    def close(self) -> None:
        """End the browser."""
        self.session = {}
        self.call("Browser.close")
        self.process.wait(timeout=60)
