"""Tests with OpenAI's Python client. Arguments: the server's address and a key."""
# needs: openai==3.54.0

import json

import openai
from pydantic import BaseModel, Field

from story import BASE, KEY, WEATHER, asked, data_uri, tell

client = openai.OpenAI(base_url=f"{BASE}/v1", api_key=KEY, max_retries=0, timeout=60)
HELLO = [{"role": "user", "content": "Hello!"}]
GREETING = "Hello! Show me a picture."
TOOL = {"type": "function", "function": {"name": "weather", "description": "the weather", "parameters": WEATHER}}


def shown(picture, question):
    image = {"type": "image_url", "image_url": {"url": data_uri(picture), "detail": "auto"}}
    return [{"role": "user", "content": [image, {"type": "text", "text": question}]}]


def the_demo_is_listed_and_found():
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"


def every_question_about_a_picture_is_answered():
    for line in asked():
        done = client.chat.completions.create(
            model="demo", messages=shown(line["image"], line["question"]), temperature=0)
        assert done.choices[0].message.content == line["answer"], (line, done)
        assert done.choices[0].finish_reason == "stop"
        assert done.usage.prompt_tokens > 20 and done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens


def a_stream_has_the_same_text_and_ends_with_usage():
    stream = client.chat.completions.create(
        model="demo", messages=HELLO, stream=True, stream_options={"include_usage": True}, temperature=0)
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == GREETING
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 7
    assert len({chunk.id for chunk in chunks}) == 1


def a_repeated_prompt_is_cached():
    long = [{"role": "user", "content": "Hello! " * 40}]
    client.chat.completions.create(model="demo", messages=long, max_tokens=1)
    again = client.chat.completions.create(model="demo", messages=long, max_tokens=1)
    assert again.usage.prompt_tokens_details.cached_tokens >= 16, again.usage


def several_samples_are_numbered_and_share_one_usage():
    done = client.chat.completions.create(model="demo", messages=HELLO, n=3, temperature=1, seed=5, max_tokens=4)
    assert [choice.index for choice in done.choices] == [0, 1, 2]
    assert done.usage.completion_tokens == 12
    assert [choice.finish_reason for choice in done.choices] == ["length"] * 3


def log_probabilities_are_sent_whole_and_streamed():
    asked_for = dict(model="demo", messages=HELLO, logprobs=True, top_logprobs=2, temperature=0)
    whole = client.chat.completions.create(**asked_for).choices[0].logprobs.content
    assert "".join(token.token for token in whole) == GREETING
    assert all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in whole)
    parts = [chunk.choices[0].logprobs for chunk in client.chat.completions.create(stream=True, **asked_for)]
    streamed = [token.token for part in parts if part for token in part.content]
    assert streamed == [token.token for token in whole]


def a_required_tool_is_called_by_its_schema():
    done = client.chat.completions.create(model="demo", messages=HELLO, tools=[TOOL], tool_choice="required", max_tokens=200)
    message = done.choices[0].message
    assert done.choices[0].finish_reason == "tool_calls" and message.content is None, done
    for call in message.tool_calls:
        arguments = json.loads(call.function.arguments)
        assert call.function.name == "weather" and arguments["city"] in ("Bonn", "Paris") and 1 <= arguments["days"] <= 9
    results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in reversed(message.tool_calls)]
    told = client.chat.completions.create(model="demo", messages=[*HELLO, message, *results], tools=[TOOL], tool_choice="none")
    assert told.choices[0].message.tool_calls is None


def a_named_tool_is_called_once_and_streamed_in_pieces():
    stream = client.chat.completions.create(
        model="demo", messages=HELLO, tools=[TOOL], stream=True, max_tokens=200,
        tool_choice={"type": "function", "function": {"name": "weather"}})
    deltas = [call for chunk in stream for call in (chunk.choices[0].delta.tool_calls or [])]
    assert deltas[0].id and deltas[0].function.name == "weather" and {call.index for call in deltas} == {0}
    assert not any(call.id for call in deltas[1:]), "the id comes once"
    assert len(deltas) > 2, "arguments come in pieces"
    assert json.loads("".join(call.function.arguments for call in deltas))["city"] in ("Bonn", "Paris")


class Forecast(BaseModel):
    city: str = Field(pattern="^(Bonn|Paris)$")
    warm: bool


def a_pydantic_model_is_parsed():
    done = client.chat.completions.parse(model="demo", messages=HELLO, response_format=Forecast, max_tokens=100)
    assert done.choices[0].message.parsed.city in ("Bonn", "Paris")


