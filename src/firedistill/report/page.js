"use strict";
// Draws the charts with plotly.js, and the views of attribution and rollouts, from the packed JSON before it. Text of models and
// datasets is set through textContent; labels of charts, in which plotly.js reads tags, come escaped.
const byId = (id) => document.getElementById(id);
const dark = matchMedia("(prefers-color-scheme: dark)");
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
let data = null;

async function unpacked(id) {
  const bytes = Uint8Array.from(atob(byId(id).textContent), (character) => character.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

function element(name, attributes = {}, ...content) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...content);
  return made;
}

function options(select, labels, chosen) {
  select.replaceChildren(...labels.map((label, index) => element("option", { value: index }, label)));
  select.value = String(Math.max(0, chosen ?? 0));
}

function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 10000) return Math.round(value).toLocaleString("en");
  return size !== 0 && size < 0.001 ? value.toExponential(digits - 1) : String(Number(value.toPrecision(digits)));
}

function tableOf(head, rows, kind = "") {
  const cells = (row, name) => row.map((cell, i) => element(i ? name : "th", i ? {} : { scope: name === "th" ? "col" : "row" }, cell));
  const body = element("tbody", {}, ...rows.map((row) => element("tr", {}, ...cells(row, "td"))));
  return element("div", { class: "scroll" }, element("table", { class: kind }, element("thead", {}, element("tr", {}, ...cells(head, "th"))), body));
}

// ---- What is chosen is in the address -----------------------------------------------------------------------------------------

let view = new URLSearchParams();

function readView() {
  const text = location.hash.slice(1);
  view = new URLSearchParams(text.includes("=") ? text : "");
}

function choose(changes) {
  for (const [name, value] of Object.entries(changes)) {
    view.delete(name);
    for (const one of Array.isArray(value) ? value : [value]) if (one !== null) view.append(name, one);
  }
  history.replaceState(null, "", `#${view}`);
}

// ---- Charts -----------------------------------------------------------------------------------------------------------------

// No button may send a chart anywhere; the buttons beside the title save it.
const CONFIG = { displaylogo: false, showSendToCloud: false, plotlyServerURL: "", displayModeBar: "hover", modeBarButtonsToRemove: ["toImage", "select2d", "lasso2d", "autoScale2d"], modeBarButtonsToAdd: ["v1hovermode"] };
const figures = [];
const place = () => Math.min(data.settings.length - 1, Math.max(0, Math.trunc(Number(view.get("setting"))) || 0));
const setting = () => data.settings[place()];
const chosen = () => new Set(view.has("show") ? view.getAll("show") : setting().groups.filter((group) => group.chosen).map((group) => group.label));
const colourOf = (group, on) => (on ? group.line[dark.matches ? "dark" : "light"] : css("--rest"));

function show(labels) {
  choose({ show: labels });
  drawChips();
  drawAll();
}

function toggle(label) {
  const labels = chosen();
  if (!labels.delete(label)) labels.add(label);
  show(labels.size ? [...labels] : [""]);
}

function drawChips() {
  const labels = chosen();
  const button = (onclick, attributes, ...content) => Object.assign(element("button", { type: "button", ...attributes }, ...content), { onclick });
  const chips = setting().groups.map((group) => {
    const on = labels.has(group.label);
    const sample = element("i", { "aria-hidden": "true" });
    sample.style.borderTop = `3px ${{ solid: "solid", dot: "dotted" }[group.line.style] ?? "dashed"} ${colourOf(group, on)}`;
    return button(() => toggle(group.label), { "aria-pressed": on }, sample, group.label);
  });
  byId("methods").replaceChildren(...chips, button(() => show(setting().groups.map(({ label }) => label)), {}, "all"),
    button(() => show([""]), {}, "none"), button(() => show(null), {}, "as opened"));
}

