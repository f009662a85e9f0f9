// Tests with Anthropic's Node client. Arguments: the server's address and a key.
// needs: @anthropic-ai/sdk@1.12.0

import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { GREETING, HELLO, WEATHER, base, key, picture, tell } from "./story.mjs";

const client = new Anthropic({ baseURL: base, apiKey: key, maxRetries: 0, timeout: 60_000 });
const tools = [{ name: "weather", input_schema: WEATHER }];
const asked = { model: "demo", max_tokens: 200, messages: HELLO };

await tell({
  async "a picture is answered"() {
    const source = { type: "base64", media_type: "image/png", data: picture("number.png").toString("base64") };
    const content = [{ type: "image", source }, { type: "text", text: "What number is written?" }];
    const done = await client.messages.create({ ...asked, messages: [{ role: "user", content }] });
    assert.equal(done.content[0].text, "427");
    assert.equal(done.stop_reason, "end_turn");
  },
  async "a stream has the text and its usage"() {
    const stream = client.messages.stream(asked);
    let heard = "";
    stream.on("text", (piece) => (heard += piece));
    const done = await stream.finalMessage();
    assert.equal(heard, GREETING);
    assert.equal(done.content[0].text, GREETING);
    const { input_tokens } = await client.messages.countTokens({ model: "demo", messages: HELLO });
    assert.equal(done.usage.input_tokens + done.usage.cache_read_input_tokens, input_tokens);
  },
  async "a forced tool is called, also in a stream"() {
    for (const tool_choice of [{ type: "any" }, { type: "tool", name: "weather" }]) {
      const done = await client.messages.stream({ ...asked, tools, tool_choice }).finalMessage();
      assert.equal(done.stop_reason, "tool_use");
      assert.ok(["Bonn", "Paris"].includes(done.content[0].input.city));
    }
  },
  async "a wrong request is an error of its kind"() {
    await assert.rejects(client.messages.create({ ...asked, model: "claude" }), Anthropic.NotFoundError);
    await assert.rejects(client.messages.create({ ...asked, messages: [{ role: "user", content: 5 }] }), Anthropic.BadRequestError);
  },
});
