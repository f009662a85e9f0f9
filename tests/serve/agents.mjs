// Tests with coding agents, each with all the tools that it offers by default. These tests need a separate server. Its
// chat template shows the demo model only the user's last words, because the demo model cannot use an agent's prompt of
// 20,000 tokens.
// needs: @anthropic-ai/claude-code@2.1.197 @openai/codex@0.169.0 opencode-ai@1.18.33

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { cpSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import http from "node:http";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { GREETING, tell } from "./story.mjs";

const { BURSAR, BURSAR_PICTURES, PATH } = process.env;
const room = mkdtempSync(join(tmpdir(), "bursar-agents-"));
const children = [];

/** A copy of the demo model whose template shows only the user's last words, without tools and instructions. */
function terse() {
  const folder = join(room, "terse");
  cpSync(join(BURSAR_PICTURES, "../checkpoint"), folder, { recursive: true });
  const file = join(folder, "chat_template.json");
  const { chat_template: whole } = JSON.parse(readFileSync(file, "utf8"));
  const last =
    "{% set last = (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}" +
    "{% set texts = last['content'] if last['content'] is string else last['content'] | map(attribute='text') | join %}" +
    "{% set words = texts.split('</system-reminder>')[-1] | trim %}" +
    "{% for message in [{'role': 'user', 'content': words}] %}";
  const chat_template = whole.replace("{% for message in messages %}", last).replaceAll("{{ shown_tools() }}", "");
  assert.ok(chat_template.includes(last) && !chat_template.includes("shown_tools() }}"), "the template has changed");
  writeFileSync(file, JSON.stringify({ chat_template }));
  return folder;
}

function started(command, args, options) {
  const child = spawn(command, args, { stdio: ["ignore", "pipe", "pipe"], ...options });
  children.push(child);
  child.told = "";
  for (const stream of [child.stdout, child.stderr]) stream.on("data", (data) => (child.told += data));
  return child;
}

async function serve() {
  const server = started(BURSAR, ["serve", terse(), "--name", "demo", "--device", "host", "--profile-cache", "none", "--listen", "127.0.0.1:0"]);
  for (let tried = 0; tried < 600; tried += 1) {
    const address = /^listening on (.*)$/m.exec(server.told)?.[1];
    if (address && server.told.includes("ready: demo")) return address;
    assert.equal(server.exitCode, null, server.told);
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
  throw new Error(`it is not ready: ${server.told}`);
}

/**
 * Requests that the agents have sent, with the responses. The agents connect to the proxy below, which records each
 * request, forwards it to the server, and may change its body first.
 */
const heard = [];
let change = (body) => body;
const between = http.createServer(async (request, response) => {
  let body = "";
  for await (const piece of request) body += piece;
  const note = { path: request.url.split("?")[0], method: request.method, answer: "" };
  if (body) note.body = change(JSON.parse(body));
  heard.push(note);
  const { host, connection, "content-length": length, ...headers } = request.headers;
  const sent = note.body ? JSON.stringify(note.body) : undefined;
  const answer = await fetch(server + request.url, { method: request.method, headers, body: sent });
  note.status = answer.status;
  response.writeHead(answer.status, { "content-type": answer.headers.get("content-type") ?? "text/plain" });
  for await (const piece of answer.body ?? []) {
    note.answer += Buffer.from(piece).toString();
    response.write(piece);
  }
  response.end();
});

/** Runs an agent in an empty folder with a separate home folder, and returns its output. */
async function run(name, args, home, files, { variables = {}, ends = 0 } = {}) {
  heard.length = 0;
  const workspace = join(room, `${home}-workspace`);
  for (const folder of [join(room, home), workspace]) mkdirSync(folder, { recursive: true });
  for (const [file, text] of Object.entries(files)) writeFileSync(join(room, file), text);
  const env = { PATH, HOME: join(room, home), CODEX_HOME: join(room, home), ...variables };
  const agent = started(join(import.meta.dirname, "../node_modules/.bin", name), args, { cwd: workspace, env });
  const late = setTimeout(() => agent.kill(), 90_000);
  const code = await new Promise((resolve) => agent.on("close", resolve));
  clearTimeout(late);
  assert.equal(code, ends, `${name}: ${agent.told}\n${JSON.stringify(heard.map(({ path, status, answer }) => [path, status, answer]))}`);
  const refused = heard.filter(({ method, status }) => method !== "HEAD" && status !== 200);
  assert.deepEqual(refused, [], "each request is served");
  return agent.told;
}

const codex = () => `
model = "demo"
model_provider = "bursar"
[model_providers.bursar]
name = "Bursar"
base_url = "http://127.0.0.1:${port}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
`;

const runCodex = (home, { more = [], ends = 0 } = {}) =>
  run("codex", ["exec", "--skip-git-repo-check", "-s", "read-only", ...more, "Hello!"], home, { [`${home}/config.toml`]: codex() }, { ends });

/** Returns a change that forces a call of this tool in the first request, and leaves later requests unchanged. */
function forcing(choice) {
  let asked = 0;
  return (body) => ((asked += 1) === 1 ? { ...body, tool_choice: choice } : body);
}

const items = (note, type) => note.body.input.filter((item) => item.type === type);

const server = await serve();
await new Promise((resolve) => between.listen(0, "127.0.0.1", resolve));
const port = between.address().port;
process.on("exit", () => {
  for (const child of children) child.kill();
  rmSync(room, { recursive: true, force: true });
});

await tell({
  async "Codex shows an answer, with its namespaces and hosted tools"() {
    const told = await runCodex("codex");
    assert.ok(told.includes(GREETING), told);
    const kinds = new Set(heard[0].body.tools.map((tool) => tool.type));
    for (const kind of ["function", "namespace", "web_search"]) assert.ok(kinds.has(kind), `${[...kinds]}`);
  },
  async "Codex runs a function that is called, and sends its result"() {
    change = forcing({ type: "function", name: "get_goal" });
    const told = await runCodex("codex-function");
    assert.ok(told.includes(GREETING), told);
    assert.equal(items(heard[1], "function_call")[0].name, "get_goal");
    assert.match(JSON.stringify(items(heard[1], "function_call_output")), /goal/);
  },
  async "Codex knows a function of a namespace by its own name"() {
    const name = "wait_agent";
    const force = forcing({ type: "function", namespace: "multi_agent_v1", name });
    change = (body) => {
      // Without this schema, the demo model would list agents without end.
      const targets = { type: "array", items: { enum: ["ada"] }, minItems: 1, maxItems: 1 };
      const parameters = { type: "object", properties: { targets }, required: ["targets"], additionalProperties: false };
      const within = body.tools.find((tool) => tool.type === "namespace").tools;
      Object.assign(within.find((tool) => tool.name === name), { parameters });
      return force(body);
    };
    const told = await runCodex("codex-namespace");
    assert.ok(told.includes(GREETING), told);
    const [call] = items(heard[1], "function_call");
    assert.deepEqual([call.namespace, call.name, JSON.parse(call.arguments)], ["multi_agent_v1", name, { targets: ["ada"] }]);
    assert.doesNotMatch(items(heard[1], "function_call_output")[0].output, /unsupported call/);
  },
  async "Codex reads the call of a custom tool, and knows one that was cut"() {
    const force = forcing({ type: "custom", name: "apply_patch" });
    change = (body) => {
      for (const tool of body.tools) if (tool.type === "custom") delete tool.format;
      return { ...force(body), model: "demo", max_output_tokens: 120 };
    };
    const told = await runCodex("codex-custom", { more: ["-m", "gpt-5.5"], ends: 1 });
    assert.match(told, /apply_patch verification failed/);
    assert.match(told, /Incomplete response returned, reason: max_output_tokens/);
  },
  async "opencode shows an answer"() {
    change = (body) => body;
    const provider = {
      npm: "@ai-sdk/openai-compatible",
      options: { baseURL: `http://127.0.0.1:${port}/v1`, apiKey: "none" },
      models: { demo: { limit: { context: 4096, output: 512 } } },
    };
    const settings = { model: "bursar/demo", small_model: "bursar/demo", autoupdate: false, share: "disabled", provider: { bursar: provider } };
    const told = await run("opencode", ["run", "Hello!"], "opencode", { "opencode-workspace/opencode.json": JSON.stringify(settings) });
    assert.ok(told.includes(GREETING), told);
    assert.ok(heard.some(({ body }) => body.tools?.length > 5 && body.stream), "it offers its tools");
  },
  async "Claude Code shows an answer"() {
    const variables = {
      ANTHROPIC_BASE_URL: `http://127.0.0.1:${port}`,
      ANTHROPIC_API_KEY: "none",
      ANTHROPIC_MODEL: "demo",
      ANTHROPIC_DEFAULT_HAIKU_MODEL: "demo",
      CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
      CLAUDE_CODE_MAX_OUTPUT_TOKENS: "512",
    };
    const told = await run("claude", ["-p", "Hello!"], "claude", {}, { variables });
    assert.ok(told.includes(GREETING), told);
    assert.ok(heard.some(({ body }) => body?.tools?.length > 5 && body.stream), "it offers its tools");
  },
});