// The traces in the colours of the page, those of groups that are not chosen below the others.
function painted({ traces }) {
  const [labels, seeds, alone, unmarked] = [chosen(), view.has("seeds"), view.has("alone"), view.has("unmarked")];
  return traces.map((trace) => {
    const group = setting().groups[trace.group];
    const on = labels.has(group.label);
    const color = trace.role === "before" ? css("--ink") : colourOf(group, on);
    const shown = { line: on || !alone, seed: on && seeds, low: on && !(seeds && group.several), high: on && !(seeds && group.several), mark: on && !unmarked }[trace.role] ?? true;
    const width = { line: on ? 2 : 1, seed: 1 }[trace.role] ?? 0;
    const marker = trace.role === "mark" ? { symbol: "triangle-down", size: 11, color, line: { width: 1, color: css("--ground") } } : { size: on ? 6 : 4, ...trace.marker, color, line: { color, width: 1.2 } };
    return { ...trace, type: "scatter", on, visible: shown, line: { color, width, dash: on ? group.line.style : "solid" }, marker, fillcolor: `${color}20`, error_x: trace.error_x && { ...trace.error_x, type: "data", color, thickness: 1.6, width: 4 } };
  }).sort((a, b) => a.on - b.on);
}

function layoutOf(plot, width) {
  const font = { family: "system-ui, sans-serif", size: 12, color: css("--soft") };
  const axis = { gridcolor: css("--line"), linecolor: css("--line"), zeroline: false, exponentformat: "none", automargin: false };
  const layout = { font, width, height: width < 500 ? 300 : 330, margin: { l: 58, r: Math.round(Math.min(150, width * 0.29)), t: 28, b: 44 }, showlegend: false, hovermode: "closest", paper_bgcolor: css("--ground"), plot_bgcolor: css("--ground"),
    hoverlabel: { bgcolor: css("--ground"), bordercolor: css("--soft"), font: { color: css("--ink") }, align: "left" },
    xaxis: { ...axis, nticks: Math.max(4, Math.round(width / 80)), ...plot.layout.xaxis }, yaxis: { ...axis, nticks: 6, ...plot.layout.yaxis } };
  const rows = plot.traces.filter(({ role, marker }) => role === "dot" && marker.symbol === "circle");
  if (!rows.length) return layout;
  // One row for each group, with its name on the left and its accuracy on the right.
  const ticks = rows.map(({ group }) => setting().groups[group].names[width < 500 ? 0 : 1]);
  const most = Math.max(...ticks.flat().map((line) => line.length));
  layout.margin = { ...layout.margin, l: 7 * most + 16, r: 44 };
  layout.height = Math.max(110, rows.length * Math.max(30, ...ticks.map((lines) => 14 * lines.length + 8))) + 72;
  Object.assign(layout.yaxis, { tickvals: rows.map(({ y }) => y[0]), ticktext: ticks.map((lines) => lines.join("<br>")), range: [-0.7, rows.length - 0.4], tickfont: { color: css("--ink") } });
  layout.annotations = rows.map(({ x, y }) => ({ text: x[0].toFixed(1), x: 1, xref: "paper", xanchor: "left", xshift: 6, y: y[0], showarrow: false, font: { color: css("--ink") } }));
  return layout;
}

