"use strict";
const at = id => document.getElementById(id);
const state = {facts: null, history: [], stop: null, steps: [], from: 0};
const number = (x, digits = 3) =>
  x >= 100 ? Math.round(x).toLocaleString("en") : String(Number(x.toPrecision(digits)));
const time = ms => (ms < 1000 ? `${number(ms)} ms` : `${number(ms / 1000)} s`);
at("key").value = sessionStorage.getItem("key") || "";

function headers() {
  const key = at("key").value;
  return {"Content-Type": "application/json", ...(key ? {Authorization: `Bearer ${key}`} : {})};
}

// ---- what the server says of itself -------------------------------------------------------------

async function look() {
  try {
    const answer = await fetch("twin", {headers: headers()});
    if (answer.status === 401) {
      at("model").textContent = "needs a key: Settings, API key";
      document.querySelector("details").open = true;
      return;
    }
    state.facts = await answer.json();
    const f = state.facts;
    at("model").textContent = `${f.model} on ${f.node}, context ${f.context.toLocaleString("en")}`;
    at("health").textContent =
      f.running + f.waiting ? `${f.running} running, ${f.waiting} waiting` : "";
    if (f.greedy) {
      at("temperature").value = 0;
      for (const id of ["temperature", "top_p", "top_k", "min_p"]) at(id).disabled = true;
    }
    const e = f.twin.expected;
    at("predicted-key").hidden = !e;
    at("band").textContent = e && e.interval ? ", with its interval" : ", no interval on file";
    if (!e) at("predicted").textContent = f.twin.reason;
    const measured = f.twin.measured_tokens_per_s,
      predicted = f.twin.predicted_tokens_per_s;
    if (e && e.interval && measured && predicted && !state.stop) {
      // whoever asked
      warn(measured, predicted * e.interval[0], predicted * e.interval[1]);
    }
    draw();
  } catch {
    at("health").textContent = "the server does not answer";
  }
}
look();
setInterval(look, 4000);
at("key").addEventListener("change", () => {
  sessionStorage.setItem("key", at("key").value);
  look();
});

function expected(position) {
  const e = state.facts && state.facts.twin.expected;
  if (!e) return null;
  const [a, b] = e.tokens_per_s.map(x => 1 / x);
  const rate = 1 / (a + (b - a) * Math.min(1, position / e.positions[1]));
  return {rate, low: e.interval && rate * e.interval[0], high: e.interval && rate * e.interval[1]};
}

// ---- the line -----------------------------------------------------------------------------------

function draw() {
  const svg = at("line"),
    box = svg.getBoundingClientRect(),
    w = box.width,
    h = box.height;
  const left = 38,
    bottom = 16,
    steps = state.steps,
    n = Math.max(steps.length, 2);
  const here = i => expected(state.from + i);
  const ends = [here(0), here(n - 1)];
  // The middle of neighbours: one token alone says little, and hundreds fit no screen.
  const wide = Math.max(1, Math.round(steps.length / 60)),
    points = [];
  for (let i = 0; i < steps.length; i += wide) {
    const some = steps.slice(i, i + wide);
    points.push([i + some.length / 2, some.length / some.reduce((a, b) => a + b, 0)]);
  }
  const tops = [...points.map(p => p[1]), ...ends.filter(Boolean).map(e => e.high || e.rate)].sort(
    (a, b) => a - b,
  );
  const top = 1.15 * (tops[Math.floor(tops.length * 0.98)] || tops[tops.length - 1] || 1);
  const x = i => left + ((w - left - 4) * i) / n,
    y = v => (h - bottom) * (1 - Math.min(1, v / top)) + 2;
  let out = "";
  if (ends[0] && ends[0].low) {
    const [a, b] = ends;
    out +=
      `<path ` +
      `d="M${x(0)} ${y(a.high)}L${x(n)} ${y(b.high)}L${x(n)} ${y(b.low)}L${x(0)} ` +
      `${y(a.low)}Z" fill="var(--orange)" opacity=".18"/>`;
  }
  if (ends[0])
    out +=
      `<path d="M${x(0)} ${y(ends[0].rate)}L${x(n)} ${y(ends[1].rate)}" ` +
      `stroke="var(--orange)" stroke-width="2" stroke-dasharray="5 3" fill="none"/>`;
  if (points.length)
    out +=
      `<path d="M` +
      points.map(p => `${x(p[0])} ${y(p[1])}`).join("L") +
      `" stroke="var(--blue)" stroke-width="2" fill="none"/>`;
  out += `<text x="2" y="12">${number(top)}</text><text x="2" y="${h - bottom}">0</text>`;
  out +=
    `<text x="${left}" y="${h - 3}">1</text>` +
    `<text x="${w - 4}" y="${h - 3}" ` +
    `text-anchor="end">token ${steps.length || ""}</text>`;
  svg.setAttribute("viewBox", `0 0 ${w} ${h}`);
  svg.innerHTML = out;
}

new ResizeObserver(draw).observe(at("line"));

function judge(rate, middle) {
  const e = expected(middle);
  at("predicted").textContent = e ? `${number(e.rate)} tokens/s` : at("predicted").textContent;
  if (e && e.low) warn(rate, e.low, e.high);
}

function warn(rate, low, high) {
  const alarm = at("alarm"),
    parted = rate < low || rate > high;
  alarm.hidden = !parted;
  if (parted) {
    alarm.textContent =
      `Measured ${number(rate)} tokens/s, ` +
      `predicted ${number(low)} to ${number(high)}: ` +
      (rate < low
        ? "look for a throttled clock or a busy neighbour."
        : "the fit does not describe this machine.");
  }
}

// ---- a turn -------------------------------------------------------------------------------------

function turn(who, text, kind = who) {
  const made = document.createElement("div");
  made.className = `turn ${kind}`;
  const name = document.createElement("b");
  name.textContent = who;
  made.append(name, document.createTextNode(text));
  at("said").append(made);
  at("said").scrollTop = at("said").scrollHeight;
  return made.lastChild;
}

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
        {...shared, messages: state.history, ...(most ? {max_tokens: most} : {})},
      ];
}

function refused(error) {
  const full = error.code === "context_length_exceeded" && state.history.length > 1;
  return new Error(error.message + (full ? "; the button New forgets the conversation" : ""));
}

async function ask(text) {
  state.history.push({role: "user", content: text});
  turn("you", text, "user");
  const node = turn("model", ""),
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
    tokens = 0;
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
      node.data = said;
      if (down) at("said").scrollTop = at("said").scrollHeight;
    }
    if (chunk.timings) finish(chunk);
  };
  try {
    const [path, asked] = body(text);
    const answer = await fetch(path, {
      method: "POST",
      headers: headers(),
      body: JSON.stringify(asked),
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
      node.parentElement.remove();
      at("text").value ||= text;
    }
    if (error.name === "AbortError") turn("", "stopped", "note");
    else turn("", error.message, "note wrong");
  }
  if (said) state.history.push({role: "assistant", content: said});
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
  if (state.steps.length >= 16) judge(t.tokens_per_s, u.prompt_tokens + u.completion_tokens / 2);
}

// ---- keyboard -----------------------------------------------------------------------------------

function send() {
  const text = at("text").value.trim();
  if (!text || state.stop) return;
  at("text").value = "";
  ask(text);
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
  if (event.key === "Escape" && state.stop) state.stop.abort();
});

at("stop").addEventListener("click", () => state.stop && state.stop.abort());
at("fresh").addEventListener("click", () => {
  state.history = [];
  state.steps = [];
  at("said").replaceChildren();
  at("alarm").hidden = true;
  draw();
  at("text").focus();
});

at("text").focus();
