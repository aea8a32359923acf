// Draws a page's figures, each laid out for the width that it has: a phone's as well as a desk's and paper's.
"use strict";

const LETTER_PX = 6.6, LINE_PX = 15; // of the figures' font
const TICK_PX = 55; // between ticks that are counted, not given
const SCALE_PX = 50; // of a vertical axis of numbers
const LEAST_PX = 280, LEAST_SHARE = 0.6; // of a figure's width for its plot: names of rows that leave less stand above their bars
const PAPER_PX = 980; // width of a figure on A4 landscape

const dark = matchMedia("(prefers-color-scheme: dark)");
const LIGHT_INK = "#1b2433", LIGHT_GRID = "#e5e9f0"; // as figures are written
const FAINT = 0.35; // lightness below which a colour is lost on dark ground
let paper = false; // is always light

const figures = new Map();
for (const holder of document.querySelectorAll("script[type='application/json'][data-figure]")) {
  figures.set(holder.dataset.figure, JSON.parse(holder.textContent));
}

/** A colour of a figure on the ground that the page has. */
function colour(written) {
  if (!dark.matches || paper) return written;
  const look = getComputedStyle(document.documentElement);
  if (written === LIGHT_INK) return look.getPropertyValue("--ink").trim();
  if (written === LIGHT_GRID) return look.getPropertyValue("--grid").trim();
  const parts = [1, 3, 5].map((at) => parseInt(written.slice(at, at + 2), 16));
  const lightness = (0.3 * parts[0] + 0.6 * parts[1] + 0.1 * parts[2]) / 255;
  const more = Math.max(0, FAINT - lightness) / (1 - lightness);
  return `#${parts.map((part) => Math.round(part + (255 - part) * more).toString(16).padStart(2, "0")).join("")}`;
}

/** A figure with the colours of the ground. */
function coloured(figure) {
  return JSON.parse(JSON.stringify(figure).replace(/"#[0-9a-f]{6}"/g, (found) => `"${colour(found.slice(1, -1))}"`));
}

/** Text in lines of at most `letters`, where its spaces allow that. */
function wrapped(text, letters) {
  const lines = [];
  for (const word of String(text).split(" ")) {
    const last = lines.at(-1);
    if (last !== undefined && last.length + 1 + word.length <= letters) lines[lines.length - 1] = `${last} ${word}`;
    else lines.push(word);
  }
  return lines;
}

/** Names of rows above their bars: each row grows by the lines of its name. */
function namesAbove(layout, names, width) {
  const lines = names.map((name) => wrapped(name, width / LETTER_PX));
  const room = LINE_PX * Math.max(...lines.map((of) => of.length)) + 4;
  const { t, b } = layout.margin;
  const bar = ((layout.height - t - b) / names.length) * (1 - (layout.bargap ?? 0.2));
  const row = bar + 2 * room; // bars stay in the middle of their rows
  layout.height = t + b + row * names.length;
  layout.bargap = layout.waterfallgap = 1 - bar / row;
  layout.yaxis = { ...layout.yaxis, showticklabels: false };
  layout.annotations = lines.map((of, at) => ({
    text: of.join("<br>"), x: 0, xref: "paper", xanchor: "left", y: names[at], yref: "y", yanchor: "bottom", yshift: bar / 2,
    showarrow: false, align: "left",
  }));
}

/** As many ticks as have room next to each other. Given ones keep their lines, and only some their texts. */
function thinned(axis, width) {
  if (!axis.tickvals) return { ...axis, nticks: Math.max(3, Math.floor(width / TICK_PX)), tickangle: 0 };
  if (axis.type === "category") return axis;
  const place = axis.type === "log" ? Math.log : Number;
  const places = axis.tickvals.map(place);
  const low = Math.min(...places), high = Math.max(...places);
  let end = -Infinity;
  const ticktext = axis.ticktext.map((text, at) => {
    const middle = (0.9 * width * (places[at] - low)) / (high - low || 1);
    const half = ((text.length + 1) * LETTER_PX) / 2;
    if (middle - half < end) return "";
    end = middle + half;
    return text;
  });
  return { ...axis, ticktext, tickangle: 0 };
}

/** The figure's layout for `width` pixels. */
function fitted(figure, width) {
  const layout = structuredClone(figure.layout);
  const names = [...new Set(figure.data.filter((trace) => trace.orientation === "h").flatMap((trace) => trace.y))];
  const longest = Math.max(0, ...names.map((name) => name.length)) * LETTER_PX;
  const whole = width - layout.margin.l - layout.margin.r;
  const above = whole - longest < Math.max(LEAST_PX, LEAST_SHARE * width);
  if (above) namesAbove(layout, names, whole);
  const inner = whole - (above ? 0 : names.length ? longest : SCALE_PX);
  layout.xaxis = thinned(layout.xaxis, inner);
  const title = wrapped(layout.xaxis.title?.text ?? "", inner / LETTER_PX);
  if (title.length > 1) {
    layout.xaxis.title = { ...layout.xaxis.title, text: title.join("<br>") };
    layout.margin.b += LINE_PX * (title.length - 1);
    layout.height += LINE_PX * (title.length - 1);
  }
  return { ...layout, width };
}

function draw(name, most = Infinity) {
  const box = document.getElementById(name), figure = coloured(figures.get(name));
  const layout = fitted(figure, Math.min(box.clientWidth, most));
  box.style.height = `${layout.height}px`;
  Plotly.react(box, figure.data, layout, { displayModeBar: false });
}

function drawAll(most) {
  for (const name of figures.keys()) draw(name, most);
  for (const sign of document.querySelectorAll(".legend i")) {
    sign.style.background = colour(sign.style.getPropertyValue("--colour").trim());
  }
}

/** plotly.js stands packed in the page. */
async function unpack() {
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
}

/** A name of a legend shows and hides what it names. */
function toggled(button) {
  const trace = figures.get(button.dataset.of).data[Number(button.dataset.trace)];
  trace.visible = trace.visible === false;
  button.classList.toggle("hidden", !trace.visible);
  draw(button.dataset.of);
}

for (const button of document.querySelectorAll(".legend button")) button.addEventListener("click", () => toggled(button));

function begin() {
  drawAll();
  // A finger that moves scrolls the page, also where it began on a figure: plotly would take it for a drag. A tap still points.
  for (const box of document.querySelectorAll(".figure")) box.addEventListener("touchstart", (event) => event.stopPropagation(), true);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // a phone's address bar comes and goes
    width = innerWidth;
    drawAll();
  });
  dark.addEventListener("change", () => drawAll());
  addEventListener("beforeprint", () => {
    paper = true;
    drawAll(PAPER_PX);
  });
  addEventListener("afterprint", () => {
    paper = false;
    drawAll();
  });
}

// What is folded away is open on paper.
const folds = document.querySelectorAll("details");
addEventListener("beforeprint", () => folds.forEach((one) => {
  one.dataset.was = one.open ? "open" : "";
  one.open = true;
}));
addEventListener("afterprint", () => folds.forEach((one) => (one.open = one.dataset.was === "open")));

const drawn = figures.size ? unpack().then(begin) : Promise.resolve();
drawn.catch((error) => {
  for (const box of document.querySelectorAll(".figure")) box.textContent = `This browser cannot draw figures (${error}); one of 2023 or later can.`;
});
