// Tests with OpenAI's Node client. Arguments: the server's address and a key.
// needs: openai@7.57.0 zod@4.1.12

import assert from "node:assert/strict";
import OpenAI from "openai";
import { GREETING, HELLO, WEATHER, base, dataUri, key, tell } from "./story.mjs";

const client = new OpenAI({ baseURL: `${base}/v1`, apiKey: key, maxRetries: 0, timeout: 60_000 });
const tools = [{ type: "function", function: { name: "weather", parameters: WEATHER } }];

await tell({
  async "a picture is answered"() {
    const image = { type: "image_url", image_url: { url: dataUri("number.png") } };
    const content = [image, { type: "text", text: "What number is written?" }];
    const done = await client.chat.completions.create({ model: "demo", messages: [{ role: "user", content }], temperature: 0 });
    assert.equal(done.choices[0].message.content, "427");
  },
  async "a stream has the text and ends with usage"() {
    const stream = client.chat.completions.stream({ model: "demo", messages: HELLO, temperature: 0, stream_options: { include_usage: true } });
    let heard = "";
    stream.on("content", (piece) => (heard += piece));
    const done = await stream.finalChatCompletion();
    assert.equal(heard, GREETING);
    assert.equal(done.choices[0].message.content, GREETING);
    assert.equal(done.usage.completion_tokens, 7);
  },
  async "a required tool is called"() {
    const done = await client.chat.completions.create({ model: "demo", messages: HELLO, tools, tool_choice: "required", max_tokens: 200 });
    const [call] = done.choices[0].message.tool_calls;
    assert.ok(["Bonn", "Paris"].includes(JSON.parse(call.function.arguments).city));
  },
  async "a stream that is aborted ends"() {
    const stream = await client.chat.completions.create({ model: "demo", messages: HELLO, stream: true, max_tokens: 2000, ignore_eos: true });
    let chunks = 0;
    for await (const _ of stream) if (++chunks === 3) stream.controller.abort();
    assert.ok(chunks < 100, `${chunks} chunks came`);
  },
  async "a wrong request is an error of its kind"() {
    await assert.rejects(client.chat.completions.create({ model: "gpt-4o", messages: HELLO }), OpenAI.NotFoundError);
    const wrong = client.chat.completions.create({ model: "demo", messages: [{ role: "user", content: 5 }] });
    await assert.rejects(wrong, (error) => error instanceof OpenAI.BadRequestError && error.param === "messages[0].content");
  },
});
