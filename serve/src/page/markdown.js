// Renderer for Markdown (CommonMark and GitHub's tables) as models write it. Text only becomes text
// nodes, pictures become links, and no URL is fetched before the user follows its link.

const FENCE = /^ {0,3}(`{3,}|~{3,})(.*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:( +)(.*)|$)/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const DELIMITERS = /^ *\|? *:?-+:? *(?:\| *:?-+:? *)*\|? *$/;

/** Returns the kind of a list: "1" if numbered, else the bullet. Another kind starts a new list. */
const sort = ([, , mark]) => (/\d/.test(mark) ? "1" : mark);

const isBlank = (line) => !line.trim();

/** Whether a line starts a block that ends a paragraph. */
const begins = (line) => FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);

/**
 * Splits a text into blocks, in order, each with its kind and source. Appending to the text changes
 * only its last blocks.
 */
export function blocks(text) {
  const lines = text.split("\n");
  const found = [];
  let at = 0;
  const take = (kind, holds) => {
    const from = at;
    for (at += 1; at < lines.length && holds(lines[at], at); at += 1);
    found.push({ kind, source: lines.slice(from, at).join("\n") });
  };
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    if (isBlank(line)) at += 1;
    else if (fence && !(fence[1][0] === "`" && fence[2].includes("`"))) {
      let isOpen = true;
      take("code", (next) => {
        if (!isOpen) return false;
        const end = FENCE.exec(next);
        isOpen = !(end?.[1].startsWith(fence[1]) && !end[2].trim());
        return true;
      });
    } else if (HEADING.test(line)) take("heading", () => false);
    else if (RULE.test(line)) take("rule", () => false);
    else if (QUOTE.test(line)) take("quote", (next) => QUOTE.test(next));
    else if (ITEM.test(line)) {
      const first = ITEM.exec(line);
      const isOther = (next) => {
        const item = ITEM.exec(next);
        return item && item[1].length < first[1].length + 2 && sort(item) !== sort(first);
      };
      // After a blank line, a list continues with another item or with more of its last item.
      take("list", (next, place) => {
        const after = isBlank(next) ? lines[place + 1] : next;
        return after != null && !isBlank(after) && !isOther(after) && (ITEM.test(after) || /^ {2,}/.test(after) || (!isBlank(next) && !begins(next)));
      });
    } else if (line.includes("|") && DELIMITERS.test(lines[at + 1] ?? "x")) take("table", (next) => next.includes("|"));
    else take("text", (next) => !isBlank(next) && !begins(next));
  }
  return found;
}

function make(tag, text = "") {
  const node = document.createElement(tag);
  if (text) node.textContent = text;
  return node;
}

export function element({ kind, source }) {
  switch (kind) {
    case "code": return code(source);
    case "heading": {
      const [, marks, text] = HEADING.exec(source);
      return inline(make(`h${Math.min(marks.length + 2, 6)}`), text);
    }
    case "rule": return make("hr");
    case "quote": return filled(make("blockquote"), source.replace(/^ {0,3}> ?/gm, ""));
    case "list": return list(source.split("\n"));
    case "table": return table(source.split("\n"));
    default: return inline(make("p"), source);
  }
}

/** Appends all blocks of a text to an element. */
function filled(node, text) {
  node.append(...blocks(text).map(element));
  return node;
}

function code(source) {
  const lines = source.split("\n");
  const mark = FENCE.exec(lines.shift())[1];
  if (FENCE.exec(lines.at(-1) ?? "")?.[1].startsWith(mark)) lines.pop();
  return make("pre", lines.join("\n"));
}

function list(lines) {
  const first = ITEM.exec(lines[0]);
  const node = make(/\d/.test(first[2]) ? "ol" : "ul");
  if (node.tagName === "OL") node.start = parseInt(first[2], 10);
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length < first[1].length + 2) items.push([item[4] ?? ""]);
    // The line continues the last item: another line of its text, or a nested block.
    else items.at(-1).push(line.replace(/^ {1,4}/, ""));
  }
  for (const item of items) {
    const within = blocks(item.join("\n"));
    const place = node.appendChild(make("li"));
    // Text at the start of an item needs no separate paragraph.
    if (within[0]?.kind === "text") inline(place, within.shift().source);
    place.append(...within.map(element));
  }
  return node;
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function table([head, delimiters, ...rows]) {
  const sides = cells(delimiters).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : ""));
  const row = (tag, line) => {
    const node = make("tr");
    cells(line).slice(0, sides.length).forEach((text, column) => {
      const cell = node.appendChild(inline(make(tag), text));
      if (sides[column]) cell.classList.add(sides[column]);
    });
    return node;
  };
  const [node, top, body] = [make("table"), make("thead"), make("tbody")];
  top.append(row("th", head));
  body.append(...rows.map((line) => row("td", line)));
  node.append(top, body);
  return node;
}

const INLINE = new RegExp([
  /(?<ticks>`+)(?!`)(?<code>.*?[^`])\k<ticks>(?!`)/,
  /\*\*(?=\S)(?<strong>.+?\S|\S)\*\*/,
  /(?<![*\w])\*(?=[^\s*])(?<em>[^*]*[^\s*])\*(?!\*)/,
  /(?<![_\w])_(?=[^\s_])(?<under>[^_]*[^\s_])_(?![_\w])/,
  /~~(?=\S)(?<gone>.+?)~~/,
  /!?\[(?<label>[^\]]*)\]\(\s*<?(?<target>[^\s<>)]+)>?(?:\s+"[^"]*")?\s*\)/,
  /(?<bare>https?:\/\/[^\s<>()[\]`*]*[^\s<>()[\]`*.,;:!?'"])/,
  /\\(?<escaped>[\\`*_{}[\]()#+\-.!~|>])/,
].map(({ source }) => source).join("|"), "s");

