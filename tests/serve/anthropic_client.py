"""Tests with Anthropic's Python client. Arguments: the server's address and a key."""
# needs: anthropic==2.12.0

import base64
import json

import anthropic
from story import BASE, KEY, PICTURES, tell

QUESTION = "What colour is the star?"
CLOCK = {"name": "clock", "description": "The time", "input_schema": {
    "type": "object", "properties": {"hour": {"type": "integer", "minimum": 1, "maximum": 3}},
    "required": ["hour"], "additionalProperties": False}}

client = anthropic.Anthropic(base_url=BASE, api_key=KEY, max_retries=0)


def shown():
    data = base64.b64encode((PICTURES / "shapes.png").read_bytes()).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    return [{"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]}]


def asked(messages, **more):
    return client.messages.create(model="demo", max_tokens=96, messages=messages, **more)


def refused(error, text, call):
    try:
        call()
    except error as told:
        assert told.body["type"] == "error", told.body
        assert text in told.body["error"]["message"], told.body
        return told
    raise AssertionError(f"{text}: it was not refused")


def a_question_about_a_picture_is_answered():
    message = asked(shown())
    assert message.content[0].text.strip() == "blue", message
    assert (message.type, message.role, message.stop_reason) == ("message", "assistant", "end_turn"), message
    usage = message.usage
    counted = client.messages.count_tokens(model="demo", messages=shown()).input_tokens
    assert usage.input_tokens + usage.cache_read_input_tokens == counted, (usage, counted)
    assert message._request_id, "the answer has no request id"


def a_stream_has_the_same_content():
    with client.messages.stream(model="demo", max_tokens=96, messages=shown()) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert message.content[0].text.strip() == "blue", message
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop", kinds
    assert {"content_block_start", "content_block_delta", "content_block_stop", "message_delta"} <= set(kinds), kinds
    assert message.stop_reason == "end_turn" and message.usage.output_tokens > 0, message


def a_forced_call_and_its_result_are_accepted():
    question = [{"role": "user", "content": "What time is it?"}]
    choice = {"type": "tool", "name": "clock", "disable_parallel_tool_use": True}
    message = asked(question, tools=[CLOCK], tool_choice=choice)
    call = message.content[-1]
    assert (call.type, call.name, message.stop_reason) == ("tool_use", "clock", "tool_use"), message
    assert call.input["hour"] in (1, 2, 3), call
    with client.messages.stream(
            model="demo", max_tokens=96, messages=question, tools=[CLOCK], tool_choice={"type": "any"}) as stream:
        streamed = stream.get_final_message()
    assert streamed.content[0].type == "tool_use" and streamed.content[0].input["hour"] in (1, 2, 3), streamed
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "noon"}]}
    turns = question + [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    after = asked(turns, tools=[CLOCK])
    assert after.stop_reason in ("end_turn", "max_tokens", "tool_use"), after
    failed = question + [turns[1], {"role": "user", "content": [{**result, "is_error": True}]}]
    count = lambda turns: client.messages.count_tokens(model="demo", messages=turns, tools=[CLOCK]).input_tokens
    assert count(failed) > count(turns), "the prompt marks a failed result"


def limits_and_stop_sequences_set_the_stop_reason():
    limited = client.messages.create(model="demo", max_tokens=1, messages=shown())
    assert limited.stop_reason == "max_tokens", limited
    stopped = asked(shown(), stop_sequences=["ue"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "ue"), stopped


def system_thinking_and_caching_fields_are_accepted():
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    for thinking in ({"type": "adaptive"}, {"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}):
        message = asked(shown(), system=system, thinking=thinking, metadata={"user_id": "u"})
        assert message.content, message
    begun = asked(shown() + [{"role": "assistant", "content": "bl"}])
    assert not begun.content or not begun.content[0].text.startswith("bl"), begun


def a_schema_is_followed():
    schema = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"],
              "additionalProperties": False}
    message = asked(shown(), output_config={"format": {"type": "json_schema", "schema": schema}})
    assert json.loads(message.content[0].text)["colour"] in ("red", "blue"), message


def wrong_or_unsupported_requests_are_refused():
    web = {"type": "web_search_20250305", "name": "web_search"}
    refused(anthropic.NotFoundError, "does not exist",
            lambda: client.messages.create(model="none", max_tokens=1, messages=shown()))
    assert asked(shown(), tools=[web]).content, "a web search tool may be offered, because the model need not call it"
    refused(anthropic.BadRequestError, "web_search", lambda: asked(shown(), tools=[web], tool_choice={"type": "any"}))
    bash = {"type": "bash_20250124", "name": "bash"}
    refused(anthropic.BadRequestError, "bash_20250124", lambda: asked(shown(), tools=[bash]))
    refused(anthropic.BadRequestError, "messages[0].content", lambda: asked([{"role": "user", "content": 1}]))
    refused(anthropic.BadRequestError, "max_tokens", lambda: client.post(
        "/v1/messages", body={"model": "demo", "messages": []}, cast_to=object))
    refused(anthropic.NotFoundError, "", lambda: client.messages.batches.list())


tell(
    a_question_about_a_picture_is_answered,
    a_stream_has_the_same_content,
    a_forced_call_and_its_result_are_accepted,
    limits_and_stop_sequences_set_the_stop_reason,
    system_thinking_and_caching_fields_are_accepted,
    a_schema_is_followed,
    wrong_or_unsupported_requests_are_refused,
)
