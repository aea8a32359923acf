// Case A against case B.
"use strict";

const change = (a, b) =>
  Math.abs((a || 0) - (b || 0)) < 0.005 * (Math.abs(a || 0) < 10 ? 1 : Math.abs(a) / 10)
    ? "="
    : a && b !== undefined && b !== null
      ? {
          html:
            `<span class="${b > a * 1.0005 ? "slower" : b < a * 0.9995 ? "faster" : ""}">` +
            `${b >= a ? "+" : ""}${number(b - a)} (${b >= a ? "+" : ""}` +
            `${(100 * (b / a - 1)).toFixed(1)} %)</span>`,
        }
      : b
        ? {html: '<span class="slower">new</span>'}
        : "";

function renderDiff(all) {
  const two = all.slice(0, 2);
  at("diff-section").hidden = two.length < 2;
  if (two.length < 2) return;
  if (!two.every(c => c.speed)) {
    at("diff").innerHTML = waiting(
      two.find(c => !c.speed),
      "simulating",
    );
    return;
  }
  const [a, b] = two.map(c => c.speed),
    sum = of => Object.values(of || {}).reduce((x, y) => x + y, 0);
  const kinds = [...new Set([...Object.keys(a.kinds), ...Object.keys(b.kinds)])],
    causes = CAUSES.filter(c => a.causes[c] || b.causes[c]);
  const rows = [
    [
      "a token",
      number(a.step_s * 1e6),
      number(b.step_s * 1e6),
      change(a.step_s * 1e6, b.step_s * 1e6),
    ],
    ...causes.map(c => [
      `cause: ${spoken(c)}`,
      number(a.causes[c] || 0),
      number(b.causes[c] || 0),
      change(a.causes[c], b.causes[c]),
    ]),
    ...kinds.map(k => [
      `stages: ${k}`,
      number(sum(a.kinds[k])),
      number(sum(b.kinds[k])),
      change(sum(a.kinds[k]), sum(b.kinds[k])),
    ]),
  ];
  at("diff").innerHTML = grid(["microseconds", "A", "B", "B − A"], rows);
  renderStages();
}

function renderStages() {
  const s = state.stages;
  if (!s) {
    at("stages").innerHTML = "";
    return;
  }
  if (!s.found) {
    at("stages").innerHTML = s.problem
      ? `<p class="wrong" role="alert">${escape(s.problem)}</p>`
      : waiting(s, "stage by stage");
    return;
  }
  const far = one => Math.abs((one.us[1] ?? 0) - (one.us[0] ?? 0));
  const list = [...s.found.stages].sort((a, b) => far(b) - far(a)).slice(0, 40);
  at("stages").innerHTML =
    `<p class="note">The ${list.length} stages that differ most, ` +
    `of ${s.found.stages.length}; the CSV has all.</p>` +
    grid(
      ["stage", "A mostly", "B mostly", "A us", "B us", "B − A"],
      list.map(one => [
        one.name,
        spoken(one.mostly[0]),
        spoken(one.mostly[1]),
        number(one.us[0]),
        number(one.us[1]),
        change(one.us[0], one.us[1]),
      ]),
      3,
    );
}