def structured_outputs_of_vllm_constrain_replies():
    for form, is_right in (
        ({"choice": ["left", "right"]}, lambda text: text in ("left", "right")),
        ({"regex": "[0-9]{3}-[0-9]"}, lambda text: len(text) == 5 and text[3] == "-"),
        ({"json": WEATHER}, lambda text: json.loads(text)["days"] >= 1),
    ):
        done = client.chat.completions.create(
            model="demo", messages=HELLO, max_tokens=100, extra_body={"structured_outputs": form})
        assert is_right(done.choices[0].message.content), (form, done)


def fields_of_vllm_take_effect():
    extra = {"top_k": 5, "min_p": 0.1, "min_tokens": 12, "ignore_eos": True, "repetition_penalty": 1.1,
             "return_token_ids": True, "cache_salt": "mine", "chat_template_kwargs": {"enable_thinking": False}}
    done = client.chat.completions.create(model="demo", messages=HELLO, max_tokens=12, extra_body=extra)
    assert done.usage.completion_tokens == 12 and done.choices[0].finish_reason == "length"
    assert len(done.choices[0].token_ids) == 12 and len(done.prompt_token_ids) == done.usage.prompt_tokens
    stopped = client.chat.completions.create(model="demo", messages=HELLO, stop=[" picture"], temperature=0)
    assert stopped.choices[0].message.content == "Hello! Show me a" and stopped.choices[0].stop_reason == " picture"
    continued = client.chat.completions.create(
        model="demo", messages=[*HELLO, {"role": "assistant", "content": "Hello! Show"}], temperature=0,
        extra_body={"continue_final_message": True, "add_generation_prompt": False})
    assert continued.choices[0].message.content == " me a picture.", continued


def texts_and_tokens_are_completed():
    done = client.completions.create(model="demo", prompt="Hello", max_tokens=3, temperature=0, echo=True, logprobs=1)
    assert done.choices[0].text.startswith("Hello") and done.usage.completion_tokens == 3
    logprobs = done.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == done.usage.total_tokens
    assert logprobs.token_logprobs[0] is None and all(value <= 0 for value in logprobs.token_logprobs[1:])
    several = client.completions.create(model="demo", prompt=[[11, 7], [12, 7, 9]], n=2, max_tokens=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    chunks = list(client.completions.create(model="demo", prompt="Hello", max_tokens=4, stream=True, temperature=0))
    assert chunks[-1].choices[0].finish_reason == "length"


def refused(status, param=None, **fields):
    try:
        client.chat.completions.create(**{"model": "demo", "messages": HELLO, **fields})
    except openai.APIStatusError as error:
        assert error.status_code == status, error
        assert param is None or error.body["param"] == param, error.body
        assert error.body["message"] and error.body["type"], error.body
        return error
    raise AssertionError(f"{fields} was taken")


def wrong_requests_are_refused_by_field():
    assert isinstance(refused(404, model="gpt-4o"), openai.NotFoundError)
    refused(400, "messages[0].content", messages=[{"role": "user", "content": 5}])
    refused(400, "messages[0].role", messages=[{"role": "boss", "content": "a"}])
    refused(400, "temperature", temperature="hot")
    refused(400, "n", n=0)
    refused(400, "top_logprobs", top_logprobs=3)
    refused(400, "tool_choice", tools=[TOOL], tool_choice="perhaps")
    refused(400, "response_format.type", response_format={"type": "xml"})
    refused(400, "messages[0].content[0].image_url.url", messages=[
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}])
    assert refused(400, "messages", messages=[{"role": "user", "content": "a " * 9000}]).body["code"] == "context_length_exceeded"
    broken = "data:image/png;base64,AAAA"
    refused(400, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": broken}}]}])


def unsupported_routes_answer_not_served():
    try:
        client.embeddings.create(model="demo", input="a")
    except openai.NotFoundError as error:
        assert error.body["code"] == "not_served", error.body
    else:
        raise AssertionError("embeddings were made")


def a_disconnected_client_frees_its_request_slot():
    for _ in range(40):
        stream = client.chat.completions.create(
            model="demo", messages=HELLO, stream=True, max_tokens=2000, extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
    done = client.chat.completions.create(model="demo", messages=HELLO, temperature=0)
    assert done.choices[0].message.content == GREETING


tell(
    the_demo_is_listed_and_found,
    every_question_about_a_picture_is_answered,
    a_stream_has_the_same_text_and_ends_with_usage,
    a_repeated_prompt_is_cached,
    several_samples_are_numbered_and_share_one_usage,
    log_probabilities_are_sent_whole_and_streamed,
    a_required_tool_is_called_by_its_schema,
    a_named_tool_is_called_once_and_streamed_in_pieces,
    a_pydantic_model_is_parsed,
    structured_outputs_of_vllm_constrain_replies,
    fields_of_vllm_take_effect,
    texts_and_tokens_are_completed,
    wrong_requests_are_refused_by_field,
    unsupported_routes_answer_not_served,
    a_disconnected_client_frees_its_request_slot,
)
