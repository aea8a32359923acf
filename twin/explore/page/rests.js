// The numbers that a prediction rests on, and the tables as files.
"use strict";

function renderRests() {
  const c = looked();
  if (!c.rests) {
    at("rests").innerHTML = waiting(c, "simulating");
    return;
  }
  const soft = c.rests.numbers.filter(n => n[1] === "assumed" || n[1] === "unbound").length;
  const rows = c.rests.numbers
    .map(
      ([name, kind, v, span, source]) =>
        `<tr><td>${escape(name)}</td><td>` +
        `<span class="chip ${kind}">${kind}</span></td>` +
        `<td class="n">${escape(v)}</td><td class="n">${escape(span)}</td>` +
        `<td class="source">${escape(source)}</td></tr>`,
    )
    .join("");
  at("rests").innerHTML =
    `<p class="note">${soft} of these numbers are assumed or unbound: ` +
    `no measurement settles them, and the prediction is no better than they are.` +
    (c.interval ? ` The interval is from ${escape(c.interval.rests)}.` : "") +
    `</p>` +
    keep(
      "rests",
      within(
        `${c.rests.numbers.length} numbers with kind and source`,
        `<div class="scroll"><table><thead><tr><th>number</th><th>kind</th>` +
          `<th class="n">value</th><th class="n">range</th><th>source</th></tr></thead>` +
          `<tbody>${rows}</tbody></table></div>`,
      ),
    );
}

function renderLinks() {
  const tables = [
    "cases",
    "causes",
    "engines",
    "ladder",
    "numbers",
    ...(state.sweep ? ["sweep"] : []),
    "stages",
  ];
  at("csv").innerHTML = tables
    .map(name => `<a href="csv?table=${name}&amp;${escape(query())}" download>${name}.csv</a>`)
    .join("");
}
