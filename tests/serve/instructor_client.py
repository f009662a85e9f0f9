"""Tests with instructor. Arguments: the server's address and a key."""
# needs: instructor==1.17.0

from typing import Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field

from story import BASE, KEY, tell

plain = openai.OpenAI(base_url=f"{BASE}/v1", api_key=KEY, max_retries=0)


class Forecast(BaseModel):
    model_config = ConfigDict(extra="forbid")  # without it the demo model would add fields
    city: Literal["Bonn", "Paris"]
    days: int = Field(ge=1, le=9)


def a_pydantic_model_is_filled_in_each_mode():
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(plain, mode=mode)
        found = client.chat.completions.create(
            model="demo", response_model=Forecast, max_tokens=200, max_retries=0,
            messages=[{"role": "user", "content": "Hello!"}])
        assert found.city in ("Bonn", "Paris") and 1 <= found.days <= 9, (mode, found)


tell(a_pydantic_model_is_filled_in_each_mode)
