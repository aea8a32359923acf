// A sweep, as a line or a heat map.
"use strict";

function renderSweep() {
  const s = state.sweep;
  at("sweep-section").hidden = !s;
  if (!s) return;
  if (!s.found) {
    at("sweep").innerHTML = s.problem
      ? `<p class="wrong" role="alert">${escape(s.problem)}</p>`
      : waiting(s, "sweeping");
    return;
  }
  const {axes, cells} = s.found,
    w = Math.min(width("sweep"), 900),
    table = grid(
      [...axes.map(a => a.name), "tokens/s", "floor"],
      cells.map(c => [...c.at, c.problem || number(c.tokens_per_s), number(c.floor_tokens_per_s)]),
      axes.length,
    );
  at("sweep").innerHTML =
    (axes.length > 1 ? heat(axes, cells, w) : line(axes[0], cells, w)) +
    keep("sweep", within("as a table", table));
}

function line(axis_, cells, w) {
  const h = 230,
    left = 48,
    factors = cells.map(c => parseFloat(String(c.at[0]).replace(/^[x*]/, "")));
  const numeric = factors.every(v => v > 0),
    log = numeric && Math.max(...factors) / Math.min(...factors) >= 20,
    place = numeric ? factors.map(v => (log ? Math.log(v) : v)) : cells.map((_, n) => n);
  const low = Math.min(...place),
    high = Math.max(...place),
    floors = cells.map(c => c.floor_tokens_per_s || 0),
    top = 1.05 * reach(cells.map(c => c.tokens_per_s || 0), floors);
  const x = n => left + 14 + (w - left - 40) * (high > low ? (place[n] - low) / (high - low) : 0.5),
    y = v => h * (1 - v / top);
  let body = ticks(top, 5)
    .map(
      t =>
        `<line x1="${left}" x2="${w - 8}" y1="${y(t)}" y2="${y(t)}" ` +
        `stroke="var(--grid)"/>` +
        `<text class="soft" x="${left - 6}" y="${y(t) + 4}" ` +
        `text-anchor="end">${number(t)}</text>`,
    )
    .join("");
  const order = cells
    .map((_, n) => n)
    .filter(n => cells[n].tokens_per_s)
    .sort((a, b) => place[a] - place[b]);
  const path = of => order.map((n, i) => `${i ? "L" : "M"}${x(n)} ${y(of(cells[n]))}`).join("");
  body +=
    `<path d="${path(c => c.floor_tokens_per_s)}" fill="none" ` +
    `stroke="var(--soft)" stroke-dasharray="5 3"/>` +
    `<path d="${path(c => c.tokens_per_s)}" fill="none" stroke="var(--a)" ` +
    `stroke-width="2"/>`;
  let end = -1e9;
  for (const n of order) {
    body +=
      `<circle cx="${x(n)}" cy="${y(cells[n].tokens_per_s)}" r="4" fill="var(--a)">` +
      `<title>${escape(cells[n].at[0])}: ${number(cells[n].tokens_per_s)} tokens/s</title>` +
      `</circle>`;
    if (x(n) - end > 46) {
      body +=
        `<text class="soft" x="${x(n)}" y="${h + 16}" ` +
        `text-anchor="middle">${escape(cells[n].at[0])}</text>`;
      end = x(n);
    }
  }
  body +=
    `<text class="soft" x="${w / 2}" y="${h + 34}" ` +
    `text-anchor="middle">${escape(axis_.name)}</text>`;
  return (
    legend([
      ["var(--a)", "tokens/s"],
      ["var(--soft)", Math.max(...floors) > top ? "floor, above the picture in part" : "floor"],
    ]) +
    picture(
      w,
      h + 40,
      `tokens per second by ${axis_.name}: ` +
        cells.map(c => `${c.at[0]} ${number(c.tokens_per_s) || "not possible"}`).join(", "),
      body,
    )
  );
}

function heat(axes, cells, w) {
  const [rows, columns] = axes.map(a => a.values),
    speeds = cells.map(c => c.tokens_per_s).filter(Boolean),
    low = Math.min(...speeds),
    high = Math.max(...speeds);
  const left = 90,
    each = (w - left) / columns.length,
    tall = 36;
  let body = columns
    .map(
      (v, n) =>
        `<text class="soft" x="${left + each * (n + 0.5)}" y="14" ` +
        `text-anchor="middle">${escape(v)}</text>`,
    )
    .join("");
  rows.forEach((v, r) => {
    body +=
      `<text class="soft" x="${left - 8}" y="${24 + tall * r + 23}" ` +
      `text-anchor="end">${escape(v)}</text>`;
    columns.forEach((_, n) => {
      const c = cells[r * columns.length + n],
        share = c.tokens_per_s ? (high > low ? (c.tokens_per_s - low) / (high - low) : 1) : 0;
      const colour = c.tokens_per_s
        ? `rgb(${Math.round(222 - 211 * share)},${Math.round(235 - 137 * share)},` +
          `${Math.round(247 - 51 * share)})`
        : "var(--chip)";
      body +=
        `<rect x="${left + each * n + 1}" y="${24 + tall * r + 1}" ` +
        `width="${each - 2}" height="${tall - 2}" rx="2" fill="${colour}">` +
        `<title>${escape(axes[0].name)} ${escape(v)}, ` +
        `${escape(axes[1].name)} ${escape(columns[n])}: ` +
        (c.tokens_per_s ? `${number(c.tokens_per_s)} tokens/s` : escape(c.problem)) +
        `</title></rect>` +
        (`<text x="${left + each * (n + 0.5)}" y="${24 + tall * r + 23}" ` +
          `text-anchor="middle" style="fill:` +
          `${c.tokens_per_s ? (share > 0.5 ? "#fff" : "#14171b") : "var(--soft)"}">` +
          `${c.tokens_per_s ? number(c.tokens_per_s) : "–"}</text>`);
    });
  });
  const h = 24 + tall * rows.length;
  return (
    `<p class="note">Tokens per second, ` +
    `${number(low)} (light) to ${number(high)} (dark). Down: ` +
    `${escape(axes[0].name)}; across: ${escape(axes[1].name)}.</p>` +
    picture(
      w,
      h + 4,
      `tokens per second over ${axes[0].name} and ${axes[1].name}, ` +
        `${number(low)} to ${number(high)}`,
      body,
    )
  );
}
