"""Tests with LangChain's ChatOpenAI. Arguments: the server's address and a key."""
# needs: langchain-openai==1.7.3

from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict

from story import BASE, KEY, data_uri, tell

model = ChatOpenAI(model="demo", base_url=f"{BASE}/v1", api_key=KEY, max_retries=0, temperature=0, max_tokens=200)
GREETING = "Hello! Show me a picture."


class Forecast(BaseModel):
    """A forecast."""

    model_config = ConfigDict(extra="forbid")  # without it the demo model would add fields
    city: Literal["Bonn", "Paris"]
    warm: bool


@tool(args_schema=Forecast)
def weather(city: str, warm: bool) -> str:
    """The weather of a city."""
    return f"rain in {city}"


def a_text_is_answered_whole_and_streamed():
    assert model.invoke("Hello!").content == GREETING
    assert "".join(chunk.content for chunk in model.stream("Hello!")) == GREETING


def a_picture_is_answered():
    parts = [{"type": "image_url", "image_url": {"url": data_uri("number.png")}}, {"type": "text", "text": "What number is written?"}]
    assert model.invoke([HumanMessage(content=parts)]).content == "427"


def a_tool_is_called_and_its_result_used():
    asked = [HumanMessage("Hello!")]
    reply = model.bind_tools([weather], tool_choice="weather", strict=True).invoke(asked)
    (call,) = reply.tool_calls
    assert call["name"] == "weather" and call["args"]["city"] in ("Bonn", "Paris"), reply
    result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    assert model.bind_tools([weather]).invoke([*asked, reply, result]).response_metadata["finish_reason"] in ("stop", "length")


def structured_output_follows_its_schema():
    for method in ("json_schema", "function_calling"):
        found = model.with_structured_output(Forecast, method=method).invoke("Hello!")
        assert found.city in ("Bonn", "Paris"), (method, found)


tell(
    a_text_is_answered_whole_and_streamed,
    a_picture_is_answered,
    a_tool_is_called_and_its_result_used,
    structured_output_follows_its_schema,
)
