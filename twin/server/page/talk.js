"use strict";
// The conversation: turns and what can be done with them, one answer at a time, and those before.

const PAST = "conversations"; // in this browser's storage
const MOST_PAST = 50;
const fresh = () => ({id: Date.now(), history: [], edit: null});
Object.assign(state, fresh());

function button(name, act, title = "") {
  const made = element("button", name);
  Object.assign(made, {type: "button", className: "small", title});
  made.addEventListener("click", act);
  return made;
}

function copier(text) {
  const made = button("Copy", async () => {
    try {
      await navigator.clipboard.writeText(text());
      made.textContent = "Copied";
    } catch {
      made.textContent = "Not allowed"; // by a page that came over a network without TLS
    }
    setTimeout(() => (made.textContent = "Copy"), 1500);
  });
  return made;
}

// ---- turns --------------------------------------------------------------------------------------

function turn(who, kind, place = -1, ...acts) {
  const name = element("b", who),
    words = element("div"),
    made = element("div", name, words);
  made.className = `turn ${kind}`;
  made.dataset.place = place; // in the history
  if (acts.length) made.append(Object.assign(element("div", ...acts), {className: "acts"}));
  at("said").append(made);
  at("said").scrollTop = at("said").scrollHeight;
  return words;
}

function note(text, kind = "note") {
  turn("", kind).textContent = text;
}

function question(text, place) {
  const acts = [copier(() => text), button("Edit", () => edit(place))];
  turn("you", "user", place, ...acts).textContent = text;
}

function answerAt(place) {
  const words = () => (state.history[place] || {content: ""}).content;
  const again = button("Again", () => regenerate(place), "What follows is forgotten");
  return turn("model", "answer", place, copier(words), again);
}

function write(node, text) {
  const formatted = !state.facts || state.facts.chat; // what only goes on is no markdown
  node.classList.toggle("markdown", formatted);
  return formatted ? new Growing(node) : {write: t => (node.textContent = t), draw() {}};
}

function showEnd(node, text) {
  node.parentElement.dataset.ended = text;
}

function show() {
  at("said").replaceChildren();
  state.history.forEach((one, place) => {
    if (one.role === "user") return question(one.content, place);
    const node = answerAt(place),
      text = write(node);
    text.write(one.content);
    text.draw();
    showEnd(node, one.ended || "");
  });
}

function edit(place) {
  if (state.stop) return;
  state.edit = place;
  at("text").value = state.history[place].content;
  at("text").focus();
  for (const one of at("said").children) {
    one.classList.toggle("replaced", Number(one.dataset.place) >= place);
  }
}

function unedit() {
  state.edit = null;
  at("text").value = "";
  for (const one of at("said").children) one.classList.remove("replaced");
}

function regenerate(place) {
  if (state.stop) return;
  state.history.length = place;
  show();
  answer();
}

// ---- an answer ----------------------------------------------------------------------------------

function body(text) {
  const number = id => (at(id).value === "" ? undefined : Number(at(id).value));
  const shared = {
    stream: true,
    stream_options: {include_usage: true},
    step_times: true,
    temperature: number("temperature"),
    top_p: number("top_p"),
    top_k: number("top_k"),
    min_p: number("min_p"),
    seed: number("seed"),
  };
  const most = number("most");
  return state.facts && !state.facts.chat
    ? ["v1/completions", {...shared, prompt: text, max_tokens: most || 64}]
    : [
        "v1/chat/completions",
        {...shared, messages: messages(), ...(most ? {max_tokens: most} : {})},
      ];
}

function messages() {
  const system = at("system").value.trim();
  const turns = state.history.map(({role, content}) => ({role, content}));
  return system ? [{role: "system", content: system}, ...turns] : turns;
}

function refused(error) {
  const full = error.code === "context_length_exceeded" && state.history.length > 1;
  return new Error(error.message + (full ? "; the button New forgets the conversation" : ""));
}

