// The forms: each choice changes the view.
"use strict";

const options = (list, chosen) =>
  list
    .map(
      ([value, said]) =>
        `<option value="${escape(value)}"${value === chosen ? " selected" : ""}>` +
        `${escape(said)}</option>`,
    )
    .join("");

function withOwn(list, chosen) {
  return list.some(([value]) => value === chosen) || !chosen ? list : [...list, [chosen, chosen]];
}

function split(node) {
  for (const [device, {nodes}] of Object.entries(state.choices.devices))
    for (const [gpus, name] of Object.entries(nodes)) if (name === node) return [device, gpus];
  return [node, ""];
}
const value = (one, name) =>
  (one.sets.find(set => set.startsWith(`${name}=`)) || "").slice(name.length + 1);

function editor() {
  const c = state.choices,
    active = document.activeElement && document.activeElement.id;
  const models = c.models.map(m => [m.name, `${m.name} (${m.gb} GB)`]);
  const devices = Object.entries(c.devices).map(([name, d]) => [name, d.title]);
  at("cases").innerHTML = state.cases
    .map((one, n) => {
      const [model, format = ""] = one.model.split("@"),
        [device, gpus] = split(one.node);
      const counts = c.devices[device] ? Object.keys(c.devices[device].nodes) : [gpus];
      const rest = one.sets.filter(set => !set.startsWith("context="));
      return (
        `<fieldset style="--mine:${COLOURS[n]}" data-case="${n}">` +
        `<legend>Case ${LETTERS[n]}</legend>` +
        `<label>model <select id="model-${n}" data-of="model">` +
        options(withOwn(models, model), model) +
        `</select></label>` +
        `<div class="row">` +
        `<label>weights <select id="format-${n}" data-of="format">` +
        options(withOwn([["", "as published"], ...c.formats.map(f => [f, f])], format), format) +
        `</select></label>` +
        `<label>context <input id="context-${n}" data-of="context" inputmode="numeric" ` +
        `value="${escape(value(one, "context"))}" placeholder="128"></label></div>` +
        `<div class="row">` +
        `<label style="flex:3">device <select id="device-${n}" data-of="device">` +
        options(withOwn(devices, device), device) +
        `</select></label>` +
        `<label>GPUs <select id="gpus-${n}" data-of="gpus">` +
        options(
          counts.map(x => [x, x]),
          gpus,
        ) +
        `</select></label></div>` +
        (rest.length
          ? `<ul class="sets">` +
            rest
              .map(
                set =>
                  `<li><button type="button" data-drop="${escape(set)}" ` +
                  `aria-label="remove ${escape(set)}">${escape(set)} ✕</button></li>`,
              )
              .join("") +
            `</ul>`
          : "") +
        `<div class="row">` +
        `<label>set <input id="set-${n}" list="names" placeholder="handoff"></label>` +
        `<label>to <input id="to-${n}" list="values-of-${n}" placeholder="grid, x0.5, +10%">` +
        `</label><datalist id="values-of-${n}"></datalist>` +
        `<button type="button" data-set>Set</button></div>` +
        (state.cases.length > 1
          ? `<p style="margin:.4rem 0 0"><button type="button" class="small" data-remove>` +
            `Remove case ${LETTERS[n]}</button></p>`
          : "") +
        `</fieldset>`
      );
    })
    .join("");
  at("more").disabled = state.cases.length >= 4;
  at("chosen").textContent = state.cases
    .map((one, n) => `${LETTERS[n]}: ${one.model} on ${one.node}`)
    .join(" · ");
  state.sweeps.forEach(([name, values], n) => {
    at(`axis-${n}`).value = name;
    at(`values-${n}`).value = values;
  });
  at("usd").value = state.usd;
  if (active && at(active)) at(active).focus();
}

async function names() {
  const found = await fetch(`hardware?${new URLSearchParams({node: state.cases[0].node})}`);
  const hardware = found.ok ? (await found.json()).numbers : [];
  at("names").innerHTML = [
    ...state.choices.options.map(o => [o.name, o.values ? o.values.join(", ") : "engine option"]),
    ...state.choices.conditions.map(name => [name, "condition"]),
    ["gpus", "another number of GPUs"],
    ...hardware.map(([path, said, kind]) => [path, `${said}, ${kind}`]),
  ]
    .map(([name, said]) => `<option value="${escape(name)}">${escape(said)}</option>`)
    .join("");
}