// Names at the right end of the chosen lines, pushed apart where they would overlap.
function namesOf({ data: traces, layout: { xaxis, yaxis, height, margin } }, narrow) {
  const inside = height - margin.t - margin.b;
  const end = xaxis.type === "log" ? 10 ** xaxis.range[1] : xaxis.range[1];
  const names = traces.filter(({ role, on }) => role === "line" && on).map(({ group, x, y, line }) => {
    const i = y.findLastIndex((value, place) => value !== null && x[place] <= end);
    const beyond = x[i + 1] > end && y[i + 1] !== null ? (end - x[i]) / (x[i + 1] - x[i]) : 0;
    const last = beyond ? y[i] + beyond * (y[i + 1] - y[i]) : y[i];
    const share = ((yaxis.type === "log" ? Math.log10(last) : last) - yaxis.range[0]) / (yaxis.range[1] - yaxis.range[0]);
    const lines = setting().groups[group].names[narrow ? 0 : 1];
    return { y: Math.min(inside, Math.max(0, (1 - share) * inside)), size: 14 * lines.length, text: lines.join("<br>"), color: line.color };
  }).filter(({ y }) => Number.isFinite(y)).sort((a, b) => a.y - b.y);
  let edge = -7;
  for (const name of names) edge = (name.y = Math.max(name.y, edge + name.size / 2)) + name.size / 2;
  edge = Math.max(inside + 7, names.reduce((sum, { size }) => sum + size, -7));
  for (const name of names.reverse()) edge = (name.y = Math.min(name.y, edge - name.size / 2)) - name.size / 2;
  return names.map(({ y, text, color }) => ({ text, font: { color }, x: 1, xref: "paper", xanchor: "left", xshift: 6, y: 1 - y / inside, yref: "paper", yanchor: "middle", align: "left", showarrow: false }));
}

async function draw(figure) {
  const { plot, box, note } = figure;
  const width = box.clientWidth;
  Object.assign(figure, { stale: false, width });
  const name = () => (plot.traces.some(({ role }) => role === "line") ? Plotly.relayout(box, { annotations: namesOf(box, width < 500) }) : null);
  note.textContent = plot.notes[view.has("seeds") ? 1 : 0].replaceAll(" %", "\u00a0%");
  await Plotly.react(box, painted(plot), layoutOf(plot, width), CONFIG);
  await name();
  for (const event of ["plotly_click", "plotly_relayout"]) box.removeAllListeners(event);
  box.on("plotly_click", ({ points: [{ data: { group } }] }) => toggle(setting().groups[group].label));
  box.on("plotly_relayout", (change) => { if (!change.annotations) name(); });
}

const resized = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const figure = figures.find(({ box }) => box === target);
    if (figure?.width && figure.width !== target.clientWidth) draw(figure);
  }
});

function drawAll() {
  for (const figure of figures) {
    figure.stale = true;
    if (figure.near) draw(figure);
  }
}

const nearby = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    const figure = figures.find(({ box }) => box === target);
    if (figure) figure.near = isIntersecting;
    if (figure?.near && figure.stale) draw(figure);
  }
}, { rootMargin: "600px" });

function save({ plot, box, note }, format) {
  const { layout } = box;
  const [width, height] = [900, Math.max(480, layout.height + 60)];
  const title = { text: plot.heading, subtitle: { text: note.innerHTML, font: { size: 11 } }, x: 0.02, xanchor: "left" };
  Plotly.downloadImage({ data: box.data, layout: { ...layout, width, height, title, margin: { ...layout.margin, t: 70 } } }, { format, filename: plot.name, width, height, scale: 2 });
}

// Left and right move along a line, up and down from line to line.
function readPoints(figure, event) {
  const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -Infinity], End: [0, Infinity] }[event.key];
  const lines = (figure.box.data ?? []).flatMap(({ role, on }, i) => (on && ["line", "dot"].includes(role) ? [i] : []));
  if (!move || !lines.length) return;
  event.preventDefault();
  const within = (value, list) => Math.min(list.length - 1, Math.max(0, value));
  figure.line = within((figure.line ?? 0) + move[0], lines);
  const { x } = figure.box.data[lines[figure.line]];
  figure.point = within(within(figure.point ?? Infinity, x) + move[1], x);
  Plotly.Fx.hover(figure.box, [{ curveNumber: lines[figure.line], pointNumber: figure.point }]);
}

