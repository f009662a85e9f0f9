"""Tests the page at / of a running `bursar serve --model demo --device host` in a real browser.

    python3 tests/serve/page.py http://127.0.0.1:8000 [--write]

Exits with 1 and a reason at the first failure. Prints `skipped: …` and exits with 0 if there is no Chromium (Debian:
apt-get install chromium). --write saves screenshots as docs/page-light.png, docs/page-dark.png and docs/page-phone.png.
"""

import base64
import json
import pathlib
import re
import sys
import urllib.error
import urllib.request

from browser import Browser, Wrong, found, until

ROOT = pathlib.Path(__file__).resolve().parents[2]
PICTURE = ROOT / "model/demo/pictures/number.png"
PICTURE_BYTES_MAX = 200 * 1024
CHAT, WATCH = "*/v1/chat/completions", "*/v1/budget/events"
# Text that the demo model never ends by itself, so that a test can stop it.
LONG = {"structured_outputs": {"regex": "[a-z ]{3000}"}}
LAST = ".turn:last-child .answer"


def check(holds, what):
    if not holds:
        raise Wrong(what)


def is_shown(page, selector):
    return of(page, selector, "node?.checkVisibility() ?? false")


def of(page, selector, told):
    """The value of an expression about `node`, the element that the selector finds."""
    return page.js(f"((node) => {told})(document.querySelector({json.dumps(selector)}))")


def api(url, path):
    with urllib.request.urlopen(url + path, timeout=10) as answer:
        return json.load(answer)


def opened(page, url):
    page.go(url + "/")
    until("the model is chosen", lambda: "takes 1024 pictures" in page.text("#model-state"))
    until("the memory is shown", lambda: page.text("#connection") == "" and "Weights" in page.text("#legend"))


def ask(page, text):
    """Types a question and sends it, without waiting for the answer."""
    of(page, "#text", "node.focus()")
    page.type(text)
    page.enter()
    check(of(page, "#text", "node.value") == "", "the sent question is still in the text box")


def is_over(page):
    return of(page, LAST, "node?.getAttribute('aria-busy')") == "false"


def answered(page):
    until("the answer is over", lambda: is_over(page))
    return page.text(f"{LAST} .words")


# The checks, in order. Each takes the page and the server's address.


def pages_have_a_strict_policy_and_load_no_foreign_files(page, url):
    with urllib.request.urlopen(url + "/") as answer:
        policy = answer.headers["content-security-policy"] or ""
    check("default-src 'self'" in policy and "unsafe" not in policy, f"the policy of / is {policy!r}")
    opened(page, url)
    loaded = page.js("performance.getEntriesByType('resource').map(({name}) => name)")
    check(len(loaded) >= 3, f"only {loaded} are loaded")
    strangers = [name for name in loaded if not name.startswith((url + "/", "data:"))]
    check(not strangers, f"{strangers} are loaded from elsewhere")


