"use strict";
// Draws the curves and the attribution view from the JSON next to it. All text is set through textContent.
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);

function element(name, attributes = {}, text = null) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  return made;
}

function shape(name, attributes, parent, text = null) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  parent.append(made);
  return made;
}

function options(select, labels) {
  select.replaceChildren(...labels.map((label, index) => element("option", { value: index }, label)));
}

function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 10000) return Math.round(value).toLocaleString("en");
  return size !== 0 && size < 0.0001 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

// ---- Curves ---------------------------------------------------------------------------------------------------------------

const hidden = new Set(); // labels of groups that are not shown, whatever the setting
for (const setting of data.settings) for (const group of setting.groups) if (!group.compared) hidden.add(group.label);

function currentSetting() {
  return data.settings[Number(byId("setting").value) || 0];
}

function drawToggles() {
  const place = byId("methods");
  const everything = element("button", { type: "button" }, "all");
  const nothing = element("button", { type: "button" }, "none");
  const groups = currentSetting().groups;
  const compared = groups.filter((group) => group.compared);
  everything.onclick = () => { compared.forEach((group) => hidden.delete(group.label)); drawToggles(); drawCharts(); };
  nothing.onclick = () => { groups.forEach((group) => hidden.add(group.label)); drawToggles(); drawCharts(); };
  const toggle = (group) => {
    const button = element("button", { type: "button", "aria-pressed": String(!hidden.has(group.label)) });
    const swatch = shape("svg", { viewBox: "0 0 26 10", "aria-hidden": "true" }, button);
    const line = { x1: 0, y1: 5, x2: 26, y2: 5, stroke: group.colour, "stroke-width": 4 };
    shape("line", group.broken ? { ...line, "stroke-dasharray": "7 4" } : line, swatch);
    button.append(group.label);
    button.onclick = () => {
      if (!hidden.delete(group.label)) hidden.add(group.label);
      button.setAttribute("aria-pressed", String(!hidden.has(group.label)));
      drawCharts();
    };
    return button;
  };
  const others = groups.filter((group) => !group.compared);
  place.replaceChildren(...compared.map(toggle), everything, nothing);
  byId("rates").replaceChildren(...others.map(toggle));
  byId("more").hidden = !others.length;
}

// The lines of a chart: one per visible group, or one per run of it.
function linesOf(chart) {
  const lines = [];
  for (const group of currentSetting().groups) {
    if (hidden.has(group.label)) continue;
    const style = { colour: group.colour, broken: group.broken };
    if (byId("single").checked && group.runs[0].points[chart.name]) {
      for (const run of group.runs)
        lines.push({ ...style, label: `${group.label}, seed ${run.seed}`, curve: run.points[chart.name], events: run.events });
    } else if (group.curves[chart.name]) {
      const events = group.runs.flatMap((run) => run.events.map((event) => ({ ...event, text: `seed ${run.seed}: ${event.text}` })));
      lines.push({ ...style, label: group.label, curve: group.curves[chart.name], events });
    }
  }
  return lines.filter((line) => line.curve.x.length);
}

function niceTicks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const first = Math.ceil(low / step);
  // By their number: added to a large value, a small step may be nothing.
  const ticks = Array.from({ length: 3 * Math.ceil(count) + 3 }, (_, i) => (first + i) * step).filter((tick) => tick <= high + step * 1e-9);
  return [...new Set(ticks.map((tick) => Number(tick.toPrecision(10))))];
}

function scale(values, logarithmic, from, to, count) {
  let low = Math.min(...values);
  let high = Math.max(...values);
  if (logarithmic) {
    [low, high] = [Math.log10(low), Math.log10(high)];
    if (high - low < 0.2) [low, high] = [low - 0.1, high + 0.1];
  } else if (high === low) {
    [low, high] = [low - Math.max(1, Math.abs(low)) * 0.05, high + Math.max(1, Math.abs(high)) * 0.05];
  }
  const place = (value) => from + ((logarithmic ? Math.log10(value) : value) - low) / (high - low) * (to - from);
  let ticks = niceTicks(low, high, count);
  if (logarithmic) {
    const powers = ticks.filter((tick) => Number.isInteger(tick)).map((tick) => 10 ** tick);
    const between = [1, 2, 5].flatMap((digit) => Array.from({ length: 40 }, (_, i) => digit * 10 ** (i - 20)));
    ticks = powers.length > 2 ? powers : between.filter((tick) => Math.log10(tick) >= low && Math.log10(tick) <= high);
  }
  return { place, ticks };
}

