// What a view is, its address, and how numbers are said.
"use strict";

const at = id => document.getElementById(id);
const LETTERS = ["A", "B", "C", "D"],
  COLOURS = ["var(--a)", "var(--b)", "var(--c)", "var(--d)"];
const CAUSES = [
  "streaming",
  "hand_off",
  "collective",
  "consumer",
  "attention",
  "routing",
  "launch",
  "sampling",
  "other",
];
const FIRST = "case=llama-3.1-8b+1xh200-sxm";
const state = {
  choices: null,
  cases: [],
  sweeps: [
    ["", ""],
    ["", ""],
  ],
  usd: "",
  look: 0,
  data: new Map(),
  running: new Map(),
  sweep: null,
  stages: null,
  pareto: null,
};
const escape = text => String(text).replace(/[&<>"']/g, c => `&#${c.charCodeAt(0)};`);
const spoken = cause => cause.replace(/_/g, "-");
const number = (x, digits = 3) =>
  x === null || x === undefined
    ? ""
    : Math.abs(x) >= 100
      ? Math.round(x).toLocaleString("en")
      : String(Number(x.toPrecision(digits)));
const percent = x => `${(100 * x).toFixed(1)} %`;
const time = s =>
  s === null || s === undefined
    ? ""
    : s < 1e-3
      ? `${number(s * 1e6)} us`
      : s < 1
        ? `${number(s * 1e3)} ms`
        : `${number(s)} s`;

// ---- a view and its address ---------------------------------------------------------------------

function read(search) {
  const query = new URLSearchParams(search || FIRST);
  const cases = query
    .getAll("case")
    .slice(0, 4)
    .map(text => {
      const [model = "", node = "", ...sets] = text.trim().split(/\s+/);
      return {model, node: known(node), sets};
    });
  state.cases = cases.length ? cases : [{model: "llama-3.1-8b", node: "1xh200-sxm", sets: []}];
  const sweeps = query.getAll("sweep").map(text => {
    const cut = text.indexOf("=");
    return [text.slice(0, cut), text.slice(cut + 1)];
  });
  state.sweeps = [sweeps[0] || ["", ""], sweeps[1] || ["", ""]];
  state.usd = query.get("usd") || "";
  state.look = 0;
}

/** A node's whole name: 1xh200 is 1xh200-sxm. */
function known(node) {
  const cut = node.indexOf("x"),
    gpus = node.slice(0, cut),
    short = node.slice(cut + 1);
  const found =
    Object.keys(state.choices.devices).find(name => name === short) ||
    Object.keys(state.choices.devices).find(name => name.startsWith(short + "-"));
  return (found && state.choices.devices[found].nodes[gpus]) || node;
}
const text = one => [one.model, one.node, ...one.sets].join(" ");

function query(cases = state.cases, sweeps = state.sweeps) {
  const made = new URLSearchParams();
  for (const one of cases) made.append("case", text(one));
  for (const [name, values] of sweeps)
    if (name && values) made.append("sweep", `${name}=${values}`);
  if (state.usd) made.append("usd", state.usd);
  return made.toString();
}
const key = one => query([one], []);
