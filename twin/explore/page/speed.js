// Every part of the page, the cards, the speeds and where a token's time goes.
"use strict";

function render() {
  const all = data();
  at("cards").innerHTML = all.map(card).join("");
  for (const box of document.querySelectorAll("[data-tabs]")) {
    box.hidden = all.length < 2;
    box.innerHTML = all
      .map(
        ({n}) =>
          `<button type="button" style="--mine:${COLOURS[n]}" data-look="${n}" ` +
          `aria-pressed="${n === state.look}" ` +
          `aria-label="show case ${LETTERS[n]}">${LETTERS[n]}</button>`,
      )
      .join("");
  }
  renderSpeed(all);
  renderTime(all);
  renderLadder();
  renderCost();
  renderSweep();
  renderPareto();
  renderDiff(all);
  renderRests();
  renderLinks();
}

function card(c) {
  const s = c.speed || c.about,
    i = c.interval || (s && s.interval && {low: s.interval[0], high: s.interval[1]}),
    ours = c.engines && c.engines.engines[0];
  const head =
    `<h2>` +
    `<b style="color:${COLOURS[c.n]}">${LETTERS[c.n]}` +
    `</b> ${escape(s ? s.title : text(c.one))}` +
    (s && c.one.sets.length ? `, ${escape(c.one.sets.join(", "))}` : "") +
    `</h2>`;
  if (c.problem)
    return (
      `<div class="card" style="--mine:${COLOURS[c.n]}">${head}` +
      `<p class="wrong" role="alert" ` +
      `style="margin:.4rem 0 0">${escape(c.problem.message)}</p></div>`
    );
  if (!s)
    return (
      `<div class="card" style="--mine:${COLOURS[c.n]}">${head}<div class="big">… ` +
      `<small>tokens/s</small></div></div>`
    );
  const lines = [
    ["p10 – p90", i ? `${number(i.low)} – ${number(i.high)}` : c.progress ? "drawing…" : "–"],
    ...(s.measured
      ? [
          [
            `measured at ${number(s.measured.context)} positions`,
            `${number(s.measured.tokens_per_s)} tokens/s`,
          ],
        ]
      : []),
    ["a token", time(s.step_s)],
    ["floor", `${number(s.floor_tokens_per_s)} tokens/s`],
    ...(s.model_floor_tokens_per_s > s.floor_tokens_per_s * 1.02
      ? [["floor of the model", `${number(s.model_floor_tokens_per_s)} tokens/s`]]
      : []),
    ...(c.speed ? [["stream fraction", percent(s.stream_fraction)]] : []),
    ...(s.total_tokens_per_s > s.tokens_per_s * 1.001
      ? [["all sequences", `${number(s.total_tokens_per_s)} tokens/s`]]
      : []),
    ...(ours && ours.prompt_s ? [[`prompt of ${c.engines.prompt}`, time(ours.prompt_s)]] : []),
    ...(c.speed
      ? [
          [
            "a million tokens",
            ours && ours.usd_per_million !== null
              ? `${number(ours.usd_per_million)} USD`
              : "no price",
          ],
        ]
      : []),
    ["energy", ours && ours.kwh_per_million !== null ? `${number(ours.kwh_per_million)} kWh` : ""],
  ];
  return (
    `<div class="card" style="--mine:${COLOURS[c.n]}">${head}` +
    `<div class="big">${number(s.tokens_per_s)} ` +
    `<small>tokens/s, predicted</small></div>` +
    (c.speed ? "" : `<p class="note">${extended(s)}</p>`) +
    (s.plan ? `<p class="note">plan: ${escape(s.plan)}</p>` : "") +
    `<dl>` +
    lines
      .filter(l => l[1])
      .map(([a, b]) => `<dt>${escape(a)}</dt><dd>${escape(b)}</dd>`)
      .join("") +
    `</dl>` +
    (c.progress && c.progress.of > 1
      ? `<progress value="${c.progress.done}" max="${c.progress.of}" ` +
        `aria-label="${escape(c.progress.what)}"></progress>`
      : "") +
    `</div>`
  );
}

function extended(about) {
  const [few, more, all] = about.layers;
  return `about, from ${few} and ${more} of ${all} layers; all of them are being simulated`;
}

