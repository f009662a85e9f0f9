"""Tests of the Responses API with OpenAI's Python client. Arguments: the server's address and a key."""
# needs: openai==3.54.0

import json
import time

import openai
from story import BASE, KEY, data_uri, tell

QUESTION = "What colour is the star?"
CLOCK = {"type": "function", "name": "clock", "description": "The time", "strict": True, "parameters": {
    "type": "object", "properties": {"hour": {"type": "integer", "minimum": 1, "maximum": 3}},
    "required": ["hour"], "additionalProperties": False}}

client = openai.OpenAI(base_url=f"{BASE}/v1", api_key=KEY, max_retries=0)


def shown():
    return [{"role": "user", "content": [
        {"type": "input_image", "image_url": data_uri("shapes.png"), "detail": "auto"}, {"type": "input_text", "text": QUESTION}]}]


def asked(told, **more):
    return client.responses.create(**{"model": "demo", "input": told, "max_output_tokens": 96, "temperature": 0, **more})


def refused(error, param, call):
    try:
        call()
    except error as told:
        assert told.param == param, (told.param, told.body)
        return
    raise AssertionError(f"{param}: the request was not refused")


def a_question_about_a_picture_is_kept_and_deleted():
    response = asked(shown(), metadata={"of": "us"})
    assert response.output_text.strip() == "blue", response
    assert (response.status, response.metadata) == ("completed", {"of": "us"}), response
    usage = response.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens > 0, usage
    again = client.responses.retrieve(response.id)
    assert again.to_dict() == response.to_dict(), again
    client.responses.delete(response.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        refused(openai.NotFoundError, None, lambda call=call: call(response.id))


def a_stream_has_the_same_content():
    with client.responses.stream(model="demo", input=shown(), max_output_tokens=96, temperature=0) as stream:
        events = list(stream)
        response = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added",
                         "response.content_part.added"], kinds
    assert kinds[-4:] == ["response.output_text.done", "response.content_part.done", "response.output_item.done",
                          "response.completed"], kinds
    assert [event.sequence_number for event in events] == list(range(len(events))), kinds
    assert response.output_text.strip() == "blue", response
    assert client.responses.retrieve(response.id).output_text == response.output_text


def a_conversation_continues_by_response_id():
    first = asked(shown(), instructions="Be brief.")
    second = asked("How many shapes are there?", previous_response_id=first.id)
    assert second.previous_response_id == first.id, second
    said = [{"role": "assistant", "content": first.output_text}, {"role": "user", "content": "How many shapes are there?"}]
    whole = asked(shown() + said)
    assert second.output_text == whole.output_text, (second.output_text, whole.output_text)
    assert second.usage.input_tokens == whole.usage.input_tokens, "the picture and the answer are in the prompt"
    passed_on = asked(shown() + [item.to_dict() for item in first.output] + said[1:], store=False)
    assert passed_on.usage.input_tokens == whole.usage.input_tokens, passed_on
    refused(openai.NotFoundError, None, lambda: client.responses.retrieve(passed_on.id))
    refused(openai.BadRequestError, "previous_response_id", lambda: asked("so?", previous_response_id=passed_on.id))


def a_forced_call_and_its_result_are_accepted():
    choice = {"type": "function", "name": "clock"}
    first = asked("What time is it?", tools=[CLOCK], tool_choice=choice)
    call = first.output[-1]
    assert (call.type, call.name, call.status) == ("function_call", "clock", "completed"), first
    assert json.loads(call.arguments)["hour"] in (1, 2, 3), call
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    second = asked([result], previous_response_id=first.id, tools=[CLOCK])
    assert second.usage.input_tokens > first.usage.input_tokens, second
    with client.responses.stream(
            model="demo", input="What time is it?", tools=[CLOCK], tool_choice="required", max_output_tokens=96) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response()
    assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= set(kinds), kinds
    assert json.loads(streamed.output[-1].arguments)["hour"] in (1, 2, 3), streamed


