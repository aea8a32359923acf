// Pieces that pictures and tables are made of.
"use strict";

const width = id => Math.max(240, at(id).clientWidth || 600);

function ticks(top, most) {
  const rough = top / most,
    power = 10 ** Math.floor(Math.log10(rough)),
    step = [1, 2, 5, 10].map(d => d * power).find(d => d >= rough);
  return Array.from({length: Math.floor(top / step + 1e-9) + 1}, (_, i) => i * step);
}

/** Where an axis ends: at the largest value, or at the floors where that leaves the values room. */
function reach(values, floors) {
  const most = Math.max(1, ...values),
    floor = Math.max(0, ...floors);
  return floor <= 2 * most ? Math.max(most, floor) : most;
}

function axis(top, x, height, w) {
  return ticks(top, w < 420 ? 4 : 7)
    .map(
      t =>
        `<line x1="${x(t)}" y1="0" x2="${x(t)}" y2="${height}" stroke="var(--grid)"/>` +
        `<text class="soft" x="${x(t)}" y="${height + 15}" ` +
        `text-anchor="middle">${number(t)}</text>`,
    )
    .join("");
}
const picture = (w, h, said, body) =>
  `<svg viewBox="0 0 ${w} ${h}" height="${h}" role="img" ` +
  `aria-label="${escape(said)}">${body}</svg>`;
const legend = entries =>
  `<div class="legend">` +
  entries
    .map(([colour, said]) => `<span><i style="background:${colour}"></i>${escape(said)}</span>`)
    .join("") +
  `</div>`;

function grid(head, rows, texts = 1) {
  return (
    `<div class="scroll"><table><thead><tr>` +
    head.map((h, i) => `<th${i < texts ? "" : ' class="n"'}>${escape(h)}</th>`).join("") +
    `</tr></thead><tbody>` +
    rows
      .map(
        row =>
          `<tr>` +
          row
            .map(
              (cell, i) =>
                `<td${i < texts ? "" : ' class="n"'}>` +
                `${cell && cell.html !== undefined ? cell.html : escape(cell ?? "")}</td>`,
            )
            .join("") +
          `</tr>`,
      )
      .join("") +
    `</tbody></table></div>`
  );
}
const within = (said, body) => `<details class="inner"><summary>${said}</summary>${body}</details>`;

function waiting(found, what) {
  if (found && found.problem) return '<p class="note">No prediction.</p>';
  const p = found && found.progress;
  return (
    `<p class="note">` +
    escape(p ? `${what}: ${p.what}, ${p.done} of ${p.of}` : `${what}…`) +
    `</p>` +
    (p && p.of > 1
      ? `<progress value="${p.done}" max="${p.of}" aria-label="${escape(p.what)}"></progress>`
      : "")
  );
}
const data = () => state.cases.map((one, n) => ({n, one, ...(state.data.get(key(one)) || {})}));
const looked = () => data()[state.look] || data()[0];

/** What somebody has opened stays open when its contents change. */
function keep(id, html) {
  const was = at(id).querySelector("details");
  return was && was.open ? html.replace("<details", "<details open") : html;
}
