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
      at("settings").open = true;
      return;
    }
    state.facts = await answer.json();
    const f = state.facts;
    at("model").textContent = `${f.model} on ${f.node}, context ${f.context.toLocaleString("en")}`;
    at("health").textContent =
      f.running + f.waiting ? `${f.running} running, ${f.waiting} waiting` : "";
    at("system").disabled = !f.chat;
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
      // whoever sent it
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