// Lists can be too long for the arguments of Math.min.
function extent(lists) {
  let low = Infinity;
  let high = -Infinity;
  for (const list of lists) for (const value of list) if (value !== null) { low = Math.min(low, value); high = Math.max(high, value); }
  return [low, high];
}

function nearest(xs, x) {
  let best = 0;
  for (let i = 1; i < xs.length; i++) if (Math.abs(xs[i] - x) < Math.abs(xs[best] - x)) best = i;
  return best;
}

const SMOOTH = 11;

function smoothed(curve) {
  const half = (SMOOTH - 1) / 2;
  const mean = (list) => list.map((_, i) => {
    const near = list.slice(Math.max(0, i - half), i + half + 1).filter((value) => value !== null);
    return near.length ? near.reduce((sum, value) => sum + value, 0) / near.length : null;
  });
  const sides = Object.entries(curve).filter(([, list]) => Array.isArray(list) && list !== curve.x).map(([name, list]) => [name, mean(list)]);
  return { x: curve.x, of: curve.of, ...Object.fromEntries(sides) };
}

function drawChart(chart, figure) {
  const found = linesOf(chart);
  const thinned = found.some(({ curve }) => curve.of > curve.x.length);
  // A mean over the points that are left would not be one over steps.
  const smooth = chart.steps && chart.window === 1 && !thinned && byId("smooth").checked;
  const meanOver = smooth ? SMOOTH : chart.window || 1;
  const lines = found.map((line) => (smooth ? { ...line, curve: smoothed(line.curve) } : line));
  figure.replaceChildren();
  const caption = element("figcaption", {}, `${chart.title} `);
  caption.append(element("span", {}, (byId("single").checked && chart.name !== "learning-rates" ? "single runs" : `mean; ${chart.spread}`) + (meanOver > 1 ? `; running means of ${meanOver} steps` : "") + (thinned ? `; ${data.thinned}` : "")));
  figure.append(caption);
  if (!lines.length) {
    figure.append(element("p", { class: "fine" }, "No data for the selected methods."));
    return;
  }
  const width = Math.max(figure.clientWidth, 240);
  const height = Math.min(340, Math.max(220, width * 0.6));
  const edge = { left: 52, right: 22, top: 8, bottom: 42 };
  const usable = (value) => value !== null && (!chart.log || value > 0);
  const bands = byId("bands").checked;
  const ys = lines.flatMap(({ curve }) => [curve.mean, ...(bands && curve.low ? [curve.low, curve.high] : [])]);
  const x = scale(extent(lines.map(({ curve }) => curve.x)), chart.xlog, edge.left, width - edge.right, width / 90);
  const y = scale(extent(ys.map((list) => list.filter(usable))), chart.log, height - edge.bottom, edge.top, 5);
  const label = `${chart.title}, ${lines.length} curves: ${lines.map((line) => line.label).join("; ")}. Press the arrow keys to read the values.`;
  const svg = shape("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, height, role: "img", tabindex: "0", "aria-label": label }, figure);
  for (const tick of y.ticks) {
    shape("line", { class: "grid", x1: edge.left, x2: width - edge.right, y1: y.place(tick), y2: y.place(tick) }, svg);
    shape("text", { x: edge.left - 6, y: y.place(tick) + 4, "text-anchor": "end" }, svg, number(tick));
  }
  const ticks = chart.xlog ? [...new Set(lines.flatMap(({ curve }) => curve.x))] : x.ticks;
  for (const tick of ticks) shape("text", { x: x.place(tick), y: height - edge.bottom + 18, "text-anchor": "middle" }, svg, number(tick));
  shape("text", { x: (edge.left + width - edge.right) / 2, y: height - 6, "text-anchor": "middle" }, svg, chart.x);
  const side = shape("text", { "text-anchor": "middle", transform: `translate(12 ${(edge.top + height - edge.bottom) / 2}) rotate(-90)` }, svg, chart.y);
  side.setAttribute("aria-hidden", "true");
  for (const { curve, colour } of lines) {
    if (!bands || !curve.low) continue;
    // A step without a gradient has norm 0, which a logarithmic axis cannot show; the band has a gap there.
    let up = [], down = [];
    const close = () => {
      if (up.length > 1) shape("path", { d: `M${up.join("L")}L${down.reverse().join("L")}Z`, fill: colour, opacity: 0.16 }, svg);
      up = []; down = [];
    };
    curve.x.forEach((at, i) => {
      if (!usable(curve.low[i]) || !usable(curve.high[i])) { close(); return; }
      up.push(`${x.place(at)} ${y.place(curve.high[i])}`);
      down.push(`${x.place(at)} ${y.place(curve.low[i])}`);
    });
    close();
  }
  for (const { curve, colour, broken } of lines) {
    let path = "", pen = "M";
    curve.x.forEach((at, i) => {
      if (usable(curve.mean[i])) { path += `${pen}${x.place(at)} ${y.place(curve.mean[i])}`; pen = "L"; } else pen = "M";
    });
    const style = { d: path, fill: "none", stroke: colour, "stroke-width": 1.8, "stroke-linejoin": "round" };
    shape("path", broken ? { ...style, "stroke-dasharray": "6 3" } : style, svg);
    if (curve.x.length <= 30)
      curve.x.forEach((at, i) => { if (usable(curve.mean[i])) shape("circle", { cx: x.place(at), cy: y.place(curve.mean[i]), r: 2.5, fill: colour }, svg); });
  }
  if (byId("marks").checked) drawMarks(chart, lines, svg, x, y, height - edge.bottom, usable);
  addCursor(chart, figure, svg, lines, x, edge, width, height);
}

// A triangle where a run went wrong: on its curve, or on the x axis where the curve has no value.
function drawMarks(chart, lines, svg, x, y, floor, usable) {
  for (const { curve, colour, events, label } of lines) {
    for (const event of events) {
      if (event.chart !== chart.name || event.step > curve.x[curve.x.length - 1]) continue;
      const i = nearest(curve.x, event.step);
      const [cx, cy] = [x.place(event.step), curve.x[i] === event.step && usable(curve.mean[i]) ? y.place(curve.mean[i]) : floor];
      const mark = shape("path", { class: "mark", d: `M${cx} ${cy}l-6 -11h12Z`, fill: colour }, svg);
      shape("title", {}, mark, `${label}, step ${event.step}: ${event.rule}. ${event.text}`);
    }
  }
}

function addCursor(chart, figure, svg, lines, x, edge, width, height) {
  const tip = element("div", { class: "tip", "aria-live": "polite" });
  tip.hidden = true;
  figure.append(tip);
  const cursor = shape("line", { class: "cursor", y1: edge.top, y2: height - edge.bottom, visibility: "hidden" }, svg);
  const stops = [...new Set(lines.flatMap(({ curve }) => curve.x))].sort((a, b) => a - b);
  let at = stops.length - 1;
  const show = () => {
    const place = x.place(stops[at]);
    cursor.setAttribute("x1", place);
    cursor.setAttribute("x2", place);
    cursor.setAttribute("visibility", "visible");
    tip.replaceChildren(element("div", {}, `${chart.x}: ${number(stops[at])}`));
    for (const { curve, colour, label } of lines) {
      const i = nearest(curve.x, stops[at]);
      if (stops[at] < curve.x[0] || stops[at] > curve.x[curve.x.length - 1]) continue;
      const row = element("div");
      const box = element("i");
      box.style.background = colour;
      const spread = curve.low && curve.low[i] !== curve.high[i] ? ` (${number(curve.low[i])} to ${number(curve.high[i])})` : "";
      row.append(box, `${label}: ${number(curve.mean[i])}${spread}`);
      tip.append(row);
    }
    tip.hidden = false;
    if (place > width / 2) { tip.style.left = "auto"; tip.style.right = `${width - place + 10}px`; } else { tip.style.right = "auto"; tip.style.left = `${place + 10}px`; }
  };
  const hide = () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const here = (event.clientX - box.left) * width / box.width;
    at = nearest(stops.map((stop) => x.place(stop)), here);
    show();
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("focus", () => { if (svg.matches(":focus-visible")) show(); });
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: stops.length - 1, PageUp: at - 10, PageDown: at + 10 };
    if (event.key === "Escape") { hide(); return; }
    if (!(event.key in moves)) return;
    event.preventDefault();
    at = Math.min(stops.length - 1, Math.max(0, moves[event.key]));
    show();
  });
}