function put(one, name, given) {
  one.sets = one.sets.filter(set => !set.startsWith(`${name}=`));
  if (given) one.sets.push(`${name}=${given.replace(/\s+/g, "")}`);
}

at("cases").addEventListener("change", event => {
  const box = event.target.closest("[data-case]"),
    of = event.target.dataset.of;
  if (!of) return;
  const one = state.cases[box.dataset.case],
    [model, format = ""] = one.model.split("@"),
    [device, gpus] = split(one.node),
    given = event.target.value;
  if (of === "model") one.model = given + (format ? `@${format}` : "");
  if (of === "format") one.model = model + (given ? `@${given}` : "");
  if (of === "context") put(one, "context", given);
  if (of === "device") {
    const nodes = state.choices.devices[given].nodes;
    one.node = nodes[gpus] || Object.values(nodes)[0];
    names();
  }
  if (of === "gpus") one.node = state.choices.devices[device].nodes[given];
  go();
});

at("cases").addEventListener("input", event => {
  const match = /^set-(\d)$/.exec(event.target.id);
  if (!match) return;
  const option = state.choices.options.find(o => o.name === event.target.value.replace(/-/g, "_"));
  at(`values-of-${match[1]}`).innerHTML = ((option && option.values) || [])
    .map(v => `<option value="${escape(v)}">`)
    .join("");
});

function set(box) {
  const n = box.dataset.case,
    name = at(`set-${n}`).value.trim(),
    given = at(`to-${n}`).value.trim();
  if (!name || !given) {
    at(name ? `to-${n}` : `set-${n}`).focus();
    return;
  }
  put(state.cases[n], name, given);
  go();
}

at("cases").addEventListener("click", event => {
  const box = event.target.closest("[data-case]"),
    b = event.target.closest("button");
  if (!b) return;
  const one = state.cases[box.dataset.case];
  if (b.dataset.drop) {
    one.sets = one.sets.filter(s => s !== b.dataset.drop);
    go();
  }
  if ("set" in b.dataset) set(box);
  if ("remove" in b.dataset) {
    state.cases.splice(Number(box.dataset.case), 1);
    go();
  }
});

at("form").addEventListener("keydown", event => {
  if (event.key !== "Enter" || event.target.tagName !== "INPUT") return;
  event.preventDefault();
  const box = event.target.closest("[data-case]");
  if (box && /^(set|to)-/.test(event.target.id)) set(box);
  else event.target.dispatchEvent(new Event("change", {bubbles: true}));
});

at("form").addEventListener("submit", event => event.preventDefault());
at("more").addEventListener("click", () => {
  const last = state.cases.at(-1);
  state.cases.push({...last, sets: [...last.sets]});
  go();
  at(`model-${state.cases.length - 1}`).focus();
});

for (const n of [0, 1])
  for (const what of ["axis", "values"])
    at(`${what}-${n}`).addEventListener("change", () => {
      state.sweeps[n] = [at(`axis-${n}`).value.trim(), at(`values-${n}`).value.replace(/\s+/g, "")];
      if (state.sweeps[n].every(Boolean) || !state.sweeps[n].some(Boolean)) go();
    });
for (const b of document.querySelectorAll("[data-sweep]"))
  b.addEventListener("click", () => {
    const made = b.dataset.sweep
      .split(";")
      .filter(Boolean)
      .map(one => one.split("="));
    state.sweeps = [made[0] || ["", ""], made[1] || ["", ""]];
    go();
  });
at("usd").addEventListener("change", () => {
  state.usd = at("usd").value.trim();
  go();
});

at("stages-button").addEventListener("click", fetchStages);
document.addEventListener("click", event => {
  const b = event.target.closest("button");
  if (b && b.dataset.copy) {
    navigator.clipboard.writeText(b.dataset.copy).then(
      () => {
        b.textContent = "copied";
        setTimeout(() => {
          b.textContent = "copy";
        }, 1200);
      },
      () => {},
    );
  }
  if (b && b.dataset.look) {
    state.look = Number(b.dataset.look);
    render();
  }
});
