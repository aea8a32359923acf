// From launches to the monokernel, and other engines.
"use strict";

function renderLadder() {
  const c = looked(),
    rungs = c.ladder && c.ladder.rungs;
  if (!rungs) {
    at("ladder").innerHTML = waiting(c, "simulating");
    return;
  }
  if (!rungs.length) {
    at("ladder").innerHTML =
      `<p class="note">${escape(c.ladder.problem || "no ladder for this case")}</p>`;
    return;
  }
  const w = width("ladder"),
    top = 1.02 * Math.max(...rungs.map(r => r[1])),
    h = 40 * rungs.length;
  const x = v => 8 + ((w - 104) * v) / top;
  let body = axis(top, x, h, w),
    before = 0;
  rungs.forEach(([name, speed, us], n) => {
    const y = 40 * n,
      low = Math.min(before, speed),
      gain = speed >= before;
    body +=
      `<text x="8" y="${y + 13}">${escape(name)}</text>` +
      `<rect x="${x(low)}" y="${y + 18}" ` +
      `width="${Math.max(1, x(Math.max(before, speed)) - x(low))}" height="14" ` +
      `rx="2" fill="${n ? (gain ? COLOURS[c.n] : "var(--alarm)") : "var(--other)"}">` +
      `<title>${number(us)} us a token</title></rect>`;
    if (n)
      body +=
        `<line x1="${x(before)}" x2="${x(before)}" y1="${y - 8}" y2="${y + 32}" ` +
        `stroke="var(--soft)" stroke-dasharray="2 2"/>`;
    body +=
      `<text x="${x(Math.max(before, speed)) + 6}" y="${y + 29}">${number(speed)}` +
      (n ? ` (${gain ? "+" : ""}${(100 * (speed / before - 1)).toFixed(0)} %)` : "") +
      `</text>`;
    before = speed;
  });
  at("ladder").innerHTML = picture(
    w,
    h + 20,
    `tokens per second, step by step: ` + rungs.map(r => `${r[0]} ${number(r[1])}`).join(", "),
    body,
  );
}

function renderCost() {
  const c = looked(),
    b = c.engines;
  if (!b) {
    at("cost").innerHTML = waiting(c, "simulating");
    return;
  }
  const ends = e => (e.low === null ? "" : `${number(e.low)} – ${number(e.high)}`);
  const i = c.interval,
    rows = b.engines.map((e, n) => [
      e.engine,
      number(e.tokens_per_s),
      n || !i ? ends(e) : `${number(i.low)} – ${number(i.high)}`,
      time(e.prompt_s),
      number(e.kwh_per_million),
      number(e.usd_per_million),
    ]);
  const rests = Object.entries(b.rests_on).map(
    ([name, r]) =>
      `${name}: ` +
      (name === "price" ? `${number(r.value / 100)} USD an hour and GPU` : `${number(r.value)} W`) +
      ` (${r.kind}, ${r.source})`,
  );
  at("cost").innerHTML =
    grid(["engine", "tokens/s", "p10 – p90", "prompt", "kWh/M", "USD/M"], rows) +
    (`<p class="note">Prompt of ${b.prompt} tokens; ` +
      `energy and price of a million tokens.</p>`) +
    keep(
      "cost",
      within(
        "what these rest on",
        [
          ...rests,
          ...(b.rests_on.price ? [] : ["no price on file: give one"]),
          ...(b.said ? [b.said] : []),
          ...b.missing,
        ]
          .map(line => `<p class="note">${escape(line)}</p>`)
          .join(""),
      ),
    );
}
