"""A headless Chromium, driven through the pipe of its DevTools protocol with only Python's standard library."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

NAMES = ("chromium", "chromium-browser", "google-chrome")


class Wrong(Exception):
    """A check that failed, with the reason."""


def found():
    """Returns the program, or None if Chromium is not installed."""
    return next(filter(None, map(shutil.which, filter(None, (os.environ.get("CHROMIUM"), *NAMES)))), None)


def until(what, told, seconds=15):
    """Waits until `told` returns a true value, and returns it."""
    end, last = time.monotonic() + seconds, None
    while time.monotonic() < end:
        last = told()
        if last:
            return last
        time.sleep(0.02)
    raise Wrong(f"{what}: not within {seconds} s")


class Browser:
    """A Chromium process with one page."""

    def __init__(self, program):
        self.profile = tempfile.mkdtemp(prefix="bursar-page-")
        into, out = os.pipe(), os.pipe()
        self.write, self.read = into[1], out[0]

        def as_chromium_has_it():
            # Chromium reads from descriptor 3 and writes to 4. The pipes themselves may
            # already have these numbers.
            ends = [os.dup(into[0]), os.dup(out[1])]
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        command = [program, "--headless=new", "--remote-debugging-pipe", f"--user-data-dir={self.profile}", "--no-first-run"]
        command += ["--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking", "--hide-scrollbars"]
        # In a container, Chromium's sandbox needs rights that root does not have.
        command += ["--no-sandbox"] if os.geteuid() == 0 else []
        self.process = subprocess.Popen(
            [*command, "about:blank"], preexec_fn=as_chromium_has_it, close_fds=False, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(into[0])
        os.close(out[1])
        self.number, self.rest, self.answers, self.session = 0, [], {}, None
        self.complaints, self.paused = [], None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "DOM"):
            self.ask(f"{domain}.enable")
        # The bodies of requests are left out, because pictures are large.
        self.ask("Network.enable", maxPostDataSize=1024)

    def close(self):
        self.session = None
        try:
            self.send("Browser.close")
            self.process.wait(10)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        # Child processes may write for a moment longer.
        for _ in range(50):
            shutil.rmtree(self.profile, ignore_errors=True)
            if not os.path.exists(self.profile):
                break
            time.sleep(0.1)

    # The DevTools protocol.

    def send(self, method, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.write, data) :]
        return self.number

    def ask(self, method, **parameters):
        number = self.send(method, **parameters)
        end = time.monotonic() + 30
        while number not in self.answers:
            if time.monotonic() > end:
                raise Wrong(f"Chromium does not answer {method}")
            self.listen(0.1)
        answer = self.answers.pop(number)
        if "error" in answer:
            raise Wrong(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def listen(self, seconds=0.0):
        """Reads pending messages: answers, errors and warnings of the page, and requests paused for the test."""
        while select.select([self.read], [], [], seconds)[0]:
            data = os.read(self.read, 1 << 20)
            if not data:
                raise Wrong("Chromium has ended")
            self.rest.append(data)
            if b"\0" not in data:
                continue
            *messages, rest = b"".join(self.rest).split(b"\0")
            self.rest = [rest]
            for message in map(json.loads, messages):
                self.take(message)
            seconds = 0.0

    def take(self, message):
        if "id" in message:
            self.answers[message["id"]] = message
            return
        method, told = message["method"], message["params"]
        if method == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.complaints.append(("exception", details.get("exception", {}).get("description", details["text"])))
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.complaints.append(("console", json.dumps(told["args"])))
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            entry = told["entry"]
            self.complaints.append((entry["source"], f"{entry['text']} {entry.get('url', '')}"))
        elif method == "Fetch.requestPaused":
            self.paused(told)

    # Network requests.

    def between(self, pattern, paused):
        """Lets `paused` answer or change each request that matches the pattern. If `paused` is None, stops intercepting."""
        self.paused = paused
        if paused:
            self.ask("Fetch.enable", patterns=[{"urlPattern": pattern}])
        else:
            self.ask("Fetch.disable")

    def answer(self, told, status, body, **headers):
        listed = [{"name": name.replace("_", "-"), "value": value} for name, value in headers.items()]
        data = base64.b64encode(body.encode()).decode()
        self.send("Fetch.fulfillRequest", requestId=told["requestId"], responseCode=status, responseHeaders=listed, body=data)

    # The page.

    def js(self, code):
        """The value of an expression. A promise is awaited."""
        answer = self.ask("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise Wrong(f"{code}: {details.get('exception', {}).get('description', details['text'])}")
        return answer["result"].get("value")

    def text(self, selector):
        return self.js(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def go(self, url):
        self.ask("Page.navigate", url=url)
        until("the page is there", lambda: self.js("document.readyState === 'complete' && location.href") == url)

    def rectangle(self, selector):
        """The rectangle of an element in the window, after the page is scrolled to it."""
        code = f"(() => {{ const node = document.querySelector({json.dumps(selector)}); node.scrollIntoView({{block: 'nearest'}});"
        code += "const {x, y, width, height} = node.getBoundingClientRect(); return {x, y, width, height}; })()"
        told = self.js(code)
        if not told["width"]:
            raise Wrong(f"{selector} is not shown")
        return told

    def click(self, selector):
        place = self.rectangle(selector)
        at = {"x": place["x"] + place["width"] / 2, "y": place["y"] + place["height"] / 2, "button": "left", "clickCount": 1}
        self.ask("Input.dispatchMouseEvent", type="mousePressed", **at)
        self.ask("Input.dispatchMouseEvent", type="mouseReleased", **at)

    def drop(self, selector, path):
        place = self.rectangle(selector)
        at = {"x": place["x"] + place["width"] / 2, "y": place["y"] + place["height"] / 2}
        data = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.ask("Input.dispatchDragEvent", type=kind, data=data, **at)

    def give(self, selector, path):
        """Chooses a file in a file field."""
        root = self.ask("DOM.getDocument")["root"]["nodeId"]
        node = self.ask("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.ask("DOM.setFileInputFiles", files=[str(path)], nodeId=node)

    def type(self, text):
        self.ask("Input.insertText", text=text)

    def key(self, key, code, shift=False):
        text = {"Enter": "\r"}.get(key)
        told = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.ask("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **told, **({"text": text} if text else {}))
        self.ask("Input.dispatchKeyEvent", type="keyUp", **told)

    def enter(self, shift=False):
        self.key("Enter", 13, shift)

    def tab(self, shift=False):
        self.key("Tab", 9, shift)

    def look(self, width, height, scheme="light", motion="no-preference", phone=False):
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        wanted = {"prefers-color-scheme": scheme, "prefers-reduced-motion": motion}
        self.ask("Emulation.setEmulatedMedia", features=[{"name": name, "value": value} for name, value in wanted.items()])

    def picture(self):
        return base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"])