const figures = new Map();

function drawCharts() {
  for (const [chart, figure] of figures) drawChart(chart, figure);
}

function startCurves() {
  options(byId("setting"), data.settings.map((setting) => setting.title));
  for (const chart of data.charts) {
    const figure = element("figure");
    byId("charts").append(figure);
    figures.set(chart, figure);
  }
  byId("setting").onchange = () => { drawToggles(); drawCharts(); };
  for (const id of ["single", "bands", "smooth", "marks"]) byId(id).onchange = drawCharts;
  drawToggles();
  drawCharts();
  let width = window.innerWidth;
  window.addEventListener("resize", () => { if (window.innerWidth !== width) { width = window.innerWidth; drawCharts(); } });
}

// ---- Attribution ------------------------------------------------------------------------------------------------------------

const FIELD_COLOURS = ["#e5391f", "#3b7ddd", "#4a9e3d", "#9b5fd6", "#c99a06", "#129c8b", "#d9559f", "#9c6b3f"];
const ONE_COLOUR = "#e08a00";
const fieldColour = (index) => FIELD_COLOURS[index % FIELD_COLOURS.length];

function largest(rows, token) {
  let best = -1;
  rows.forEach((row, index) => { if (row[token] > 0 && (best < 0 || row[token] > rows[best][token])) best = index; });
  return best;
}

