"use strict";
// Markdown as nodes of the page. Every text becomes a text node and every name of an element stands
// here, so nothing that a model writes is taken for markup: it runs nothing and loads nothing.

const DEEPEST = 6; // quotes and lists within each other; what lies deeper is shown as it is written
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)[\s#]*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}>\s?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:\s+|$)/;
const COLUMNS = /^ *\|? *:?-+:? *(?:\| *:?-+:? *)*\|? *$/;
// Lengths have ends: a line of a hundred thousand signs is searched in time that grows with it.
const INLINE = new RegExp(
  [
    /\\([!-/:-@[-`{-~])/, // 1: a sign that is meant as itself
    /(`+)([^]{1,1000}?)(?<!`)\2(?!`)/, // 2, 3: code
    // 4, 5: title and address of a link or a picture, which is a link here
    /!?\[([^\][]{0,500})\]\(<?([^\s<>()]{1,1000}(?:\([^\s()]{0,200}\))?)>?(?: "[^"]{0,200}")?\)/,
    /(\*\*|__|~~)(?=\S)([^]{0,1000}?\S)\6/, // 6, 7: strong, or struck
    /\*(?=[^\s*])([^*]{0,1000}[^\s*])\*/, // 8: emphasis
    /(?<!\w)_(?=[^\s_])([^_]{0,1000}[^\s_])_(?!\w)/, // 9
    /<?(https?:\/\/[^\s<>"]{1,1000}[^\s<>"'.,;:!?)\]])>?/, // 10: an address
  ]
    .map(one => one.source)
    .join("|"),
  "g",
);

function element(name, ...children) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}

function link(text, address) {
  let made = null;
  try {
    made = new URL(address);
  } catch {
    return text;
  }
  if (!["http:", "https:", "mailto:"].includes(made.protocol)) return text;
  const found = element("a", text);
  Object.assign(found, {href: made.href, rel: "noopener noreferrer", target: "_blank"});
  return found;
}

function inline(text, depth = 0) {
  const made = document.createDocumentFragment();
  let from = 0;
  if (depth < DEEPEST) {
    for (const found of text.matchAll(INLINE)) {
      const [whole, sign, , code, title, address, mark, strong, star, low, bare] = found;
      made.append(text.slice(from, found.index));
      from = found.index + whole.length;
      const within = words => inline(words, depth + 1);
      if (sign) made.append(sign);
      else if (code) made.append(element("code", code.replace(/^ (.*\S.*) $/s, "$1")));
      else if (address) made.append(link(within(title || address), address));
      else if (strong) made.append(element(mark === "~~" ? "s" : "strong", within(strong)));
      else if (star || low) made.append(element("em", within(star || low)));
      else made.append(link(bare, bare));
    }
  }
  made.append(text.slice(from));
  return made;
}

function closes(line, mark) {
  return line.trim().startsWith(mark) && !line.trim().replaceAll(mark[0], "");
}

function fenced(lines, at, fence) {
  const mark = fence[1];
  let end = at + 1;
  while (end < lines.length && !closes(lines[end], mark)) end++;
  const code = lines.slice(at + 1, end).join("\n");
  const head = element("div", element("span", fence[2]), copier(() => code));
  const pre = element("pre", element("code", code));
  pre.tabIndex = 0; // so that a keyboard can scroll it
  const made = element("div", head, pre);
  made.className = "code";
  return [made, end + 1];
}

function cells(line) {
  return line
    .trim()
    .replace(/^\||(?<!\\)\|$/g, "")
    .split(/(?<!\\)\|/)
    .map(one => one.trim().replaceAll("\\|", "|"));
}

function table(lines, at) {
  const row = (line, name) =>
    element("tr", ...cells(line).map(one => element(name, inline(one))));
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|") && lines[end].trim()) end++;
  const body = lines.slice(at + 2, end).map(line => row(line, "td"));
  const made = element("table", element("thead", row(lines[at], "th")), element("tbody", ...body));
  return [made, end];
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end++;
  const within = lines.slice(at, end).map(line => line.replace(QUOTE, ""));
  return [element("blockquote", blocks(within, depth + 1)), end];
}

// An item goes on as long as lines are indented under it, or simply follow it.
function list(lines, at, depth) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const numbered = /\d/.test(mark);
  const made = element(numbered ? "ol" : "ul");
  if (numbered && parseInt(mark, 10) !== 1) made.start = parseInt(mark, 10);
  let end = at;
  for (;;) {
    const found = end < lines.length && ITEM.exec(lines[end]);
    const same = found && found[1].length <= indent.length + 1 && found[1].length >= indent.length;
    if (!same || /\d/.test(found[2]) !== numbered || RULE.test(lines[end])) break;
    const inner = [lines[end].slice(found[0].length)];
    const under = line => line.search(/\S/) > indent.length + 1;
    for (end++; end < lines.length; end++) {
      const line = lines[end];
      const blank = !line.trim();
      const goes = blank ? end + 1 < lines.length && under(lines[end + 1]) : under(line);
      if (!goes && (blank || begins(lines, end) || !lines[end - 1].trim())) break;
      inner.push(line.slice(Math.min(found[0].length, Math.max(0, line.search(/\S/)))));
    }
    made.append(element("li", blocks(inner, depth + 1, true)));
    while (end + 1 < lines.length && !lines[end].trim() && ITEM.test(lines[end + 1])) end++;
  }
  return [made, end];
}

function begins(lines, at) {
  const line = lines[at];
  const columns = line.includes("|") && at + 1 < lines.length && COLUMNS.test(lines[at + 1]);
  return columns || [FENCE, HEADING, RULE, QUOTE, ITEM].some(one => one.test(line));
}

function block(lines, at, depth, tight) {
  const line = lines[at];
  let found = null;
  if (depth < DEEPEST) {
    if ((found = FENCE.exec(line))) return fenced(lines, at, found);
    if ((found = HEADING.exec(line))) {
      return [element(`h${Math.min(6, found[1].length + 2)}`, inline(found[2])), at + 1];
    }
    if (RULE.test(line)) return [element("hr"), at + 1];
    if (QUOTE.test(line)) return quote(lines, at, depth);
    if (ITEM.test(line)) return list(lines, at, depth);
    if (begins(lines, at)) return table(lines, at);
  }
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !(depth < DEEPEST && begins(lines, end))) end++;
  const words = inline(lines.slice(at, end).join("\n"));
  return [tight ? element("span", words) : element("p", words), end];
}

function blocks(lines, depth = 0, tight = false) {
  const made = document.createDocumentFragment();
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) at++;
    else {
      const [node, end] = block(lines, at, depth, tight);
      made.append(node);
      at = end;
    }
  }
  return made;
}

const markdown = text => blocks(text.replaceAll("\t", "    ").split(/\r?\n/));

// Where the last block begins: what stands before it changes no more while the text grows.
function lastBlock(text) {
  const lines = text.split("\n");
  let fence = null,
    begin = 0,
    from = 0;
  for (let at = 0; at + 2 < lines.length; at++) {
    const line = lines[at],
      next = lines[at + 1], // whole, because there is one more
      found = FENCE.exec(line);
    if (found && !fence) fence = found[1];
    else if (fence && closes(line, fence)) fence = null;
    from += line.length + 1;
    // an item or an indented line may belong to the list before it
    if (!fence && !line.trim() && /^\S/.test(next) && !ITEM.test(next)) begin = from;
  }
  return begin;
}

// Text that grows: only its last block is made again, and no oftener than takes a quarter of the
// time, because the browser may share its cores with the engine.
class Growing {
  constructor(node) {
    this.node = node;
    this.tail = node.appendChild(element("div"));
    this.text = "";
    this.fixed = 0;
    this.timer = null;
  }
  write(text) {
    this.text = text;
    this.timer ??= setTimeout(() => this.draw(), this.pause || 16);
  }
  draw() {
    const began = performance.now();
    clearTimeout(this.timer);
    this.timer = null;
    const cut = this.fixed + lastBlock(this.text.slice(this.fixed));
    this.tail.before(markdown(this.text.slice(this.fixed, cut)));
    this.fixed = cut;
    this.tail.replaceChildren(markdown(this.text.slice(cut)));
    this.pause = Math.max(16, 3 * (performance.now() - began));
  }
}
