// Tests with Vercel's AI SDK. Arguments: the server's address and a key.
// needs: ai@7.0.173 @ai-sdk/openai-compatible@3.0.92 zod@4.1.12

import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, jsonSchema, streamText, tool } from "ai";
import { GREETING, WEATHER, base, key, picture, tell } from "./story.mjs";

const provider = createOpenAICompatible({ name: "bursar", baseURL: `${base}/v1`, apiKey: key, includeUsage: true, supportsStructuredOutputs: true });
const model = provider("demo");
const usual = { model, temperature: 0, maxRetries: 0 };

await tell({
  async "a text streams"() {
    const reply = streamText({ ...usual, prompt: "Hello!" });
    let heard = "";
    for await (const piece of reply.textStream) heard += piece;
    assert.equal(heard, GREETING);
    assert.equal((await reply.usage).outputTokens, 7);
    assert.equal(await reply.finishReason, "stop");
  },
  async "a picture is answered"() {
    const content = [{ type: "file", mediaType: "image/png", data: picture("number.png") }, { type: "text", text: "What number is written?" }];
    const { text } = await generateText({ ...usual, messages: [{ role: "user", content }] });
    assert.equal(text, "427");
  },
  async "a required tool is called and run"() {
    const heard = [];
    const weather = tool({ description: "the weather", inputSchema: jsonSchema(WEATHER), execute: async (input) => heard.push(input.city) });
    await generateText({ ...usual, prompt: "Hello!", tools: { weather }, toolChoice: "required", maxOutputTokens: 200 });
    assert.ok(heard.length >= 1 && heard.every((city) => ["Bonn", "Paris"].includes(city)), `${heard}`);
  },
  async "an object follows its schema"() {
    const output = Output.object({ schema: jsonSchema(WEATHER) });
    const done = await generateText({ ...usual, prompt: "Hello!", output, maxOutputTokens: 100 });
    assert.ok(["Bonn", "Paris"].includes(done.output.city));
  },
});