function startFigures() {
  nearby.disconnect();
  resized.disconnect();
  for (const { box } of figures.splice(0)) Plotly.purge(box);
  for (const section of ["accuracy", "dynamics"]) byId(`${section}-charts`).replaceChildren();
  for (const plot of setting().plots) {
    const [box, note] = [element("div", { class: "chart", role: "img", tabindex: "0", "aria-label": `${plot.title}. Arrow keys read its values.` }), element("p", { class: "fine" })];
    const figure = { plot, box, note, stale: true };
    const tools = ["png", "svg"].map((format) => Object.assign(element("button", { type: "button", "aria-label": `Save “${plot.title}” as ${format}` }, format.toUpperCase()), { onclick: () => save(figure, format) }));
    box.onkeydown = (event) => readPoints(figure, event);
    byId(`${plot.section}-charts`).append(element("figure", {}, element("figcaption", {}, element("h3", {}, plot.title), element("div", { class: "tools" }, ...tools), note), box));
    figures.push(figure);
    nearby.observe(box);
    resized.observe(box);
  }
  const { constant, plots } = setting();
  const few = plots.some(({ section }) => section === "dynamics") ? "" : "No run has three steps with different values yet. ";
  byId("constant").textContent = few + (constant.length ? `The same in all runs: ${constant.join("; ")}.` : "");
  document.querySelectorAll(".answer").forEach((answer, i) => { answer.hidden = i !== place(); });
}

function startCharts() {
  const switches = { others: ["alone", true], seeds: ["seeds", false], marks: ["unmarked", true] };
  const everything = () => {
    if (byId("setting")) options(byId("setting"), data.settings.map(({ title }) => title), place());
    for (const [id, [name, inverse]] of Object.entries(switches)) byId(id).checked = view.has(name) !== inverse;
    startFigures();
    drawChips();
  };
  if (byId("setting")) byId("setting").onchange = () => { choose({ setting: byId("setting").value, show: null }); everything(); };
  for (const [id, [name, inverse]] of Object.entries(switches)) byId(id).onchange = () => { choose({ [name]: byId(id).checked !== inverse ? "1" : null }); drawAll(); };
  window.addEventListener("beforeprint", () => figures.filter(({ stale }) => stale).forEach(draw));
  dark.addEventListener("change", () => { drawChips(); drawAll(); });
  everything();
  return everything;
}

// ---- Attribution ------------------------------------------------------------------------------------------------------------

const FIELD_COLOURS = ["#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f00"];
const ONE_COLOUR = "#e69f00";
const fieldColour = (index) => FIELD_COLOURS[index % FIELD_COLOURS.length];
const LEAST = 0.15; // strength from which a token shows the number of its field
const circled = (field) => (field <= 20 ? String.fromCharCode(0x245f + field) : `(${field})`);

function largest(values) {
  let best = -1;
  values.forEach((value, index) => { if (value > 0 && (best < 0 || value > values[best])) best = index; });
  return best;
}

const at = (rows, token) => rows.map((row) => row[token]);
const fieldMode = (rows, strength) => (example, t) => { const j = largest(at(example[rows], t)); return j < 0 ? null : [fieldColour(j), strength(example, t, j), j + 1]; };
// Each mode: its name, what it shows, and colour, strength (0 to 1) and field of a token.
const MODES = [
  ["most influential field", "Colour and number: the field whose removal changes the token’s gradient most. Full strength: that change is as long as the radius ρ.",
    fieldMode("energy", (example, t, j) => Math.sqrt(example.energy[j][t]) / Math.max(example.rho[t], 1e-9))],
  ["field weighed down", "Colour and number: the field with the largest weight α, away from which the target moves. Strength: 1 − α₀, so that only tokens over the radius are coloured.",
    fieldMode("alpha", (example, t) => 1 - example.alpha_full[t])],
  ["χ, outside the radius", "Strength: the share χ of the gradient’s energy outside the radius; 0 for tokens inside.", (example, t) => [ONE_COLOUR, example.chi[t]]],
  ["η, contraction", "Strength: how much the projection shortens the token’s step, 1 − η.", (example, t) => [ONE_COLOUR, 1 - example.eta[t]]],
  ["ρ, the radius", "Strength: the student’s own uncertainty ρ, which bounds the step. Full strength: 1 or more.", (example, t) => [ONE_COLOUR, example.rho[t]]],
];
const SYMBOLS = [
  ["ρ", "rho", "Fisher radius: how far the student’s own uncertainty lets the target move this token"],
  ["‖g‖", "gradient_norm", "length of the gradient that the full feedback asks for; compare with ρ"],
  ["χ", "chi", "share of that gradient’s energy outside the radius"],
  ["α₀", "alpha_full", "weight of the view with all fields in the mixed target"],
  ["η", "eta", "factor by which the mixed target is contracted onto the radius; 1 if it fits"],
  ["β", "beta", "weight of the token if the answer were right"],
];

