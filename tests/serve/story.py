"""Shared parts of the client tests: the server's address, its demo pictures, and running the tests."""

import base64
import json
import pathlib
import sys
import traceback

BASE = sys.argv[1].rstrip("/") if len(sys.argv) > 1 else "http://127.0.0.1:8000"
KEY = sys.argv[2] if len(sys.argv) > 2 else "none"
PICTURES = pathlib.Path(__file__).resolve().parents[2] / "model/demo/pictures"
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Bonn", "Paris"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def data_uri(name):
    return "data:image/png;base64," + base64.b64encode((PICTURES / name).read_bytes()).decode()


def asked():
    """The demo model's pictures with questions and answers."""
    return [json.loads(line) for line in (PICTURES / "questions.jsonl").read_text().splitlines()]


def tell(*stories):
    """Runs all tests, prints a line for each, and exits with 1 if one failed."""
    failed = 0
    for story in stories:
        try:
            story()
            print(f"  ok: {story.__name__.replace('_', ' ')}", flush=True)
        except Exception:
            failed += 1
            print(f"  FAILED: {story.__name__.replace('_', ' ')}\n{traceback.format_exc()}", flush=True)
    sys.exit(1 if failed else 0)