def size(count):
    """The number of bytes as the page writes it."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.{int(units[0] != 'B' and value < 100)}f} {units[0]}"


def the_legend_shows_the_ledger(page, url):
    budget = api(url, "/v1/budget")["budget"]
    check(not is_shown(page, "#devices"), "a choice of devices is shown although there is only one")
    wanted = {name: budget[name] for name in ("canary", "overhead", "foreign", "free")}
    wanted |= {line["class"]: line["bytes"] for line in budget["classes"]}
    check(wanted["weights"] and wanted["kv"], f"the server reports no weights or no KV cache: {wanted}")
    for name, count in wanted.items():
        row = page.text(f"#legend tr[data-class='{name}']")
        check(size(count) in row, f"the legend of {name} is {row!r}, not {size(count)}")
    widths = page.js("[...document.querySelectorAll('#band div')].map((part) => part.getBoundingClientRect().width)")
    whole = of(page, "#band", "node.clientWidth")
    share = widths[1] / whole
    check(abs(share - wanted["kv"] / budget["total"]) < 0.05, f"keys and values have {share:.2f} of the band")
    check("ready, with room for" in page.text("#events"), "no event says that the model is ready")
    check(0 < page.js("document.querySelectorAll('#events li').length") <= 10, "there are no events or more than ten")


def thumbnails(page):
    code = "[...document.querySelectorAll('#pictures img')].map(({naturalWidth}) => naturalWidth)"
    return page.js(code)


def a_picture_is_added_by_drop_paste_or_button(page, url):
    opened(page, url)
    page.drop("#log", PICTURE)
    until("the dropped picture is shown", lambda: [width > 0 for width in thumbnails(page)] == [True])
    page.click("#pictures button")
    check(thumbnails(page) == [], "a removed picture is still there")
    data = base64.b64encode(PICTURE.read_bytes()).decode()
    page.js(f"""(() => {{
        const bytes = Uint8Array.from(atob('{data}'), (letter) => letter.charCodeAt());
        const clipboardData = new DataTransfer();
        clipboardData.items.add(new File([bytes], 'pasted.png', {{type: 'image/png'}}));
        document.querySelector('#text').dispatchEvent(new ClipboardEvent('paste', {{clipboardData, bubbles: true}}));
    }})()""")
    until("the pasted picture is shown", lambda: [width > 0 for width in thumbnails(page)] == [True])
    page.click("#pictures button")
    page.give("#files", PICTURE)
    until("the chosen picture is shown", lambda: [width > 0 for width in thumbnails(page)] == [True])


def a_picture_question_is_answered_across_turns(page, url):
    """Uses the picture that the previous check chose."""
    ask(page, "What number is written?")
    check(answered(page) == "427", f"the answer is {answered(page)!r}")
    usage = page.text(f"{LAST} .usage")
    wanted = r"prompt \d+ tokens, \d+ of them cached · answer 3 tokens · first after [\d.]+ s"
    check(re.fullmatch(wanted, usage), f"the usage is {usage!r}")
    check(thumbnails(page) == [] and page.js("document.querySelectorAll('.question img').length") == 1, "the picture did not move into the question")
    sent = []

    def paused(told):
        sent.extend(json.loads(told["request"]["postData"])["messages"])
        page.send("Fetch.continueRequest", requestId=told["requestId"])

    page.between(CHAT, paused)
    ask(page, "Describe the picture.")
    wanted = "a cyan square, a yellow star and the number 427 on a dark background"
    check(answered(page) == wanted, f"the second turn forgot the picture: {answered(page)!r}")
    page.between(CHAT, None)
    check([turn["role"] for turn in sent] == ["user", "assistant", "user"], f"the second turn sends {sent}")
    check([part["type"] for part in sent[0]["content"]] == ["image_url", "text"], "the picture is not before the text")
    usage = page.text(f"{LAST} .usage")
    wanted = r"prompt \d+ tokens, [1-9]\d* of them cached · answer \d+ tokens · [\d.]+ tokens/s · first after [\d.]+ s"
    check(re.fullmatch(wanted, usage), f"the second turn's usage is {usage!r}")


def longer(page):
    """From now on, requests ask for an answer of 3,000 letters."""

    def paused(told):
        body = json.loads(told["request"]["postData"]) | LONG
        data = base64.b64encode(json.dumps(body).encode()).decode()
        page.send("Fetch.continueRequest", requestId=told["requestId"], postData=data)

    page.between(CHAT, paused)


def a_long_answer_streams_and_stops(page, url):
    opened(page, url)
    before = page.text("#models")
    check("0 of " in before, f"the models are shown as {before!r}")
    longer(page)
    ask(page, "Hello.")
    seen = set()

    def grows():
        seen.add(of(page, f"{LAST} .words", "node.textContent.length"))
        return len(seen) >= 5

    until("the answer streams in", grows)
    until("the running request is shown", lambda: "1 of " in page.text("#models"))
    until("the rate is shown", lambda: re.search(r"[1-9]\d*(\.5)? tokens/s", page.text("#models")))
    check(api(url, "/v1/budget")["models"][0]["requests"] == 1, "the server does not run the request")
    check(is_shown(page, "#stop") and not is_shown(page, "#send"), "there is no stop button")
    page.click("#stop")
    text = answered(page)
    check(0 < len(text) < 3000, f"the stopped answer has {len(text)} letters")
    check("stopped" in page.text(f"{LAST} .usage"), "the usage line does not say that the answer was stopped")
    until("the server gives the request up", lambda: api(url, "/v1/budget")["models"][0]["requests"] == 0, 5)
    check(page.text(f"{LAST} .words") == text, "the answer continues after the stop")
    page.between(CHAT, None)
    page.click("#retry")
    check("picture" in answered(page) and is_shown(page, "#send"), f"the retry answers {answered(page)!r}")
    page.click("#new")
    check(page.js("document.querySelectorAll('.turn').length") == 0, "a new chat has old turns")


def stream(*events):
    return ": a comment\n\n" + "".join(f"data: {json.dumps(event)}\n\n" for event in events)


def delta(**words):
    return {"choices": [{"index": 0, "delta": words, "finish_reason": None}]}


def errors_are_shown_in_the_turn_and_lose_nothing(page, url):
    opened(page, url)
    full = {"error": {"message": "the server is full", "type": "rate_limit_error", "param": None, "code": None}}
    page.between(CHAT, lambda told: page.answer(told, 429, json.dumps(full), Retry_After="3"))
    page.give("#files", PICTURE)
    until("the chosen picture is shown", lambda: len(thumbnails(page)) == 1)
    ask(page, "What number is written?")
    answered(page)
    check(page.text(f"{LAST} .error") == "the server is full. Try again in 3 s.", f"the error is {page.text(LAST)!r}")
    page.click("#edit")
    check(of(page, "#text", "node.value") == "What number is written?", "the refused question is lost")
    check(len(thumbnails(page)) == 1, "the refused picture is lost")
    broken = {"error": {"message": "the device was lost"}}
    page.between(CHAT, lambda told: page.answer(told, 200, stream(delta(content="half an"), broken)))
    page.enter()
    check(answered(page) == "half an", f"the half answer is {answered(page)!r}")
    check(page.text(f"{LAST} .error") == "the device was lost", "an error in the stream is not shown")
    page.between(CHAT, lambda told: page.answer(told, 200, stream(delta(content="cut"))))
    page.click("#retry")
    check(answered(page) == "cut" and "connection broke" in page.text(f"{LAST} .error"), "a cut stream looks whole")
    page.between(CHAT, lambda told: page.send("Fetch.failRequest", requestId=told["requestId"], errorReason="ConnectionRefused"))
    page.click("#retry")
    answered(page)
    check("cannot be reached" in page.text(f"{LAST} .error"), f"an unreachable server: {page.text(LAST)!r}")
    page.between(CHAT, None)
    page.click("#retry")
    check(answered(page) == "427" and not is_shown(page, f"{LAST} .error"), "the retry after errors fails")
    expected(page, "429", "ERR_CONNECTION_REFUSED")


def text_is_never_rendered_as_html(page, url):
    opened(page, url)
    words = "a <img src=x onerror=alert(1)> b\n\n```python\nif x:\n    print('<b>')\n```\nafter\n\n\nthe end"
    pieces = [delta(reasoning_content="I th"), delta(reasoning_content="ink"), *[delta(content=letter) for letter in words]]
    page.between(CHAT, lambda told: page.answer(told, 200, stream(*pieces) + "data: [DONE]\n\n"))
    ask(page, "<b>?</b>")
    answered(page)
    shown = page.js(f"[...document.querySelectorAll('{LAST} > .words > *')].map((part) => [part.tagName, part.textContent])")
    code = "if x:\n    print('<b>')"
    wanted = [["P", "a <img src=x onerror=alert(1)> b"], ["PRE", code], ["P", "after"], ["P", "the end"]]
    check(shown == wanted, f"the answer is drawn as {shown}")
    check("    print" in page.text(f"{LAST} pre"), "the code lost its indentation")
    check(page.js("document.querySelectorAll('#log img, #log b').length") == 0, "markup of a text became elements")
    check(of(page, f"{LAST} details", "node.open") is False, "the reasoning is not folded")
    check(of(page, f"{LAST} details .words", "node.textContent") == "I think", "the reasoning is not there")
    page.between(CHAT, None)


def markdown_is_rendered_without_fetching_anything(page, url):
    opened(page, url)
    words = "\n".join([
        "# Title", "", "Some **bold**, *slanted* and `code`, a_b_c, 2 * 3 * 4.", "",
        "- one", "- two", "  - within", "", "3. three", "4. four", "",
        "| name | count |", "|---|--:|", "| a \\| b | 1 |", "", "> said", "", "---", "",
        "[a page](https://example.org/a_b), [bad](javascript:alert(1)) and ![a picture](https://example.org/x.png)",
    ])
    pieces = [delta(content=words[at:at + 3]) for at in range(0, len(words), 3)]
    page.between(CHAT, lambda told: page.answer(told, 200, stream(*pieces) + "data: [DONE]\n\n"))
    ask(page, "Show me.")
    answered(page)

    def texts(selector):
        return page.js(f"[...document.querySelectorAll('{LAST} .words {selector}')].map((node) => node.textContent)")

    for selector, wanted in {
        "h3": ["Title"], "strong": ["bold"], "em": ["slanted"], "code": ["code"], "ul > li > ul > li": ["within"],
        "ol > li": ["three", "four"], "th": ["name", "count"], "td": ["a | b", "1"], "blockquote": ["said"],
        "a": ["a page", "a picture"], "img": [], "td.right": ["1"],
    }.items():
        check(texts(selector) == wanted, f"{selector} is {texts(selector)}, not {wanted}")
    check(page.js(f"document.querySelector('{LAST} ol').start") == 3, "the list does not begin at 3")
    links = page.js(f"[...document.querySelectorAll('{LAST} a')].map(({{href, rel, target}}) => [href, rel, target])")
    check(all("noreferrer" in rel and target == "_blank" for _, rel, target in links), f"the links are {links}")
    check("a_b_c, 2 * 3 * 4." in texts("p")[0], "marks within words became emphasis")
    loaded = page.js("performance.getEntriesByType('resource').map(({name}) => name)")
    check(not [name for name in loaded if "example.org" in name], "a link of an answer was fetched")
    page.between(CHAT, None)


def settings_are_sent_and_kept(page, url):
    opened(page, url)
    page.click("#settings-title")
    for name, value in (("system", "Be brief."), ("temperature", "0.5"), ("max_tokens", "4")):
        of(page, f"#{name}", f"(node.value = '{value}', node.dispatchEvent(new Event('input', {{bubbles: true}})))")
    sent = []

    def paused(told):
        sent.append(json.loads(told["request"]["postData"]))
        page.send("Fetch.continueRequest", requestId=told["requestId"])

    page.between(CHAT, paused)
    ask(page, "Hello.")
    answered(page)
    body = sent[0]
    check(body["messages"][0] == {"role": "system", "content": "Be brief."}, f"it sends {body['messages']}")
    check((body["temperature"], body["max_tokens"], body.get("top_p")) == (0.5, 4, None), f"it sends {body}")
    page.between(CHAT, None)
    opened(page, url)
    check(of(page, "#system", "node.value") == "Be brief.", "the system prompt is not kept")
    page.js("localStorage.clear()")
    opened(page, url)
    check(of(page, "#temperature", "node.value") == "", "cleared settings are there")


def chats_are_kept_edited_and_cleared(page, url):
    page.js("localStorage.clear()")
    opened(page, url)
    check(not is_shown(page, "#chats") and not is_shown(page, "#clear"), "there are earlier chats")
    for text in ("Hello.", "Who are you?"):
        ask(page, text)
        answered(page)
    opened(page, url)
    check(page.js("document.querySelectorAll('.turn').length") == 0, "the page does not begin with a new chat")
    of(page, "#chats", "(node.selectedIndex = 1, node.dispatchEvent(new Event('change')))")
    check(page.js("document.querySelectorAll('.turn').length") == 2, "the chat was not kept")
    before = page.text(f"{LAST} .words")
    check(before != "", "its answers were not kept")
    page.click("#edit-0")
    check(page.js("document.querySelectorAll('.turn').length") == 0, "editing the first question leaves the second")
    check(of(page, "#text", "node.value") == "Hello.", "the first question is not there to edit")
    page.click("#clear")
    check(page.js("localStorage.getItem('bursar.chats')") is None and not is_shown(page, "#chats"), "chats are not cleared")
    of(page, "#text", "(node.value = '')")


def a_large_photograph_is_sent_smaller(page, url):
    opened(page, url)
    width = page.js("""(async () => {
        const canvas = Object.assign(document.createElement('canvas'), {width: 4096, height: 1024});
        canvas.getContext('2d').fillRect(0, 0, 100, 100);
        const blob = await new Promise((done) => canvas.toBlob(done, 'image/jpeg'));
        const clipboardData = new DataTransfer();
        clipboardData.items.add(new File([blob], 'large.jpg', {type: 'image/jpeg'}));
        document.querySelector('#text').dispatchEvent(new ClipboardEvent('paste', {clipboardData, bubbles: true}));
        return canvas.width;
    })()""")
    until("the picture is shown in fewer pixels", lambda: thumbnails(page) == [2048])
    check(width == 4096, "the pasted picture was not larger")
    page.click("#pictures button")


def events_are_parsed_at_any_chunk_border(page, url):
    text = ": keep-alive\r\n\r\ndata: {\"a\":\"ä€😀\"}\nevent: budget\n\nevent\ndata:one\rdata:  two\r\r:\n\ndata\n\n"
    text += "data: 3\r\ndata: 4\r\n\r\nid: 3\n\ndata: unended"
    wanted = [["budget", '{"a":"ä€😀"}'], ["message", "one\n two"], ["message", ""], ["message", "3\n4"]]
    code = """(async () => {
        const {eventsOf} = await import('./page.js');
        const bytes = new TextEncoder().encode(%s), found = [];
        const body = (pieces) => new ReadableStream({start(to) { pieces.forEach((piece) => to.enqueue(piece)); to.close(); }});
        const cuts = [...bytes.keys()].map((at) => [bytes.slice(0, at), bytes.slice(at)]);
        for (const pieces of [...cuts, [...bytes].map((byte) => Uint8Array.of(byte))]) {
            const events = [];
            for await (const {type, data} of eventsOf(body(pieces))) events.push([type, data]);
            found.push(events);
        }
        return found;
    })()"""
    found = page.js(code % json.dumps(text))
    check(len(found) == len(text.encode()) + 1, f"{len(found)} ways to cut were tried")
    for at, events in enumerate(found):
        check(events == wanted, f"cut at {at} the events are {events}")


def a_lost_server_is_reported_and_reconnected(page, url):
    page.between(WATCH, lambda told: page.send("Fetch.failRequest", requestId=told["requestId"], errorReason="ConnectionRefused"))
    page.go(url + "/")
    seen = []

    def waits_longer():
        told = page.text("#connection")
        seen.extend([told] if told not in seen else [])
        return any("in 1 s" in told for told in seen) and any("in 2 s" in told for told in seen)

    until("the page says that it retries, after a longer wait each time", waits_longer)
    check(all("cannot be reached" in told for told in seen if "Trying" in told), f"it says {seen}")
    page.between(WATCH, None)
    until("the memory is shown again", lambda: page.text("#connection") == "" and "MiB" in page.text("#legend"))
    expected(page, "ERR_CONNECTION_REFUSED")


def a_hidden_page_closes_its_connection(page, url):
    opened(page, url)

    def turned(is_hidden):
        page.js(f"Object.defineProperty(document, 'hidden', {{value: {json.dumps(is_hidden)}, configurable: true}})")
        page.js("document.dispatchEvent(new Event('visibilitychange'))")

    def is_told():
        return "MiB" in page.text("#legend tr[data-class='weights']")

    def forget():
        of(page, "#legend tr[data-class='weights'] td", "(node.textContent = 'old')")

    forget()
    until("a visible page receives memory updates", is_told)
    turned(True)
    forget()
    page.js("new Promise((wake) => setTimeout(wake, 1500))")
    check(not is_told(), "a hidden page still receives memory updates")
    check(page.text("#connection") == "", f"a hidden page says {page.text('#connection')!r}")
    turned(False)
    until("a page that is visible again receives memory updates", is_told)


def the_page_asks_for_a_key_and_sends_it(page, url):
    sent, late = [], []

    def refuse(told):
        page.answer(told, 401, json.dumps({"error": {"message": "this server requires an API key"}}))

    def paused(told):
        headers = {name.lower(): value for name, value in told["request"]["headers"].items()}
        sent.append(headers.get("authorization"))
        if sent[-1] == "Bearer one-two":
            # Requests with the wrong key are refused only now.
            while late:
                refuse(late.pop())
            page.send("Fetch.continueRequest", requestId=told["requestId"])
        elif sent[-1] == "Bearer wrong" and told["request"]["url"].endswith("/v1/models"):
            late.append(told)
        else:
            refuse(told)

    page.between("*/v1/*", paused)
    page.go(url + "/")
    until("the page asks for a key", lambda: is_shown(page, "#key"))
    until("its field has the focus", lambda: page.js("document.activeElement.id") == "key")
    page.type("wrong")
    page.enter()
    until("a wrong key is reported", lambda: "rejected this key" in page.text("#key-label") and is_shown(page, "#key"))
    page.type("one-two")
    page.enter()
    until("the memory is shown", lambda: page.text("#connection") == "" and "Weights" in page.text("#legend"))
    until("the models are listed", lambda: "takes 1024 pictures" in page.text("#model-state"))
    check(not is_shown(page, "#key") and {None, "Bearer wrong", "Bearer one-two"} <= set(sent), f"the keys sent are {sent}")
    page.between("*", None)
    page.js("sessionStorage.clear()")
    expected(page, "401")


def a_model_that_is_not_ready_shows_why(page, url):
    told = [("first", "loading", "weights", None), ("second", "failed", "no such folder", None), ("third", "ready", None, 0)]
    listed = [dict(zip(("id", "state", "detail", "pictures"), line), root=line[0]) for line in told]
    page.between("*/v1/models", lambda told: page.answer(told, 200, json.dumps({"data": listed})))
    page.go(url + "/")
    names = "[...document.querySelectorAll('#model option')].map(({text}) => text)"
    until("the models are listed", lambda: page.js(names) == ["first, loading", "second, failed", "third"])
    check(page.text("#model-state") == "takes no pictures", "the model that answers is not chosen")
    check(of(page, "#add", "node.disabled"), "pictures can be added for a model that takes no pictures")
    for name, state in (("first", "loading: weights"), ("second", "failed: no such folder")):
        of(page, "#model", f"(node.value = '{name}', node.dispatchEvent(new Event('change')))")
        check(page.text("#model-state") == state, f"for {name} the page says {page.text('#model-state')!r}")
    # The mocked list stays until after the answer, because the page may read it again.
    ask(page, "Hello.")
    answered(page)
    page.between("*", None)
    check("the model `second` does not exist" in page.text(f"{LAST} .error"), f"an unknown model: {page.text(LAST)!r}")
    expected(page, "/v1/chat/completions")


def all_controls_are_reached_by_keyboard(page, url):
    opened(page, url)
    ask(page, "Hello.")
    answered(page)
    page.click("h1")
    order = []
    for _ in range(30):
        page.tab()
        at, style, width = page.js(
            "(() => { const at = document.activeElement, {outlineStyle, outlineWidth} = getComputedStyle(at);"
            "return [at.id, outlineStyle, parseFloat(outlineWidth)]; })()"
        )
        if at in order or (not at and order):
            break
        order.append(at)
        check(style == "solid" and width >= 2, f"the focus of {at or 'an element without a name'} cannot be seen")
    wanted = ["model", "new", "log", "retry", "edit", "text", "add", "send"]
    check([at for at in order if at in wanted] == wanted, f"the order by keyboard is {order}")
    of(page, "#text", "node.focus()")
    page.type("Who are")
    page.enter(shift=True)
    page.type("you?")
    check(of(page, "#text", "node.value") == "Who are\nyou?", "Shift+Enter does not break the line")
    check(page.js("document.querySelectorAll('.turn').length") == 1, "Shift+Enter sends")
    page.enter()
    check(answered(page) != "", "Enter does not send")
    longer(page)
    ask(page, "Hello.")
    until("the answer streams in", lambda: page.text(f"{LAST} .words"))
    page.key("Escape", 27)
    answered(page)
    check("stopped" in page.text(f"{LAST} .usage"), "Escape does not stop")
    page.between(CHAT, None)
    unnamed = page.js(
        "[...document.querySelectorAll('input:not([hidden]), select, textarea')].filter(({labels}) => !labels.length).map(({id}) => id)"
    )
    check(not unnamed, f"{unnamed} have no label")


CONTRASTS = """(() => {
    const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const light = (colour) => channels(colour).slice(0, 3).map((part) => part / 255)
        .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
        .reduce((sum, part, place) => sum + part * [0.2126, 0.7152, 0.0722][place], 0);
    const back = (node) => {
        for (; node; node = node.parentElement) {
            const colour = getComputedStyle(node).backgroundColor;
            if (channels(colour)[3] !== 0) return colour;
        }
        return 'rgb(255, 255, 255)';
    };
    const found = [];
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
        const node = texts.currentNode.parentElement;
        if (!texts.currentNode.data.trim() || !node.checkVisibility() || ['SCRIPT', 'NOSCRIPT'].includes(node.tagName)) continue;
        const [a, b] = [light(getComputedStyle(node).color), light(back(node))].sort((a, b) => b - a);
        found.push([(a + 0.05) / (b + 0.05), texts.currentNode.data.slice(0, 30)]);
    }
    const box = document.querySelector('#text'), hint = getComputedStyle(box, '::placeholder');
    const [a, b] = [light(hint.color), light(back(box))].sort((a, b) => b - a);
    found.push([(a + 0.05) / (b + 0.05), box.placeholder]);
    return found;
})()"""


def shown_in(page, url, scheme, width, height, phone=False):
    """Shows a conversation with a picture, a text and an error in this color scheme and at this width."""
    page.look(width, height, scheme, phone=phone)
    opened(page, url)
    page.give("#files", PICTURE)
    until("the chosen picture is shown", lambda: len(thumbnails(page)) == 1)
    ask(page, "What number is written?")
    check(answered(page) == "427", f"the answer is {answered(page)!r}")
    ask(page, "Describe the picture.")
    answered(page)
    picture = page.picture()
    check(len(picture) < PICTURE_BYTES_MAX, f"the picture of the page has {len(picture)} bytes")
    broken = stream(delta(content="`x`\n```\n" + "long " * 60 + "\n```\n" + "w" * 400), {"error": {"message": "an error"}})
    page.between(CHAT, lambda told: page.answer(told, 200, broken))
    ask(page, "w" * 300)
    answered(page)
    page.between(CHAT, None)
    below = of(page, "#log", "node.scrollHeight - node.scrollTop - node.clientHeight")
    check(below < 2, f"the end of the answer is {below} pixels below the visible part")
    contrasts = page.js(CONTRASTS)
    check(len(contrasts) > 40, f"only {len(contrasts)} texts were found")
    low = [told for told in contrasts if told[0] < 4.5]
    check(not low, f"in {scheme} the contrast is too low: {low}")
    return picture


def light_and_dark_schemes_are_readable(page, url):
    pictures = {scheme: shown_in(page, url, scheme, 1280, 800) for scheme in ("light", "dark")}
    check(pictures["light"] != pictures["dark"], "the dark page looks like the light page")
    check(page.js("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)", "the dark page is not dark")
    page.look(1280, 800, "light")
    check(page.js("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)", "the light page is not light")
    return pictures


def a_phone_shows_the_whole_page(page, url):
    picture = shown_in(page, url, "light", 360, 740, phone=True)
    check(page.js("innerWidth") == 360, f"the page is laid out {page.js('innerWidth')} wide")
    wide = page.js("document.documentElement.scrollWidth")
    check(wide <= 360, f"the page is {wide} wide on a phone of 360")
    outside = page.js(
        "[...document.querySelectorAll('body *')].filter((node) => node.checkVisibility() && !node.closest('pre') &&"
        "node.getBoundingClientRect().right > 360.5).map((node) => node.tagName + node.id)"
    )
    check(not outside, f"{outside} reach beyond the phone")
    for part in ("#log", "#memory"):
        check(of(page, part, "node.scrollWidth <= node.clientWidth"), f"{part} must be scrolled sideways")
    check(of(page, "#log", "node.scrollHeight > node.clientHeight"), "nothing had to be scrolled")
    chat, memory = page.js("['#chat', '#memory'].map((part) => document.querySelector(part).getBoundingClientRect().toJSON())")
    check(chat["width"] == memory["width"] == 360, f"the chat is {chat['width']} wide, the memory {memory['width']}")
    check(chat["bottom"] <= memory["top"], "the memory is not below the chat")
    return {"phone": picture}


def reduced_motion_disables_transitions(page, url):
    time = "getComputedStyle(document.querySelector('#band div')).transitionDuration"
    page.look(1280, 800)
    check(page.js(time) == "0.3s", "the band has no transition that reduced motion could disable")
    page.look(1280, 800, motion="reduce")
    check(page.js(time) == "0s", "the band moves although the user prefers reduced motion")
    page.look(1280, 800)


def the_page_simulates_another_process(page, url):
    """Lets the server simulate another process that takes memory, if it can."""
    try:
        urllib.request.urlopen(url + "/v1/budget/other_process").close()
        can = True
    except urllib.error.HTTPError as error:
        can = error.code != 404
    page.complaints.clear()
    opened(page, url)
    if not can:
        until("the page has sent its request", lambda: page.listen() or any("/v1/budget/other_process" in told for _, told in page.complaints))
        page.js("new Promise((wake) => setTimeout(wake, 300))")
        check(not is_shown(page, "#other_process"), "the page offers to simulate another process, but the server cannot")
        return
    until("another process is offered", lambda: is_shown(page, "#other_process"))
    before = page.text("#legend tr[data-class='foreign']")
    page.click("#other_process")
    until("its memory is shown", lambda: page.text("#legend tr[data-class='foreign']") != before)


CHECKS = [
    pages_have_a_strict_policy_and_load_no_foreign_files, the_legend_shows_the_ledger,
    a_picture_is_added_by_drop_paste_or_button, a_picture_question_is_answered_across_turns,
    a_long_answer_streams_and_stops, errors_are_shown_in_the_turn_and_lose_nothing, text_is_never_rendered_as_html,
    markdown_is_rendered_without_fetching_anything, settings_are_sent_and_kept, chats_are_kept_edited_and_cleared,
    a_large_photograph_is_sent_smaller, events_are_parsed_at_any_chunk_border,
    a_lost_server_is_reported_and_reconnected, a_hidden_page_closes_its_connection,
    the_page_asks_for_a_key_and_sends_it, a_model_that_is_not_ready_shows_why, all_controls_are_reached_by_keyboard,
    light_and_dark_schemes_are_readable, a_phone_shows_the_whole_page, reduced_motion_disables_transitions,
    the_page_simulates_another_process,
]


def expected(page, *causes):
    """Removes complaints that a check caused on purpose. Each cause must have produced a complaint."""
    page.listen(0.2)
    of = {cause: [told for told in page.complaints if told[0] == "network" and cause in told[1]] for cause in causes}
    for cause, told in of.items():
        check(told, f"Chromium did not notice {cause}")
    page.complaints = [told for told in page.complaints if not any(told in of[cause] for cause in causes)]


def complaints(page):
    """All complaints except one that browsers log: the refusal of a server that cannot simulate another process."""
    page.listen(0.2)
    return [told for told in page.complaints if not (told[0] == "network" and "/v1/budget/other_process" in told[1])]


def run(page, url):
    pictures = {}
    page.look(1280, 800)
    for told in CHECKS:
        pictures |= told(page, url) or {}
        check(not complaints(page), f"the browser complains: {complaints(page)}")
        print(f"ok: {told.__name__.replace('_', ' ')}", flush=True)
    return pictures


def main(url, *options):
    program = found()
    if not program:
        print("skipped: there is no Chromium here (Debian: apt-get install chromium)")
        return 0
    page = Browser(program)
    try:
        pictures = run(page, url.rstrip("/"))
    except (Wrong, OSError) as error:
        print(f"wrong: {error}")
        return 1
    finally:
        page.close()
    for name, data in pictures.items() if "--write" in options else ():
        (ROOT / f"docs/page-{name}.png").write_bytes(data)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) if len(sys.argv) > 1 else print(__doc__) or 2)