/** Longer paragraphs are shown as plain text: they are not prose, and matching could take long. */
const INLINE_MAX = 20000;

/** Appends the text of a paragraph to an element, with inline formatting. */
function inline(node, text) {
  if (text.length > INLINE_MAX) {
    node.append(text);
    return node;
  }
  let rest = text;
  for (let found; (found = INLINE.exec(rest)); rest = rest.slice(found.index + found[0].length)) {
    node.append(rest.slice(0, found.index));
    const { code, strong, em, under, gone, label, target, bare, escaped } = found.groups;
    if (code != null) node.append(make("code", code));
    else if (strong != null) node.append(inline(make("strong"), strong));
    else if (em != null || under != null) node.append(inline(make("em"), em ?? under));
    else if (gone != null) node.append(inline(make("s"), gone));
    else if (bare != null) node.append(link(bare, make("span", bare)));
    else if (target != null) node.append(link(target, inline(make("span"), label || target)));
    else node.append(escaped);
  }
  node.append(rest);
  return node;
}

/** Returns a link if its scheme is http, https or mailto, and otherwise only its text. */
function link(target, words) {
  if (!/^(https?:\/\/|mailto:)/i.test(target)) return words;
  const node = make("a");
  [node.href, node.target, node.rel] = [target, "_blank", "noreferrer noopener nofollow"];
  node.append(...words.childNodes);
  return node;
}

/** Redraws only the changed blocks of a text, so that a selection in earlier blocks is kept. */
export function draw(node, text) {
  const all = blocks(text);
  const drawn = (node.drawn ??= []);
  while (node.children.length > all.length) node.lastChild.remove();
  drawn.length = Math.min(drawn.length, all.length);
  all.forEach((block, place) => {
    if (drawn[place] === block.source) return;
    drawn[place] = block.source;
    const next = element(block);
    const old = node.children[place];
    if (old) old.replaceWith(next);
    else node.append(next);
  });
}