const source = () => data.attributions[Number(byId("source").value)];
const example = () => source().examples[Number(byId("example").value)];

function drawExample() {
  const shown = example();
  byId("question").textContent = shown.question;
  byId("judged").textContent = `${shown.correct ? "Right" : "Wrong"}: ${shown.submitted ? `the student answered ${shown.submitted}` : "no answer was found"}, expected is ${shown.expected}.` +
    (shown.correct ? " A right answer is weighted by β; what the feedback would change is shown nevertheless." : "");
  byId("prompt").textContent = shown.prompt;
  byId("fields").replaceChildren(...shown.fields.map((field, index) => {
    const box = element("div", { class: "field" }, element("h4", {}, `${circled(index + 1)} ${field.name}`), element("p", {}, field.text));
    box.style.borderColor = fieldColour(index);
    return box;
  }));
  drawTokens();
}

function drawTokens() {
  const shown = example();
  const [, text, strengthOf] = MODES[Number(byId("mode").value)];
  byId("mode-text").textContent = text;
  const first = shown.gradient_norm.indexOf(Math.max(...shown.gradient_norm));
  const buttons = shown.tokens.map((token, t) => {
    // A line break is shown and breaks the line, which a <button> would not allow. A token without text is shown as ∅.
    const button = element("span", { role: "button", tabindex: "-1", "aria-pressed": "false" }, token === "" ? "∅" : token.replace(/\n/g, "↵\n"));
    const [colour, strength, field] = strengthOf(shown, t) ?? [ONE_COLOUR, 0];
    if (strength > 0) button.style.background = `color-mix(in srgb, ${colour} ${Math.round(60 * Math.min(1, strength))}%, transparent)`;
    if (field && strength >= LEAST) button.append(element("sup", {}, circled(field)));
    const select = () => {
      for (const other of buttons) { other.setAttribute("aria-pressed", String(other === button)); other.tabIndex = other === button ? 0 : -1; }
      drawNumbers(shown, t);
    };
    button.addEventListener("pointerenter", select);
    button.addEventListener("focus", select);
    button.addEventListener("keydown", (event) => {
      const to = { ArrowLeft: t - 1, ArrowRight: t + 1, Home: 0, End: shown.tokens.length - 1 }[event.key];
      if (to === undefined || !buttons[to]) return;
      event.preventDefault();
      buttons[to].focus();
    });
    if (t === first) { button.setAttribute("aria-pressed", "true"); button.tabIndex = 0; }
    return button;
  });
  const box = byId("response");
  box.replaceChildren(...buttons);
  if (!buttons.length) return;
  box.scrollTop = buttons[first].offsetTop - box.offsetTop - box.clientHeight / 2; // a long answer opens at the token whose numbers are shown
  drawNumbers(shown, first);
}

function drawNumbers(shown, t) {
  byId("numbers").replaceChildren(
    element("p", {}, "Token ", element("code", {}, JSON.stringify(shown.tokens[t]))),
    tableOf(["Symbol", "value", "what it means"], SYMBOLS.map(([symbol, name, meaning]) => [symbol, number(shown[name][t]), meaning]), "symbols"),
    tableOf(["Field", "α", "E"], shown.fields.map((field, j) => [`${circled(j + 1)} ${field.name}`, number(shown.alpha[j][t]), number(shown.energy[j][t])])),
    element("p", { class: "fine" }, "α: weight of the view without the field in the mixed target. E: energy, the squared length of the change when the field is removed."),
  );
}