async function answer() {
  const typed = state.history.at(-1).content,
    place = state.history.length,
    node = answerAt(place),
    shown = write(node),
    began = performance.now(),
    marks = [];
  const control = (state.stop = new AbortController());
  at("send").disabled = true;
  at("stop").hidden = false;
  at("fresh").disabled = true;
  at("alarm").hidden = true;
  state.steps = [];
  state.from = 0;
  for (const id of ["first", "tokens", "prompt", "kept", "queue"]) at(id).textContent = "–";
  let said = "",
    tokens = 0,
    ended = "";
  const take = chunk => {
    if (chunk.error) throw new Error(chunk.error.message);
    const choice = chunk.choices[0],
      now = performance.now();
    if (choice) {
      const piece = choice.text ?? choice.delta.content ?? "";
      if (chunk.tokens && !choice.finish_reason) {
        if (!marks.length) at("first").textContent = time(now - began);
        tokens += chunk.tokens;
        marks.push([now, tokens]);
        const from = marks.find(m => now - m[0] < 1000);
        if (now - from[0] > 20) {
          const rate = ((tokens - from[1]) / (now - from[0])) * 1000;
          at("rate").firstChild.data = number(rate) + " ";
          const last = marks[marks.length - 2],
            each = (now - last[0]) / 1000 / chunk.tokens;
          for (let i = 0; i < chunk.tokens; i++) state.steps.push(each);
          draw();
        }
        at("tokens").textContent = tokens;
      }
      const down = at("said").scrollHeight - at("said").scrollTop - at("said").clientHeight < 60;
      said += piece;
      shown.write(said);
      if (down) at("said").scrollTop = at("said").scrollHeight;
    }
    if (chunk.timings) ended = finish(chunk);
  };
  try {
    const [path, request] = body(typed);
    const answer = await fetch(path, {
      method: "POST",
      headers: headers(),
      body: JSON.stringify(request),
      signal: control.signal,
    });
    if (!answer.ok) throw refused((await answer.json()).error);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const {done, value} = await reader.read();
      if (done) break;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (part.startsWith("data: ") && part !== "data: [DONE]") take(JSON.parse(part.slice(6)));
      }
    }
  } catch (error) {
    if (!said) {
      // nothing is kept of the turn; its text may be changed and sent again
      state.history.pop();
      node.parentElement.previousElementSibling.querySelector(".acts").remove();
      node.parentElement.remove();
      at("text").value ||= typed;
    }
    if (error.name === "AbortError") note("stopped");
    else note(error.message, "note wrong");
  }
  shown.draw();
  if (said) {
    state.history.push({role: "assistant", content: said, ended});
    showEnd(node, ended);
    keep();
  }
  state.stop = null;
  at("send").disabled = false;
  at("stop").hidden = true;
  at("fresh").disabled = false;
  at("text").focus();
  look();
}

function finish(chunk) {
  const t = chunk.timings,
    u = chunk.usage;
  if (t.tokens_per_s) at("rate").firstChild.data = number(t.tokens_per_s) + " ";
  at("first").textContent = time(t.first_token_ms);
  at("tokens").textContent = u.completion_tokens;
  at("prompt").textContent =
    `${u.prompt_tokens} tokens` + (t.prompt_ms ? `, ${time(t.prompt_ms)}` : "");
  at("kept").textContent = t.kept_tokens
    ? `${t.kept_tokens} tokens` + (t.saved_ms ? `, about ${time(t.saved_ms)} saved` : "")
    : "none";
  at("queue").textContent = time(t.queue_ms);
  state.from = u.prompt_tokens;
  state.steps = (t.step_us[0] || []).slice(1).map(us => Math.max(us, 1) / 1e6);
  draw();
  const middle = u.prompt_tokens + u.completion_tokens / 2,
    twin = expected(middle);
  if (state.steps.length >= 16) judge(t.tokens_per_s, middle);
  return t.tokens_per_s
    ? `${u.completion_tokens} tokens, ${number(t.tokens_per_s)} tokens/s measured` +
        (twin ? `, ${number(twin.rate)} predicted` : "")
    : "";
}

// ---- conversations before -----------------------------------------------------------------------

function past() {
  try {
    const found = JSON.parse(localStorage.getItem(PAST));
    return Array.isArray(found) ? found : [];
  } catch {
    return [];
  }
}

function store(all) {
  for (; ; all.pop()) {
    try {
      localStorage.setItem(PAST, JSON.stringify(all)); // full: without the oldest
      break;
    } catch {
      if (!all.length) break; // there is no storage
    }
  }
  listPast();
}

function keep() {
  const {id, history} = state,
    one = {id, history, system: at("system").value};
  store([one, ...past().filter(other => other.id !== id)].slice(0, MOST_PAST));
}

function listPast() {
  const rows = past().map(one => {
    const title = one.history[0].content.slice(0, 60);
    const open = button(title, () => reopen(one));
    open.ariaCurrent = one.id === state.id;
    const forget = button("×", () => store(past().filter(other => other.id !== one.id)));
    forget.ariaLabel = `Forget ${title}`;
    return element("li", open, forget);
  });
  at("past").replaceChildren(...rows);
  at("past-count").textContent = rows.length || "none";
}

function reopen(one) {
  if (state.stop) return;
  begin({id: one.id, history: one.history, edit: null});
  at("system").value = one.system;
}

function begin(talk) {
  Object.assign(state, talk, {steps: []});
  show();
  at("alarm").hidden = true;
  draw();
  listPast();
  at("text").focus();
}

// ---- keyboard -----------------------------------------------------------------------------------

function send() {
  const text = at("text").value.trim();
  if (!text || state.stop) return;
  if (state.edit !== null) {
    state.history.length = state.edit;
    unedit();
    show();
  }
  at("text").value = "";
  question(text, state.history.length);
  state.history.push({role: "user", content: text});
  answer();
}

at("form").addEventListener("submit", event => {
  event.preventDefault();
  send();
});

at("text").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});

document.addEventListener("keydown", event => {
  if (event.key !== "Escape") return;
  if (state.stop) state.stop.abort();
  else if (state.edit !== null) unedit();
});

at("stop").addEventListener("click", () => state.stop && state.stop.abort());
at("fresh").addEventListener("click", () => begin(fresh()));

listPast();
at("text").focus();