// Each mode: its name, what it shows, and colour and strength (0 to 1) of a token.
const MODES = [
  ["most influential field", "The field whose removal changes the token's gradient most, in the colour of the field. Full strength: the norm of that change reaches the radius ρ.",
    (example, t) => { const j = largest(example.energy, t); return j < 0 ? null : [fieldColour(j), Math.min(1, Math.sqrt(example.energy[j][t]) / Math.max(example.rho[t], 1e-9))]; }],
  ["down-weighted field", "The field with the largest weight α: the target moves to the view without it. Strength: 1 − α of the full view, so only tokens over the radius are coloured.",
    (example, t) => { const j = largest(example.alpha, t); return j < 0 ? null : [fieldColour(j), 1 - example.alpha_full[t]]; }],
  ["χ, outside the radius", "The share of the gradient energy outside the radius; 0 for tokens inside.", (example, t) => [ONE_COLOUR, example.chi[t]]],
  ["η, contraction", "How much the projection shortens the token's step: 1 − η.", (example, t) => [ONE_COLOUR, 1 - example.eta[t]]],
  ["ρ, the radius", "The student's own uncertainty, which bounds the step. Full strength: ρ of 1 or more.", (example, t) => [ONE_COLOUR, Math.min(1, example.rho[t])]],
];

function currentExample() {
  return data.attributions[Number(byId("source").value)].examples[Number(byId("example").value)];
}