function openExample(run, step, uid) {
  const of = data.attributions.findIndex((found) => found.run === run && found.step === step);
  options(byId("source"), data.attributions.map((found) => `${found.run}, step ${found.step}`), of);
  const examples = source().examples;
  const named = examples.findIndex((found) => found.uid === uid);
  // The wrong answer with the strongest gradient shows most.
  const strength = examples.map(({ correct, gradient_norm }) => (correct ? 0 : Math.max(0, ...gradient_norm)));
  options(byId("example"), examples.map((found) => `${found.uid} (${found.correct ? "right" : "wrong"})`), named >= 0 ? named : largest(strength));
  drawExample();
}

function startAttribution() {
  if (!data.attributions.length) return () => {};
  const lastOf = (run) => data.attributions.filter((found) => found.run === run).at(-1);
  const opened = lastOf(data.main) ?? data.attributions.at(-1);
  const remember = () => choose({ run: source().run, step: source().step, uid: example().uid, mode: byId("mode").value });
  const everything = () => {
    options(byId("mode"), MODES.map(([name]) => name), Math.min(MODES.length - 1, Math.trunc(Number(view.get("mode"))) || 0));
    openExample(view.get("run") ?? opened.run, Number(view.get("step") ?? opened.step), view.get("uid"));
  };
  byId("source").onchange = () => { openExample(source().run, source().step, null); remember(); };
  byId("example").onchange = () => { drawExample(); remember(); };
  byId("mode").onchange = () => { drawTokens(); remember(); };
  everything();
  return everything;
}

// ---- Rollouts ---------------------------------------------------------------------------------------------------------------

function allRollouts() {
  const { columns, texts, rows } = data.rollouts;
  const named = ["uid", "question", "response", "expected", "submitted"];
  const found = rows.map((row) => {
    const rollout = Object.fromEntries(columns.map((name, i) => [name, named.includes(name) ? texts[row[i]] : row[i]]));
    return { ...rollout, run: data.runs[rollout.run], fields: rollout.fields.map(([name, text]) => ({ name: texts[name], text: texts[text] })) };
  });
  for (const { run, step, examples } of data.attributions) {
    for (const shown of examples) {
      const influence = largest(shown.energy.map((row) => row.reduce((sum, value) => sum + value, 0)));
      found.push({ ...shown, run: data.runs.find(({ name }) => name === run), kind: "attribution", step, response: shown.tokens.join(""), influence: shown.fields[influence]?.name });
    }
  }
  return found;
}

