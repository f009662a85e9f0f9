// Chat page that also shows the device's memory.
// Text from models and servers only becomes text nodes.

import { draw } from "./markdown.js";

const KEY = "bursar.key";
const $ = (id) => document.getElementById(id);

/** Creates an element with a class and a text. */
function make(tag, name = "", text = "") {
  const node = document.createElement(tag);
  if (name) node.className = name;
  if (text) node.textContent = text;
  return node;
}

/** Sets a text only if it has changed, so that the same text is not drawn or read aloud again. */
function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

const pause = (milliseconds) => new Promise((wake) => setTimeout(wake, milliseconds));
const grouped = (count) => count.toLocaleString("en");

/** Formats bytes in the largest unit in which the value is at least 1. */
function size(bytes) {
  let [value, unit] = [bytes, 0];
  for (; value >= 1024 && unit < 4; unit += 1) value /= 1024;
  return `${unit && value < 100 ? value.toFixed(1) : Math.round(value)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
}

// ---- The server

/** A failed request, with a message for people. */
class Refused extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }

  static async from(response) {
    const body = await response.json().catch(() => null);
    const message = body?.error?.message ?? `The server answered ${response.status} ${response.statusText}`;
    const after = response.headers.get("retry-after");
    return new Refused(after ? `${message.replace(/\.$/, "")}. Try again in ${after} s.` : message, response.status);
  }
}

/** Sends a request to the server, with the API key if there is one. */
async function ask(path, options = {}) {
  const headers = { ...options.headers };
  const key = sessionStorage.getItem(KEY);
  if (key) headers.authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers }).catch((error) => {
    throw error.name === "AbortError" ? error : new Refused("The server cannot be reached.");
  });
  if (response.ok) return response;
  if (response.status === 401) {
    // The user may have entered another key while this request was running.
    if (key !== sessionStorage.getItem(KEY)) return ask(path, options);
    wantKey(Boolean(key));
  }
  throw await Refused.from(response);
}

const asJson = (body) => ({ method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });

/**
 * Parses server-sent events (WHATWG HTML, "Server-sent events") from a body whose chunks may be cut
 * anywhere.
 */
export async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let [rest, type, data] = ["", "", []];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      // A carriage return at the end may be the first half of a line break.
      const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield { type: type || "message", data: data.join("\n") };
          [type, data] = ["", []];
          continue;
        }
        const [, field, value] = /^([^:]*)(?:: ?(.*))?$/s.exec(line);
        if (field === "data") data.push(value ?? "");
        if (field === "event") type = value ?? "";
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// ---- The key

let keyGiven = Promise.resolve();
let giveKey = () => {};

function wantKey(isWrong) {
  say($("key-label"), isWrong ? "The server rejected this key" : "This server requires an API key");
  if (!$("key-form").hidden) return;
  keyGiven = new Promise((given) => (giveKey = given));
  $("key-form").hidden = false;
  $("key").focus();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value);
  $("key").value = "";
  $("key-form").hidden = true;
  $("text").focus();
  giveKey();
});

// ---- Models

let models = [];

async function loadModels() {
  const { data } = await (await ask("v1/models")).json();
  // The server lists a model under each of its names. Show only its own name.
  models = data.filter((model) => model.id === model.root);
  const chosen = $("model").value;
  $("model").replaceChildren(...models.map(({ id, state }) => new Option(state === "ready" ? id : `${id}, ${state}`, id)));
  const usual = models.find(({ state }) => state === "ready") ?? models[0];
  const kept = models.find(({ id }) => id === chosen) ?? usual;
  if (kept) $("model").value = kept.id;
  showModel();
}

const chosenModel = () => models.find(({ id }) => id === $("model").value);

function showModel() {
  const model = chosenModel();
  const count = model?.pictures;
  const takes = count === 0 ? "takes no pictures" : `takes ${count} ${count === 1 ? "picture" : "pictures"}`;
  const states = { ready: count == null ? "ready" : takes, loading: `loading: ${model?.detail}`, failed: `failed: ${model?.detail}` };
  say($("model-state"), model ? (states[model.state] ?? model.state) : "no model");
  $("add").disabled = count === 0;
}

$("model").addEventListener("change", showModel);

// ---- The message to send

let pictures = [];

const dataOf = (blob) =>
  new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(reader.error);
    reader.readAsDataURL(blob);
  });

/** Maximum pixels of the longer side of a picture that is sent. Models use fewer. */
const SIDE_MAX = 2048;

/** Scales a large picture down. Returns other files unchanged. */
async function smaller(file) {
  if (!["image/jpeg", "image/png", "image/webp"].includes(file.type)) return file;
  const whole = await createImageBitmap(file).catch(() => null);
  const share = whole ? SIDE_MAX / Math.max(whole.width, whole.height) : 1;
  if (share >= 1) return file;
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [Math.round(whole.width * share), Math.round(whole.height * share)];
  canvas.getContext("2d").drawImage(whole, 0, 0, canvas.width, canvas.height);
  whole.close();
  return (await new Promise((done) => canvas.toBlob(done, file.type, 0.9))) ?? file;
}

async function read(file) {
  const [sent, isVideo] = [await smaller(file), file.type.startsWith("video/")];
  return { name: file.name || "picture", isVideo, file: URL.createObjectURL(sent), url: await dataOf(sent) };
}

async function addPictures(files) {
  const taken = [...files].filter(({ type }) => /^(image|video)\//.test(type));
  const others = [...files].filter((file) => !taken.includes(file)).map(({ name }) => name);
  try {
    pictures.push(...(await Promise.all(taken.map(read))));
    note(others.length ? `${others.join(", ")}: neither a picture nor a video` : "");
  } catch (error) {
    note(`A picture could not be read: ${error.message}`);
  }
  showPictures();
}

function showPictures() {
  $("pictures").replaceChildren(...pictures.map((picture) => {
    const item = make("li");
    const remove = make("button", "", "×");
    remove.type = "button";
    remove.setAttribute("aria-label", `Remove ${picture.name}`);
    remove.addEventListener("click", () => {
      pictures = pictures.filter((other) => other !== picture);
      showPictures();
      $("text").focus();
    });
    item.append(shown(picture), remove);
    return item;
  }));
}

function shown({ name, file, isVideo }) {
  const image = isVideo ? document.createElement("video") : new Image();
  image.src = file;
  if (isVideo) [image.muted, image.ariaLabel] = [true, name];
  else image.alt = name;
  return image;
}

const usualNote = $("note").textContent;
const note = (text) => say($("note"), text || usualNote);

$("add").addEventListener("click", () => $("files").click());
$("files").addEventListener("change", async () => {
  await addPictures($("files").files);
  $("files").value = "";
});
$("text").addEventListener("paste", (event) => {
  if (event.clipboardData.files.length) addPictures(event.clipboardData.files);
});
const dragsFiles = (event) => event.dataTransfer?.types.includes("Files");
// A file dropped outside the chat must not replace the page, which would lose the conversation.
for (const kind of ["dragover", "drop"]) addEventListener(kind, (event) => dragsFiles(event) && event.preventDefault());
$("chat").addEventListener("dragover", (event) => $("chat").classList.toggle("over", dragsFiles(event)));
$("chat").addEventListener("dragleave", () => $("chat").classList.remove("over"));
$("chat").addEventListener("drop", (event) => {
  $("chat").classList.remove("over");
  if (dragsFiles(event)) addPictures(event.dataTransfer.files);
});

// ---- The conversation

/**
 * Questions with their answers: `{text, pictures, answer, node, place}`. `answer` is empty if the
 * question has no answer.
 */
let turns = [];
/** `AbortController` of the answer that is being streamed. */
let running = null;

/** Returns the messages for the API. Questions without an answer are left out, except the last. */
function messages() {
  const sent = turns.filter((turn) => turn.answer || turn === turns.at(-1));
  const system = $("system").value.trim();
  const said = sent.flatMap(({ text, pictures, answer }) => {
    const parts = pictures.map(({ url, isVideo }) =>
      isVideo ? { type: "video_url", video_url: { url } } : { type: "image_url", image_url: { url } });
    if (text) parts.push({ type: "text", text });
    const question = { role: "user", content: pictures.length ? parts : text };
    return answer ? [question, { role: "assistant", content: answer }] : [question];
  });
  return system ? [{ role: "system", content: system }, ...said] : said;
}

function submit() {
  const text = $("text").value;
  if (running) return note("Wait for the answer, or stop it first");
  if (!text.trim() && !pictures.length) return note("Type a question first");
  addTurn({ text, pictures, answer: "" });
  [$("text").value, pictures] = ["", []];
  note("");
  showPictures();
  answerLast();
}

/** Adds a turn to the conversation, with a button to edit its question. */
function addTurn({ text, pictures, answer }) {
  const [node, question, place] = [make("div", "turn"), make("div", "question"), make("div", "answer")];
  const turn = { text, pictures, answer, node, place };
  const edit = make("button", "tool", "Edit");
  [edit.type, edit.id] = ["button", `edit-${turns.length}`];
  edit.setAttribute("aria-label", `Edit question ${turns.length + 1}`);
  edit.addEventListener("click", () => editFrom(turn));
  question.append(edit, ...pictures.map(shown), ...(text ? [make("div", "", text)] : []));
  node.append(question, place);
  turns.push(turn);
  $("log").append(node);
  return turn;
}

/** Removes a turn and all later ones, and puts its question back into the input field. */
function editFrom(turn) {
  stop();
  running = null;
  const from = turns.indexOf(turn);
  for (const { node } of turns.splice(from)) node.remove();
  // Keep the text that was typed since then, after the question to edit.
  $("text").value = [turn.text, $("text").value].filter(Boolean).join("\n");
  pictures = [...turn.pictures, ...pictures];
  showPictures();
  showRunning();
  $("text").focus();
}

async function answerLast() {
  const turn = turns.at(-1);
  const reply = new Reply(turn.place);
  turn.answer = "";
  running = new AbortController();
  showRunning();
  $("log").scrollTop = $("log").scrollHeight;
  const { signal } = running;
  try {
    await reply.hear($("model").value, messages(), signal);
  } catch (error) {
    reply.broke(signal.aborted ? null : error);
  }
  turn.answer = reply.text;
  offerCopy(turn);
  if (turns.includes(turn)) keepChat();
  // A new chat may have started while this answer was streamed.
  if (running?.signal === signal) running = null;
  showRunning();
}

/** Adds a button that copies an answer, if the browser allows copying. */
function offerCopy({ answer, place }) {
  if (!answer || !navigator.clipboard) return;
  const copy = make("button", "tool", "Copy");
  [copy.type, copy.id] = ["button", `copy-${turns.length - 1}`];
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(answer).then(() => say(copy, "Copied"), () => say(copy, "Not allowed"));
    setTimeout(() => say(copy, "Copy"), 1500);
  });
  place.append(copy);
}

/** Makes a change, and keeps the end of the conversation visible if it was visible before. */
function keepEnd(change) {
  const log = $("log");
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

function showRunning() {
  const focused = document.activeElement;
  $("send").hidden = Boolean(running);
  $("stop").hidden = !running;
  keepEnd(() => ($("actions").hidden = Boolean(running) || !turns.length));
  // The element that had the focus is hidden now.
  if (running && [$("send"), $("retry")].includes(focused)) $("stop").focus();
  if (!running && focused === $("stop")) $("text").focus();
}

/** One answer, drawn while it is streamed. */
class Reply {
  constructor(place) {
    this.place = place;
    this.words = make("div", "words");
    this.figuresLine = make("p", "usage", "waiting");
    place.replaceChildren(this.words, this.figuresLine);
    // Screen readers read the answer when it is complete.
    place.setAttribute("aria-busy", "true");
    [this.text, this.reasoning, this.chunks, this.moments, this.isDrawn] = ["", "", 0, 0, true];
    this.began = performance.now();
  }

  async hear(model, messages, signal) {
    this.model = model;
    const body = { model, messages, stream: true, stream_options: { include_usage: true }, ...sampling() };
    const response = await ask("v1/chat/completions", { ...asJson(body), signal });
    let isWhole = false;
    try {
      for await (const { data } of eventsOf(response.body)) {
        if ((isWhole = data === "[DONE]")) break;
        this.take(JSON.parse(data));
      }
    } catch (error) {
      throw error instanceof TypeError ? new Refused(BROKEN) : error;
    }
    if (!isWhole) throw new Refused(BROKEN);
    this.end(this.finish === "length" ? "stopped at the token limit" : "");
  }

  take({ error, choices, usage }) {
    if (error) throw new Refused(error.message);
    this.usage = usage ?? this.usage;
    for (const { delta, finish_reason } of choices ?? []) {
      this.finish = finish_reason ?? this.finish;
      const [text, reasoning] = [delta.content ?? "", delta.reasoning_content ?? ""];
      if (!text && !reasoning) continue;
      this.text += text;
      this.reasoning += reasoning;
      this.chunks += 1;
      const now = performance.now();
      // Chunks that the browser delivers together have no separate arrival times.
      if (!(now - this.last < 1)) this.moments += 1;
      this.last = now;
      this.first ??= this.last;
      heard.push({ at: this.last, model: this.model });
    }
    if (!this.isDrawn) return;
    this.isDrawn = false;
    requestAnimationFrame(() => this.isDrawn || keepEnd(() => this.draw()));
  }

  draw() {
    this.isDrawn = true;
    if (this.reasoning && !this.thoughts) {
      this.thoughts = make("div", "words");
      const details = make("details", "reasoning");
      details.append(make("summary", "", "Reasoning"), this.thoughts);
      this.place.prepend(details);
    }
    if (this.thoughts) draw(this.thoughts, this.reasoning);
    draw(this.words, this.text);
    if (this.chunks) say(this.figuresLine, `${grouped(this.chunks)} tokens`);
  }

  /** Ends an incomplete answer. If there is no error, the user stopped the answer. */
  broke(error) {
    this.end(error ? "" : "stopped", error && make("p", "error", error.message));
  }

  end(how, error) {
    keepEnd(() => {
      this.draw();
      if (error) this.words.after(error);
      say(this.figuresLine, [...this.figures(), how].filter(Boolean).join(" · "));
    });
    this.place.setAttribute("aria-busy", "false");
  }

  figures() {
    const { usage, chunks, first, last } = this;
    if (!chunks && !usage) return [];
    const tokens = usage?.completion_tokens ?? chunks;
    const parts = [];
    if (usage) {
      const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
      parts.push(`prompt ${grouped(usage.prompt_tokens)} tokens, ${grouped(cached)} of them cached`);
    }
    parts.push(`answer ${usage ? "" : "about "}${grouped(tokens)} tokens`);
    if (this.moments >= RATED_MOMENTS) parts.push(`${(((tokens - 1) * 1000) / (last - first)).toFixed(1)} tokens/s`);
    if (first) parts.push(`first after ${((first - this.began) / 1000).toFixed(2)} s`);
    return parts;
  }
}

/** Minimum number of distinct arrival times for which a rate is shown. */
const RATED_MOMENTS = 8;
const BROKEN = "The connection broke before the answer was complete.";

function stop() {
  running?.abort();
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
$("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
$("stop").addEventListener("click", stop);
addEventListener("keydown", (event) => event.key === "Escape" && stop());
$("retry").addEventListener("click", answerLast);
$("edit").addEventListener("click", () => editFrom(turns.at(-1)));
$("new").addEventListener("click", () => newChat());

function newChat(kept = null) {
  stop();
  [running, turns, chat] = [null, [], kept?.id ?? Date.now()];
  $("log").replaceChildren();
  for (const { text, pictures, answer } of kept?.turns ?? []) {
    const restored = ({ name, url }) => ({ name, url, file: url, isVideo: url.startsWith("data:video/") });
    const turn = addTurn({ text, pictures: pictures.map(restored), answer });
    draw(turn.place.appendChild(make("div", "words")), answer);
    offerCopy(turn);
  }
  showRunning();
  $("text").focus();
}

// ---- Settings and chats, which the browser keeps until they are cleared

const SETTINGS = "bursar.settings";
const SETTING_IDS = ["system", "temperature", "top_p", "max_tokens"];

/** Returns the sampling fields that are set. */
function sampling() {
  const set = SETTING_IDS.slice(1).map((id) => [id, $(id).valueAsNumber]);
  return Object.fromEntries(set.filter(([, value]) => !Number.isNaN(value)));
}

const kept = (name, usual) => {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? usual;
  } catch {
    return usual;
  }
};

for (const [id, value] of Object.entries(kept(SETTINGS, {}))) if (SETTING_IDS.includes(id)) $(id).value = value;
$("settings").addEventListener("input", () => {
  localStorage.setItem(SETTINGS, JSON.stringify(Object.fromEntries(SETTING_IDS.map((id) => [id, $(id).value]))));
});

const CHATS = "bursar.chats";
const CHATS_MAX = 20;
/** Id of the chat that is shown. */
let chat = Date.now();

/**
 * Stores the chat that is shown. If the browser's storage is full, all pictures are dropped first,
 * then the oldest chats.
 */
function keepChat() {
  const turnsKept = turns.map(({ text, pictures, answer }) => ({
    text, answer, pictures: pictures.map(({ name, url }) => ({ name, url })),
  }));
  let chats = [{ id: chat, turns: turnsKept }, ...kept(CHATS, []).filter(({ id }) => id !== chat)].slice(0, CHATS_MAX);
  for (let tries = 0; tries < 3 + CHATS_MAX; tries += 1) {
    try {
      localStorage.setItem(CHATS, JSON.stringify(chats));
      break;
    } catch {
      const isBare = chats.every(({ turns }) => turns.every(({ pictures }) => !pictures.length));
      if (isBare) chats = chats.slice(0, -1);
      else chats = chats.map(({ id, turns }) => ({ id, turns: turns.map((turn) => ({ ...turn, pictures: [] })) }));
    }
  }
  showChats();
}

function showChats() {
  const chats = kept(CHATS, []);
  const title = ({ turns: [first] }) => (first?.text || "A picture").slice(0, 40);
  $("chats").replaceChildren(new Option("Earlier chats", ""), ...chats.map((chat) => new Option(title(chat), chat.id)));
  $("chats").hidden = $("clear").hidden = !chats.length;
}

$("chats").addEventListener("change", ({ target }) => {
  const chosen = kept(CHATS, []).find(({ id }) => String(id) === target.value);
  if (chosen) newChat(chosen);
  target.value = "";
});
$("clear").addEventListener("click", () => {
  localStorage.removeItem(CHATS);
  showChats();
  newChat();
});
showChats();

// ---- Memory

/** Chunks of answers in the last `RATE_MILLISECONDS`, with their time and model. */
let heard = [];
const RATE_MILLISECONDS = 2000;

/** Classes of the ledger, in the order of the bar: name in the ledger, title, and CSS class. */
const CLASSES = [
  ["weights", "Weights", "weights"],
  ["kv", "KV cache", "kv"],
  ["step workspace", "Step workspace", "step"],
  ["vision workspace", "Vision workspace", "vision"],
  ["vision cache", "Vision cache", "cache"],
  ["graphs", "Graphs", "graphs"],
  ["tenant", "Tenants", "tenants"],
  ["canary", "Canary, kept free", "canary"],
  ["overhead", "Overhead of this process", "overhead"],
  ["foreign", "Other processes", "foreign"],
  ["free", "Free", "free"],
].map(([name, title, style]) => {
  const [part, row, bytes, share] = [make("div", style), make("tr"), make("td"), make("td")];
  const head = make("th");
  head.scope = "row";
  head.append(make("span", `swatch ${style}`), title);
  row.append(head, bytes, share);
  row.dataset.class = name;
  $("band").append(part);
  $("legend").tBodies[0].append(row);
  return { name, title, part, bytes, share };
});

/** Returns the bytes of each class. Leases of all tenants are added up as one class. */
function byClass({ classes, canary, overhead, foreign, free }) {
  const bytes = { canary, overhead, foreign, free };
  for (const line of classes) {
    const name = line.class.split(":")[0];
    bytes[name] = (bytes[name] ?? 0) + line.bytes;
  }
  return bytes;
}

function showBudget({ device, is_host_memory, devices, budget, models: modelStates }) {
  showDevices(devices);
  const bytes = byClass(budget);
  say($("device"), `${size(budget.total)} of ${is_host_memory ? "host memory in place of a GPU" : device}`);
  for (const { name, title, part, bytes: cell, share } of CLASSES) {
    const count = bytes[name] ?? 0;
    part.style.flexGrow = count / 2 ** 20;
    part.classList.toggle("some", count > 0);
    part.title = `${title}: ${size(count)}`;
    say(cell, size(count));
    say(share, `${((count * 100) / budget.total).toFixed(1)} %`);
  }
  const waits = budget.waiting.length;
  const lacks = budget.deficit ? `the device is overcommitted by ${size(budget.deficit)}` : "";
  const waiting = waits ? `${waits} ${waits === 1 ? "lease waits" : "leases wait"} for memory` : "";
  say($("pressure"), [lacks, waiting].filter(Boolean).join("; "));
  showModels(modelStates);
}

/** Index of the device that is shown, if models run on separate devices. */
let shownDevice = 0;
const ofDevice = () => (shownDevice ? `?device=${shownDevice}` : "");

function showDevices(labels = []) {
  const choice = $("devices");
  choice.hidden = labels.length < 2;
  if (choice.hidden || choice.length === labels.length) return;
  choice.replaceChildren(...labels.map((label, number) => new Option(`${number}: ${label}`, number, false, number === shownDevice)));
}

$("devices").addEventListener("change", ({ target }) => {
  shownDevice = Number(target.value);
  connection.abort();
});

/** States of the models in the last snapshot, to detect a change. */
let states = "";

function showModels(modelStates) {
  const now = performance.now();
  heard = heard.filter(({ at }) => now - at < RATE_MILLISECONDS);
  const rate = (name) => (heard.filter(({ model }) => model === name).length * 1000) / RATE_MILLISECONDS;
  const rows = modelStates.map(({ model, state, detail, requests, requests_max }) => {
    const busy = requests == null ? (detail ?? "") : `${grouped(requests)} of ${grouped(requests_max)} requests`;
    return [model, state, busy, `${rate(model)} tokens/s here`];
  });
  const body = $("models").tBodies[0];
  while (body.rows.length > rows.length) body.lastChild.remove();
  rows.forEach((texts, place) => {
    const row = body.rows[place] ?? body.appendChild(make("tr"));
    texts.forEach((text, column) => say(row.cells[column] ?? row.appendChild(make(column ? "td" : "th")), text));
  });
  const seen = modelStates.map(({ model, state, detail }) => [model, state, detail].join()).join("\n");
  if (seen === states) return;
  states = seen;
  loadModels().catch(() => (states = ""));
}

const nameOf = (word) => CLASSES.find(({ name }) => name === word.replace("_", " "))?.title.replace(/^[A-Z](?=[a-z])/, (first) => first.toLowerCase()) ?? word;

/** Describes an event of the ledger in words. */
function wordsOf(event) {
  const { model, bytes, from, to, reason, from_blocks, to_blocks } = event;
  const what = event.class ? nameOf(event.class) : "";
  const amount = bytes == null ? "" : size(bytes);
  const words = {
    lease_granted: () => `${model}: ${amount} leased for ${what}`,
    lease_refused: () => `${model}: ${amount} for ${what} refused: ${reason}`,
    lease_resized: () => `${model}: ${what} resized from ${size(from)} to ${size(to)}`,
    lease_revoked: () => `${model}: lease of ${amount} for ${what} revoked, because its owner died`,
    lease_freed: () => `${model}: ${amount} of ${what} returned`,
    canary_given: () => `${amount} of the canary released to another process`,
    canary_taken: () => `${amount} kept free for the canary`,
    shrink: () => `${model}: KV cache shrinks from ${grouped(from_blocks)} to ${grouped(to_blocks)} blocks`,
    growth: () => `${model}: KV cache grows from ${grouped(from_blocks)} to ${grouped(to_blocks)} blocks`,
    oom: () => `${model}: memory was refused (${event.phase})`,
    restart: () => `${model ?? "runtime"}: ${event.actor} restarted: ${reason}`,
    ready: () => `${model} is ready, with room for ${grouped(event.kv_tokens)} tokens`,
    failed: () => `${model} did not start: ${reason}`,
    stopped: () => `${model} stopped: ${reason}`,
    device_lost: () => `the device was lost: ${reason}`,
    // The server sends this to a client that reads too slowly.
    missed: () => event.detail,
    // Created by this page: the simulation could not be started.
    other_process: () => `another process could not be simulated: ${event.detail}`,
  };
  return words[event.event]?.() ?? JSON.stringify(event);
}

const BAD = ["lease_refused", "canary_given", "oom", "restart", "failed", "device_lost"];
const EVENTS_MAX = 10;

function showEvent(event) {
  const item = make("li", BAD.includes(event.event) ? "bad" : "");
  const at = event.at == null ? new Date() : new Date(event.at * 1000);
  item.append(make("time", "", at.toLocaleTimeString("en-GB")), wordsOf(event));
  $("events").prepend(item);
  while ($("events").children.length > EVENTS_MAX) $("events").lastChild.remove();
}

const WAIT_MIN = 500;
const WAIT_MAX = 8000;
/** The budget is sent twice a second. After this silence, the connection is considered dead. */
const SILENCE_MAX = 5000;

/** `AbortController` of the stream of device memory. */
let connection = new AbortController();

// A browser opens at most six connections to a server. A hidden tab closes its stream, so that chats
// in other tabs still get a connection.
document.addEventListener("visibilitychange", () => document.hidden && connection.abort());

async function seen() {
  while (document.hidden) await new Promise((turned) => document.addEventListener("visibilitychange", turned, { once: true }));
}

/** Watches the memory as long as the page is open and visible. */
async function watch() {
  for (let wait = WAIT_MIN; ; wait = Math.min(wait * 2, WAIT_MAX)) {
    await seen();
    let why = "The connection was lost";
    try {
      if (await watchOnce(() => (wait = WAIT_MIN))) continue;
    } catch (error) {
      if (error.status === 401) {
        say($("connection"), "Enter an API key to see the memory");
        await keyGiven;
        wait = WAIT_MIN / 2;
        continue;
      }
      if (error.status === 403) return say($("connection"), "Only an administrator of this server sees its memory.");
      if (error instanceof Refused) why = error.message.replace(/\.$/, "");
    }
    if (document.hidden) continue;
    say($("connection"), `${why}. Trying again in ${wait / 1000} s.`);
    await pause(wait);
  }
}

/** Watches one stream. Returns `true` if it ended because the user chose another device. */
async function watchOnce(heardOne) {
  const device = shownDevice;
  // Load the models even if the memory cannot be shown. The chat then reports errors.
  loadModels().catch(() => {});
  connection = new AbortController();
  let silence = setTimeout(() => connection.abort(), SILENCE_MAX);
  try {
    const { body } = await ask(`v1/budget/events${ofDevice()}`, { signal: connection.signal });
    // The server sends the latest events again.
    $("events").replaceChildren();
    isOtherProcessUnknown = true;
    for await (const { type, data } of eventsOf(body)) {
      clearTimeout(silence);
      silence = setTimeout(() => connection.abort(), SILENCE_MAX);
      const message = JSON.parse(data);
      if (type === "event") showEvent(message);
      if (type !== "budget") continue;
      heardOne();
      say($("connection"), "");
      showBudget(message);
      offerOtherProcess(message);
    }
  } catch (error) {
    if (device === shownDevice) throw error;
    return true;
  } finally {
    clearTimeout(silence);
  }
}

// ---- Simulation of another process that takes memory

/** `true` until this connection has found out whether the server supports the simulation. */
let isOtherProcessUnknown = true;
let otherProcessBytes = 0;

async function offerOtherProcess({ is_host_memory, budget }) {
  otherProcessBytes = Math.floor(budget.total / 4);
  if (!isOtherProcessUnknown) return;
  isOtherProcessUnknown = false;
  const isThere = is_host_memory && (await ask(`v1/budget/other_process${ofDevice()}`).then(() => true, ({ status }) => status && status !== 404));
  $("other_process").hidden = !isThere;
}

$("other_process").addEventListener("click", async () => {
  const error = await ask(`v1/budget/other_process${ofDevice()}`, asJson({ bytes: otherProcessBytes, seconds: 10 })).then(() => "", ({ message }) => message);
  if (error) showEvent({ event: "other_process", detail: error });
});

watch();