function drawExample() {
  const example = currentExample();
  byId("verdict").textContent = `${example.correct ? "Correct" : "Wrong"}: answered ${example.submitted}, expected ${example.expected}. ` +
    (example.correct ? "The correct branch weights each token by β; the effect that feedback would have is shown nevertheless." : "The incorrect branch uses χ, α and η.");
  byId("prompt").textContent = example.prompt;
  byId("fields").replaceChildren(...example.fields.map((field, index) => {
    const box = element("div", { class: "field" });
    box.style.borderColor = fieldColour(index);
    box.append(element("h3", {}, `${index + 1}. ${field.name}`), element("p", {}, field.text));
    return box;
  }));
  drawTokens();
}

function drawTokens() {
  const example = currentExample();
  const mode = MODES[Number(byId("mode").value)];
  byId("mode-text").textContent = mode[1];
  const place = byId("response");
  const buttons = example.tokens.map((token, t) => {
    // A line break is shown and breaks the line, which a <button> would not allow. A token without text is shown as ∅.
    const button = element("span", { role: "button", tabindex: t ? "-1" : "0", "aria-pressed": "false" }, token === "" ? "∅" : token.replace(/\n/g, "↵\n"));
    const found = mode[2](example, t);
    if (found) button.style.background = `color-mix(in srgb, ${found[0]} ${Math.round(60 * Math.min(1, Math.max(0, found[1])))}%, transparent)`;
    const choose = () => {
      for (const other of buttons) { other.setAttribute("aria-pressed", String(other === button)); other.tabIndex = other === button ? 0 : -1; }
      drawNumbers(example, t);
    };
    button.addEventListener("pointerenter", choose);
    button.addEventListener("focus", choose);
    button.addEventListener("keydown", (event) => {
      const to = { ArrowLeft: t - 1, ArrowRight: t + 1, Home: 0, End: example.tokens.length - 1 }[event.key];
      if (to === undefined || !buttons[to]) return;
      event.preventDefault();
      buttons[to].focus();
    });
    return button;
  });
  place.replaceChildren(...buttons);
  drawNumbers(example, null);
}

function drawNumbers(example, t) {
  const place = byId("numbers");
  if (t === null) {
    place.replaceChildren(element("p", { class: "fine" }, "Hover over a token, or move between tokens with the arrow keys, to see its values."));
    return;
  }
  const row = (cells, kind) => {
    const line = element("tr");
    cells.forEach((cell, i) => line.append(i ? element(kind, {}, cell) : element("th", { scope: kind === "td" ? "row" : "col" }, cell)));
    return line;
  };
  const table = (head, rows) => {
    const [box, made, top, body] = [element("div", { class: "scroll" }), element("table"), element("thead"), element("tbody")];
    top.append(row(head, "th"));
    body.append(...rows.map((cells) => row(cells, "td")));
    made.append(top, body);
    box.append(made);
    return box;
  };
  const exact = (value) => (value === null ? "–" : String(value));
  const values = ["rho", "gradient_norm", "chi", "alpha_full", "eta", "beta"].map((name) => exact(example[name][t]));
  place.replaceChildren(
    table(["token", "ρ", "‖g‖ of the full view", "χ", "α full", "η", "β"], [[JSON.stringify(example.tokens[t]), ...values]]),
    table(["field", "α, weight of the view without it", "E, energy of its influence"],
      example.fields.map((field, j) => [field.name, exact(example.alpha[j][t]), exact(example.energy[j][t])])),
  );
}

function startAttribution() {
  if (!data.attributions.length) return;
  options(byId("source"), data.attributions.map((found) => `${found.run}, step ${found.step}`));
  options(byId("mode"), MODES.map((mode) => mode[0]));
  const drawSource = () => {
    const examples = data.attributions[Number(byId("source").value)].examples;
    options(byId("example"), examples.map((example) => `${example.uid} (${example.correct ? "correct" : "wrong"})`));
    const wrong = examples.findIndex((example) => !example.correct);
    byId("example").value = String(Math.max(0, wrong));
    drawExample();
  };
  byId("source").onchange = drawSource;
  byId("example").onchange = drawExample;
  byId("mode").onchange = drawTokens;
  drawSource();
}

startCurves();
startAttribution();