function startRollouts() {
  if (!byId("rollout-run")) return () => {};
  const rollouts = allRollouts();
  const KINDS = { "held-out": "evaluation after step", training: "training step", attribution: "attribution, step" };
  const stepOf = ({ kind, step }) => `${KINDS[kind]} ${step}`;
  const fields = [...new Set(rollouts.flatMap(({ influence }) => influence ?? []))];
  const runs = data.runs.filter((run) => rollouts.some((rollout) => rollout.run === run));
  const RIGHT = ["right and wrong", "right", "wrong"];
  const PAGE = 20;
  let steps = [], count = PAGE;
  const drawList = () => {
    const [right, field, step] = [Number(byId("rollout-right").value), fields[Number(byId("rollout-field").value) - 1], steps[Number(byId("rollout-step").value) - 1]];
    const run = runs[Number(byId("rollout-run").value)];
    const found = rollouts.filter((rollout) => rollout.run === run && (!step || stepOf(rollout) === step) && (!right || rollout.correct === (right === 1)) && (!field || rollout.influence === field));
    byId("rollout-list").replaceChildren(...found.slice(0, count).map(rolloutBox));
    byId("rollout-more").hidden = found.length <= count;
    const known = rollouts.filter(({ influence }) => influence).length;
    byId("rollout-count").textContent = `${Math.min(count, found.length)} of ${found.length} shown. The page holds ${rollouts.length.toLocaleString("en")} rollouts: those of the first and the last evaluation and of some training steps, as far as there is room. The most influential field is known for ${known}, those of the attribution files.`;
  };
  const rolloutBox = (rollout) => {
    const answer = rollout.correct ? `${rollout.submitted}` : `${rollout.submitted || "no answer"} (expected ${rollout.expected})`;
    const box = element("details", { class: "rollout" }, element("summary", {},
      element("span", { class: rollout.correct ? "right" : "wrong", role: "img", "aria-label": rollout.correct ? "right" : "wrong" }, rollout.correct ? "✓" : "✗"),
      element("span", {}, `step ${rollout.step}`), element("span", {}, rollout.question), element("span", {}, answer)));
    box.ontoggle = () => {
      if (!box.open || box.children.length > 1) return;
      const part = (title, text) => [element("h4", {}, title), element("pre", {}, text)];
      const parts = element("div", {}, ...part(`Problem ${rollout.uid}`, rollout.question), ...part("Response", rollout.response), ...rollout.fields.flatMap((field) => part(`Feedback, ${field.name}`, field.text)));
      if (rollout.influence) {
        const open = element("button", { type: "button" }, `Most influential field: ${rollout.influence}. Show its tokens`);
        open.onclick = () => { openExample(rollout.run.name, rollout.step, rollout.uid); byId("attribution").scrollIntoView(); };
        parts.append(open);
      }
      box.append(parts);
    };
    return box;
  };
  const drawSteps = (name) => {
    const run = runs[Number(byId("rollout-run").value)];
    steps = [...new Set(rollouts.filter((rollout) => rollout.run === run).map(stepOf))];
    options(byId("rollout-step"), ["all", ...steps], 1 + steps.indexOf(name));
  };
  const remember = () => choose({ of: runs[Number(byId("rollout-run").value)].name, at: steps[Number(byId("rollout-step").value) - 1] ?? null, right: byId("rollout-right").value, field: fields[Number(byId("rollout-field").value) - 1] ?? null });
  const everything = () => {
    const chosenRun = runs.findIndex(({ name }) => name === (view.get("of") ?? data.main));
    options(byId("rollout-run"), runs.map(({ name, label }) => `${label} (${name})`), chosenRun);
    options(byId("rollout-right"), RIGHT, Math.min(2, Math.trunc(Number(view.get("right"))) || 0));
    options(byId("rollout-field"), ["any", ...fields], 1 + fields.indexOf(view.get("field")));
    drawSteps(view.get("at"));
    drawList();
  };
  for (const id of ["run", "step", "right", "field"]) {
    byId(`rollout-${id}`).onchange = () => { count = PAGE; if (id === "run") drawSteps(null); remember(); drawList(); };
  }
  byId("rollout-more").onclick = () => { count += 5 * PAGE; drawList(); };
  everything();
  return everything;
}

// ---- The page ---------------------------------------------------------------------------------------------------------------

async function start() {
  data = JSON.parse(await unpacked("data"));
  document.head.append(element("script", {}, await unpacked("library")));
  readView();
  const parts = [startCharts(), startAttribution(), startRollouts()];
  window.addEventListener("hashchange", () => { if (location.hash.includes("=")) { readView(); parts.forEach((draw) => draw()); } });
  // A link to a section moves there and keeps what is chosen in the address.
  for (const link of document.querySelectorAll('a[href^="#"]')) {
    link.addEventListener("click", (event) => {
      const target = document.querySelector(link.getAttribute("href"));
      event.preventDefault();
      choose({ section: target.id });
      target.scrollIntoView();
    });
  }
  if (view.has("section")) byId(view.get("section"))?.scrollIntoView();
}

start().catch((error) => {
  byId("problem").hidden = false;
  byId("problem").textContent = `The charts cannot be drawn: ${error.message}. This page needs a browser of 2023 or later.`;
  console.error(error);
});