def custom_tools_and_namespaces_are_parsed():
    patch = {"type": "custom", "name": "patch", "description": "Edits a file"}
    agents = {"type": "namespace", "name": "agents", "description": "Others", "tools": [CLOCK]}
    with client.responses.stream(model="demo", input="Hello!", tools=[patch, agents], max_output_tokens=120,
                                 tool_choice={"type": "custom", "name": "patch"}) as stream:
        events = list(stream)
    # The demo model writes until the token limit, so the last event is `response.incomplete`.
    call = events[-1].response.output[-1]
    done = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    assert (call.type, call.name) == ("custom_tool_call", "patch") and call.input == done[0].input, call
    named = asked("What time is it?", tools=[patch, agents],
                  tool_choice={"type": "function", "namespace": "agents", "name": "clock"}).output[-1]
    assert (named.type, named.namespace, named.name) == ("function_call", "agents", "clock"), named


def a_background_response_continues_and_can_be_cancelled():
    response = asked(shown(), background=True)
    assert response.status in ("in_progress", "queued"), response
    until = time.monotonic() + 60
    while response.status in ("in_progress", "queued"):
        assert time.monotonic() < until, "the response did not end within 60 s"
        response = client.responses.retrieve(response.id)
    assert response.output_text.strip() == "blue", response
    assert client.responses.cancel(response.id).status == "completed", "cancelling a completed response does not change it"
    # The schema needs thousands of tokens, so the response is still running when it is cancelled.
    schema = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 1000}
    form = {"format": {"type": "json_schema", "name": "long", "schema": schema}}
    long = asked("Count.", background=True, text=form, max_output_tokens=3000)
    cancelled = client.responses.cancel(long.id)
    assert cancelled.status == "cancelled", cancelled
    assert client.responses.retrieve(long.id).status == "cancelled"
    refused(openai.BadRequestError, "previous_response_id", lambda: asked("so?", previous_response_id=long.id))
    waited = asked("Hello")
    refused(openai.BadRequestError, "response_id", lambda: client.responses.cancel(waited.id))
    watched = list(asked(shown(), background=True, stream=True))
    assert (watched[0].type, watched[-1].type) == ("response.created", "response.completed"), watched
    assert client.responses.retrieve(watched[-1].response.id).status == "completed"


def a_token_limit_makes_a_response_incomplete():
    response = asked(shown(), max_output_tokens=1)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens"), response


def a_schema_is_followed():
    schema = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"],
              "additionalProperties": False}
    response = asked(shown(), text={"format": {"type": "json_schema", "name": "colour", "schema": schema}})
    assert json.loads(response.output_text)["colour"] in ("red", "blue"), response


def wrong_or_unsupported_fields_are_named():
    refused(openai.NotFoundError, None, lambda: asked("a", model="none"))
    refused(openai.BadRequestError, "tools[0].type", lambda: asked("a", tools=[{"type": "local_shell"}]))
    search = [{"type": "web_search"}]
    assert asked("a", tools=search).tools[0].type == "web_search", "a hosted tool is accepted and listed"
    refused(openai.BadRequestError, "tool_choice", lambda: asked("a", tools=search, tool_choice="required"))
    refused(openai.BadRequestError, "input[0].content[0].type",
            lambda: asked([{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]))
    refused(openai.BadRequestError, "max_output_tokens", lambda: asked("a", max_output_tokens=0))
    refused(openai.BadRequestError, "input", lambda: asked([]))
    refused(openai.BadRequestError, "store", lambda: asked("a", background=True, store=False))
    refused(openai.BadRequestError, "conversation", lambda: asked("a", conversation="conv_1"))
    refused(openai.BadRequestError, "truncation", lambda: asked("a", truncation="auto"))


def a_responses_input_is_listed_and_its_tokens_counted():
    items = [{"role": "user", "content": "Hello"}, {"role": "user", "content": "Who are you?"}]
    response = asked(items)
    listed = [item.content[0].text for item in client.responses.input_items.list(response.id, order="asc")]
    assert listed == ["Hello", "Who are you?"], listed
    counted = client.responses.input_tokens.count(model=response.model, input=items)
    assert counted.input_tokens == response.usage.input_tokens, counted


tell(
    a_question_about_a_picture_is_kept_and_deleted,
    a_stream_has_the_same_content,
    a_conversation_continues_by_response_id,
    a_forced_call_and_its_result_are_accepted,
    custom_tools_and_namespaces_are_parsed,
    a_background_response_continues_and_can_be_cancelled,
    a_token_limit_makes_a_response_incomplete,
    a_schema_is_followed,
    wrong_or_unsupported_fields_are_named,
    a_responses_input_is_listed_and_its_tokens_counted,
)
