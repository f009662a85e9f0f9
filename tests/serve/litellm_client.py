"""Tests with litellm. Arguments: the server's address and a key."""
# needs: litellm==1.106.2 mcp==2.3.0

import json
import os

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # the price list is on another host
import litellm

from story import BASE, KEY, WEATHER, data_uri, tell

litellm.telemetry = False
HELLO = [{"role": "user", "content": "Hello!"}]
GREETING = "Hello! Show me a picture."
TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}


def ask(**fields):
    asked = {"model": "openai/demo", "api_base": f"{BASE}/v1", "api_key": KEY, "messages": HELLO, "temperature": 0, "num_retries": 0}
    return litellm.completion(**{**asked, **fields})


def a_text_is_answered_whole_and_streamed():
    assert ask().choices[0].message.content == GREETING
    assert "".join(chunk.choices[0].delta.content or "" for chunk in ask(stream=True)) == GREETING


def a_picture_is_answered():
    parts = [{"type": "image_url", "image_url": {"url": data_uri("number.png")}}, {"type": "text", "text": "What number is written?"}]
    assert ask(messages=[{"role": "user", "content": parts}]).choices[0].message.content == "427"


def a_required_tool_is_called():
    call = ask(tools=[TOOL], tool_choice="required", max_tokens=200).choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments)["city"] in ("Bonn", "Paris")


def errors_have_the_expected_class():
    for fields, kind in (
        ({"model": "openai/none"}, litellm.NotFoundError),
        ({"messages": [{"role": "user", "content": "a " * 9000}]}, litellm.ContextWindowExceededError),
        ({"messages": [{"role": "boss", "content": "a"}]}, litellm.BadRequestError),
    ):
        try:
            ask(**fields)
        except kind:
            continue
        raise AssertionError(f"{kind} was not raised")


tell(a_text_is_answered_whole_and_streamed, a_picture_is_answered, a_required_tool_is_called, errors_have_the_expected_class)
