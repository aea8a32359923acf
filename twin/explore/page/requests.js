// What is requested from the server, and what of its answers is kept.
"use strict";

async function problem(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the server answered ${answer.status}`;
  }
}

/** Parts of an answer as they come; returns what went wrong, if anything. */
async function parts(path, signal, take) {
  for (;;) {
    const answer = await fetch(path, {signal});
    if (answer.status === 429) {
      await new Promise(done => setTimeout(done, 1000 * (answer.headers.get("retry-after") || 1)));
      continue;
    }
    if (!answer.ok) return problem(answer);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const {done, value} = await reader.read();
      if (done) return "";
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        if (!event.startsWith("data: {")) continue;
        const part = JSON.parse(event.slice(6));
        if (part.part === "failed") return part.error.message;
        take(part);
      }
    }
  }
}

function load(name, path, take) {
  const control = new AbortController();
  state.running.set(name, control);
  busy();
  return parts(path, control.signal, take)
    .catch(error =>
      error.name === "AbortError" ? null : "the server does not answer; is it still running?",
    )
    .then(wrong => {
      if (state.running.get(name) === control) state.running.delete(name);
      busy();
      return wrong;
    });
}

function stop(name) {
  const control = state.running.get(name);
  if (control) {
    state.running.delete(name);
    control.abort();
  }
}

function busy() {
  at("busy").textContent = state.running.size ? "simulating…" : "";
}

function fetchCases() {
  const wanted = new Set(state.cases.map(key));
  for (const name of [...state.running.keys()])
    if (name.startsWith("case ") && !wanted.has(name.slice(5))) {
      stop(name);
      state.data.delete(name.slice(5));
    }
  for (const name of wanted) {
    if (state.data.has(name) && !state.data.get(name).refused) continue;
    const found = {};
    state.data.set(name, found);
    load(`case ${name}`, `answer?${name}`, part => {
      if (part.part === "progress") found.progress = part;
      else {
        found[part.part] = part;
        found.progress = null;
      }
      render();
    }).then(wrong => {
      found.progress = null;
      if (wrong) found.problem = {message: wrong};
      if (wrong === null) state.data.delete(name);
      render();
    });
  }
  for (const name of [...state.data.keys()].slice(0, -24))
    if (!wanted.has(name)) state.data.delete(name);
}

function fetchSweep() {
  const wanted = state.sweeps.some(([name, values]) => name && values)
    ? query(state.cases.slice(0, 1))
    : "";
  if (state.sweep && state.sweep.wanted === wanted) return;
  stop("sweep");
  if (wanted) follow("sweep", wanted, renderSweep);
  else state.sweep = null;
}

// The parts of an answer as they come, in the state of that name.
function follow(name, wanted, render) {
  const mine = (state[name] = {wanted});
  load(name, `${name}?${wanted}`, part => {
    if (part.part === "progress") mine.progress = part;
    else mine.found = part;
    render();
  }).then(wrong => {
    mine.progress = null;
    if (wrong) mine.problem = wrong;
    render();
  });
}

function fetchStages() {
  const wanted = query(state.cases.slice(0, 2), []);
  stop("stages");
  follow("stages", wanted, renderStages);
  renderStages();
}

async function fetchCommands() {
  const wanted = query();
  const answer = await fetch(`commands?${wanted}`);
  if (wanted !== query()) return;
  at("wrong").hidden = answer.ok;
  if (!answer.ok) {
    at("wrong").textContent = await problem(answer);
    return;
  }
  const found = await answer.json();
  at("again").innerHTML = [location.href, ...found.commands]
    .map(
      (line, n) =>
        `<div class="line"><code>${escape(line)}</code>` +
        `<button type="button" class="small" data-copy="${escape(line)}" ` +
        `aria-label="copy ${n ? "command" : "address"}">copy</button></div>`,
    )
    .join("");
}

async function fetchReports() {
  const found = await (await fetch("reports")).json();
  at("reports").innerHTML = found.reports.length
    ? `<ul>` +
      found.reports
        .map(
          one =>
            `<li>` +
            `<a href="reports/${encodeURIComponent(one.name)}">${escape(one.title)}</a> ` +
            `<span class="note">${escape(one.name)}, ` +
            `${new Date(1000 * one.changed).toISOString().slice(0, 10)}</span></li>`,
        )
        .join("") +
      `</ul>`
    : `<p class="note">None in ${escape(found.folder)}; ` +
      `<code>twin project published-table</code> writes one.</p>`;
}

/** After a choice: the address, what is shown, what is requested. */
function go(remember = true) {
  const made = `?${query()}`;
  if (remember && made !== location.search) history.pushState(null, "", made);
  if (state.look >= state.cases.length) state.look = 0;
  state.stages = null;
  if (state.pareto && state.pareto.wanted !== query(state.cases.slice(0, 1), [])) {
    stop("pareto");
    state.pareto = null;
  }
  editor();
  fetchCases();
  fetchSweep();
  fetchCommands();
  render();
}
