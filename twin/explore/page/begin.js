// The first view; the browser's back and its width.
"use strict";

let shown = 0;
new ResizeObserver(() => {
  if (state.cases.length && shown !== at("show").clientWidth) {
    shown = at("show").clientWidth;
    render();
  }
}).observe(at("show"));

addEventListener("popstate", () => {
  read(location.search);
  go(false);
});

/** An address that says nothing that can be simulated: why, and the forms to choose anew. */
function refused(message) {
  at("wrong").hidden = false;
  at("wrong").textContent = message;
  read("");
  for (const one of state.cases) state.data.set(key(one), {problem: {message}, refused: true});
  editor();
  render();
  names();
  fetchReports();
}

async function begin() {
  if (innerWidth <= 860) at("choose").open = false;
  try {
    state.choices = await (await fetch("choices")).json();
  } catch {
    at("wrong").hidden = false;
    at("wrong").textContent = "the server does not answer; is it still running?";
    return;
  }
  if (location.search) {
    const looks = await fetch(`commands${location.search}`);
    if (!looks.ok) return refused(await problem(looks));
  }
  read(location.search);
  if (!location.search) history.replaceState(null, "", `?${query()}`);
  go(false);
  names();
  fetchReports();
}

begin();
