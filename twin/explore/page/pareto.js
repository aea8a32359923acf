// Machines for case A that no other beats in speed, cost, energy and rounding.
"use strict";

const AGAINST = {
  usd: ["USD a million tokens", v => number(v)],
  kwh: ["kWh a million tokens", v => number(v)],
  rounding: ["rounding of weights", percent],
};
const FORMAT_COLOURS = ["var(--a)", "var(--b)", "var(--c)", "var(--d)"];

function renderPareto() {
  const p = state.pareto;
  at("pareto-button").hidden = Boolean(p && !p.problem);
  if (!p || (!p.found && !p.problem)) {
    at("pareto").innerHTML = p ? waiting(p, "machines") : "";
    return;
  }
  if (p.problem) {
    at("pareto").innerHTML = `<p class="wrong" role="alert">${escape(p.problem)}</p>`;
    return;
  }
  const {choices, left_out} = p.found,
    best = choices.filter(c => c.front).sort((a, b) => b.tokens_per_s - a.tokens_per_s),
    formats = [...new Set(choices.map(c => c.format))];
  const table = grid(
    ["node", "format", "tokens/s", ...Object.values(AGAINST).map(([said]) => said)],
    best.map(c => [
      c.node,
      c.format,
      number(c.tokens_per_s),
      ...Object.entries(AGAINST).map(([name, [, shown]]) => shown(c[name])),
    ]),
    2,
  );
  at("pareto").innerHTML =
    `<p class="note">${choices.length} machines with a price on file; ${left_out} have no plan ` +
    `or no room. Filled: none beats them in everything.</p>` +
    legend(formats.map((f, n) => [FORMAT_COLOURS[n % 4], f])) +
    `<div class="two"><div>${cloud(choices, formats, "usd")}</div>` +
    `<div>${cloud(choices, formats, "kwh")}</div></div>${table}`;
}

/** Every machine by its speed and what it costs, both by their logarithms. */
function cloud(choices, formats, against) {
  const [said, shown] = AGAINST[against],
    w = Math.max(240, Math.min(width("pareto") / (innerWidth > 1100 ? 2 : 1) - 20, 700)),
    h = 260,
    left = 52;
  const scale = (values, from, to) => {
    const low = Math.log(Math.min(...values)) - 0.1,
      high = Math.log(Math.max(...values)) + 0.1;
    return v => from + ((to - from) * (Math.log(v) - low)) / (high - low);
  };
  const speeds = choices.map(c => c.tokens_per_s),
    costs = choices.map(c => c[against]),
    x = scale(speeds, left, w - 8),
    y = scale(costs, h - 6, 6);
  const lines = [
    ...decades(speeds).map(
      v =>
        `<line x1="${x(v)}" x2="${x(v)}" y1="0" y2="${h}" stroke="var(--grid)"/>` +
        `<text class="soft" x="${x(v)}" y="${h + 15}" text-anchor="middle">${number(v)}</text>`,
    ),
    ...decades(costs).map(
      v =>
        `<line x1="${left}" x2="${w}" y1="${y(v)}" y2="${y(v)}" stroke="var(--grid)"/>` +
        `<text class="soft" x="${left - 6}" y="${y(v) + 4}" text-anchor="end">${number(v)}</text>`,
    ),
  ];
  const dots = [...choices]
    .sort((a, b) => a.front - b.front)
    .map(c => {
      const colour = FORMAT_COLOURS[formats.indexOf(c.format) % 4];
      return (
        `<circle cx="${x(c.tokens_per_s)}" cy="${y(c[against])}" r="${c.front ? 5 : 3.5}" ` +
        `fill="${c.front ? colour : "none"}" stroke="${colour}">` +
        `<title>${escape(c.node)}, ${escape(c.format)}: ${number(c.tokens_per_s)} tokens/s, ` +
        `${shown(c[against])} ${escape(said)}</title></circle>`
      );
    });
  const axes =
    `<text class="soft" x="${w}" y="${h + 32}" text-anchor="end">tokens/s</text>` +
    `<text class="soft" x="${left}" y="${h + 32}">up: ${escape(said)}</text>`;
  return picture(
    w,
    h + 38,
    `${said} over tokens per second, ${choices.length} machines`,
    lines.join("") + dots.join("") + axes,
  );
}

/** 1, 2 and 5 of each power of ten between the least and the most. */
function decades(values) {
  const low = Math.min(...values),
    high = Math.max(...values),
    found = [];
  for (let power = 10 ** Math.floor(Math.log10(low)); power <= high; power *= 10)
    for (const digit of [1, 2, 5])
      if (digit * power >= low && digit * power <= high) found.push(digit * power);
  return found;
}

function fetchPareto() {
  const wanted = query(state.cases.slice(0, 1), []);
  stop("pareto");
  follow("pareto", wanted, renderPareto);
  renderPareto();
}

at("pareto-button").addEventListener("click", fetchPareto);