function renderSpeed(all) {
  const rows = [],
    before = new Set();
  for (const c of all) {
    const s = c.speed || c.about;
    if (!s) continue;
    const i = c.interval || (s.interval && {low: s.interval[0], high: s.interval[1]});
    rows.push({
      name: all.length > 1 ? `${LETTERS[c.n]}: MonoTwin` : "MonoTwin",
      value: s.tokens_per_s,
      low: i && i.low,
      high: i && i.high,
      floor: s.floor_tokens_per_s,
      colour: COLOURS[c.n],
    });
    const others = c.engines ? c.engines.engines.slice(1) : [],
      said = JSON.stringify(others);
    if (before.has(said)) continue; // another case has the same model and node
    before.add(said);
    for (const e of others)
      rows.push({
        name: e.engine.split(" ")[0],
        value: e.tokens_per_s,
        low: e.low,
        high: e.high,
        colour: "var(--other)",
      });
  }
  if (!rows.length) {
    at("speed").innerHTML = waiting(all[0], "simulating");
    return;
  }
  const w = width("speed"),
    names = 118,
    room = 16,
    top = 1.02 * reach(rows.flatMap(r => [r.value, r.high || 0]), rows.map(r => r.floor || 0));
  const x = v => names + ((w - names - room) * v) / top,
    h = 26 * rows.length + 4;
  let body = axis(top, x, h, w - names);
  rows.forEach((r, n) => {
    const y = 26 * n + 4;
    body +=
      `<text x="${names - 8}" y="${y + 13}" text-anchor="end">${escape(r.name)}</text>` +
      `<rect x="${x(0)}" y="${y}" width="${x(r.value) - x(0)}" height="18" rx="2" ` +
      `fill="${r.colour}"/>`;
    if (r.low)
      body +=
        `<path d="M${x(r.low)} ${y + 5}v8m0-4H${x(r.high)}m0-4v8" ` +
        `stroke="var(--back)" stroke-width="4" fill="none"/>` +
        `<path d="M${x(r.low)} ${y + 5}v8m0-4H${x(r.high)}m0-4v8" ` +
        `stroke="var(--ink)" stroke-width="1.5" fill="none"/>`;
    if (r.floor > top)
      body +=
        `<text class="soft" x="${w - room}" y="${y + 13}" text-anchor="end">` +
        `floor ${number(r.floor)} →</text>`;
    else if (r.floor)
      body +=
        `<line x1="${x(r.floor)}" x2="${x(r.floor)}" y1="${y - 2}" y2="${y + 20}" ` +
        `stroke="var(--ink)" stroke-width="2" stroke-dasharray="3 2"/>`;
    const end = Math.max(x(r.value), r.high ? x(r.high) : 0) + 6,
      inside = x(r.value) - x(0) > 50;
    body +=
      `<text x="${inside ? x(0) + 7 : end}" ` +
      `y="${y + 13}" ${inside ? 'style="fill:var(--back)" font-weight="650"' : ""}>` +
      `${number(r.value)}</text>`;
  });
  at("speed").innerHTML = picture(
    w,
    h + 20,
    `tokens per second: ` + rows.map(r => `${r.name} ${number(r.value)}`).join(", "),
    body,
  );
}

function renderTime(all) {
  const have = all.filter(c => c.speed);
  if (!have.length) {
    at("time").innerHTML = waiting(all[0], "simulating");
    return;
  }
  const w = width("time"),
    names = have.length > 1 ? 24 : 0,
    top = 1.02 * Math.max(...have.map(c => c.speed.step_s * 1e6)),
    h = 38 * have.length;
  const x = v => names + ((w - names - 16) * v) / top;
  let body = axis(top, x, h, w);
  have.forEach((c, n) => {
    let from = 0;
    if (names) body += `<text x="0" y="${38 * n + 22}" font-weight="650">${LETTERS[c.n]}</text>`;
    for (const cause of CAUSES) {
      const us = c.speed.causes[cause] || 0;
      if (!us) continue;
      body +=
        `<rect x="${x(from)}" y="${38 * n + 4}" ` +
        `width="${Math.max(0.5, x(from + us) - x(from))}" height="28" ` +
        `fill="var(--${cause})">` +
        `<title>${spoken(cause)}: ${number(us)} us, ` +
        `${percent((us * 1e-6) / c.speed.step_s)}</title></rect>`;
      from += us;
    }
  });
  body +=
    `<text class="soft" x="${w - 16}" y="${h + 32}" ` +
    `text-anchor="end">microseconds a token</text>`;
  const used = CAUSES.filter(cause => have.some(c => c.speed.causes[cause] > 0));
  const c = looked().speed ? looked() : have[0],
    kinds = Object.entries(c.speed.kinds);
  const table = grid(
    ["stages", ...used.map(spoken), "us", "share"],
    kinds.map(([kind, of]) => {
      const sum = Object.values(of).reduce((a, b) => a + b, 0);
      return [
        kind,
        ...used.map(cause => (of[cause] ? number(of[cause]) : "")),
        number(sum),
        percent((sum * 1e-6) / c.speed.step_s),
      ];
    }),
  );
  at("time").innerHTML =
    legend(used.map(cause => [`var(--${cause})`, spoken(cause)])) +
    picture(
      w,
      h + 38,
      have
        .map(
          c =>
            `${LETTERS[c.n]}: ` +
            used
              .map(
                cause =>
                  `${spoken(cause)} ` +
                  `${percent(((c.speed.causes[cause] || 0) * 1e-6) / c.speed.step_s)}`,
              )
              .join(", "),
        )
        .join("; "),
      body,
    ) +
    keep(
      "time",
      within(`by kind of stage${have.length > 1 ? `, case ${LETTERS[c.n]}` : ""}`, table),
    );
}
