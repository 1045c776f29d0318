"use strict";
// Draws the facts of a run. A page that is served asks for newer ones; text of the log is only ever set as text.
let data = JSON.parse(document.getElementById("data").textContent);
const palette = (...names) => names.map(name => `var(--${name})`);
const DOING_COLORS = palette("boots", "prepares", "waits", "syncs", "trains", "leaves", "finished");
const PART_COLORS = palette("leaves", "syncs", "waits", "boots", "steps", "trains");
const STAGE_COLORS = palette("waits", "boots", "prepares", "syncs", "steps", "trains");
const LINE_COLORS = palette("mark", "syncs", "trains", "finished", "leaves", "boots", "waits");
const RIGHT = 24;
const byId = id => document.getElementById(id);
const colored = (names, colors) => Object.fromEntries(names.map((name, i) => [name, colors[i % colors.length]]));
let view = null;  // the times that are looked at; null for all of the run
let isDragging = false;
const opened = new Set();

// ---------------------------------------------------------------- elements and numbers

function html(tag, parent, text, attributes = {}) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  parent.append(element);
  return element;
}
function svg(tag, parent, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}
const range = () => view ?? [0, Math.max(data.seconds, 1e-3)];
const clip = time => Math.min(Math.max(time, range()[0]), range()[1]);
const seen = (start, end) => end >= range()[0] && start <= range()[1];
const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
function amount(value) {
  const size = Math.abs(value);
  if (size >= 1e7 || (size > 0 && size < 1e-4)) return value.toExponential(2);
  return size >= 100 || Number.isInteger(value) ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
}
function clock(time, digits = 1) {
  const scale = 10 ** digits, rounded = Math.round(time * scale), minutes = Math.floor(rounded / (60 * scale));
  const rest = ((rounded - 60 * scale * minutes) / scale).toFixed(digits).padStart(digits ? 3 + digits : 2, "0");
  return minutes < 60 ? `${minutes}:${rest}` : `${Math.floor(minutes / 60)}:${String(minutes % 60).padStart(2, "0")}:${rest}`;
}
function tip(element, text) { element.dataset.tip = text; return element; }
function ticks(low, high, count, steps = [1, 2, 5, 10]) {
  const raw = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = steps.map(n => n * power).find(n => n >= raw) ?? raw;
  const first = Math.ceil(low / step), last = Math.floor(high / step + 1e-6);
  return Array.from({ length: Math.min(Math.max(last - first + 1, 0), 50) }, (_, i) => (first + i) * step);
}
function timeTicks(low, high, count) {
  const step = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400].find(n => n >= (high - low) / count);
  if (high - low < 10 || !step) return ticks(low, high, count);
  return Array.from({ length: Math.floor((high - low) / step) + 1 }, (_, i) => (Math.ceil(low / step) + i) * step).filter(time => time <= high);
}
function legend(parent, colors, marks = []) {
  const place = html("p", parent, undefined, { class: "soft legend" });
  for (const [name, color] of Object.entries(colors)) html("i", html("span", place), undefined, { style: `background:${color}` }).after(name);
  for (const [mark, name, color] of marks) {
    const round = mark ? { class: "mark", style: `color:${color}` } : { class: "round", style: `background:${color}` };
    html("i", html("span", place), mark, round).after(name);
  }
}

// ---------------------------------------------------------------- charts

class Chart {
  constructor(parent, height, left) {
    this.height = height;
    this.left = left;
    this.width = Math.max(parent.clientWidth, 320);
    this.root = svg("svg", parent, { viewBox: `0 0 ${this.width} ${height + 22}`, height: height + 22, role: "img" });
    const [low, high] = range();
    for (const time of timeTicks(low, high, Math.max((this.width - left) / 110, 2))) {
      const group = svg("g", this.root, { class: "axis" });
      svg("line", group, { x1: this.x(time), x2: this.x(time), y1: 0, y2: height });
      svg("text", group, { x: this.x(time), y: height + 15, "text-anchor": "middle" }, clock(time, high - low < 10 ? 2 : 0));
    }
    this.root.addEventListener("mousedown", event => { event.preventDefault(); this.drag(event); });
    this.root.addEventListener("dblclick", () => look(null));
  }
  x(time) {
    const [low, high] = range();
    return this.left + (time - low) / (high - low) * (this.width - this.left - RIGHT);
  }
  place(event) {
    const box = this.root.getBoundingClientRect();
    return (event.clientX - box.left) / box.width * this.width;
  }
  time(place) {
    const [low, high] = range();
    return clip(low + (place - this.left) / (this.width - this.left - RIGHT) * (high - low));
  }
  bar(start, end, y, height, color, text, extra = {}) {
    const from = this.x(clip(start));
    return tip(svg("rect", this.root, { x: from, y, width: Math.max(this.x(clip(end)) - from, 1.5), height, fill: color, ...extra }), text);
  }
  scale(low, high) {
    if (low === high) [low, high] = [low - (Math.abs(low) / 2 || 1), high + (Math.abs(high) / 2 || 1)];
    const y = value => this.height - 2 - (value - low) / (high - low) * (this.height - 12);
    for (const value of ticks(low, high, 3)) {
      const group = svg("g", this.root, { class: "axis" });
      svg("line", group, { x1: this.left, x2: this.width - RIGHT, y1: y(value), y2: y(value) });
      svg("text", group, { x: this.left - 8, y: y(value) + 4, "text-anchor": "end" }, amount(value));
    }
    return y;
  }
  marks() {
    for (const reset of data.resets) {
      if (!seen(reset.noticed, reset.noticed)) continue;
      const at = this.x(reset.noticed);
      svg("line", this.root, { x1: at, x2: at, y1: 0, y2: this.height, stroke: colorOf(reset), "stroke-dasharray": "3 3", opacity: .7, "pointer-events": "none" });
    }
  }
  // Shows the point of a line that is nearest in time to the pointer.
  follow(points, y, words) {
    const dot = svg("circle", this.root, { r: 3.5, fill: "var(--mark)", visibility: "hidden", "pointer-events": "none" });
    this.root.addEventListener("mousemove", event => {
      const time = this.time(this.place(event));
      const [at, value] = points.reduce((best, point) => Math.abs(point[0] - time) < Math.abs(best[0] - time) ? point : best);
      for (const [name, number] of Object.entries({ cx: this.x(at), cy: y(value) })) dot.setAttribute(name, number);
      dot.setAttribute("visibility", "visible");
      tip(this.root, words(at, value));
    });
    this.root.addEventListener("mouseleave", () => dot.setAttribute("visibility", "hidden"));
  }
  drag(down) {
    isDragging = true;
    const shade = svg("rect", this.root, { y: 0, height: this.height, fill: "var(--mark)", opacity: .2 });
    const ends = event => [this.place(down), this.place(event)].sort((a, b) => a - b);
    const move = event => {
      const [from, to] = ends(event);
      shade.setAttribute("x", from); shade.setAttribute("width", to - from);
    };
    const up = event => {
      removeEventListener("mousemove", move); removeEventListener("mouseup", up); shade.remove();
      isDragging = false;
      const [from, to] = ends(event), times = [this.time(from), this.time(to)];
      if (to - from > 3 && times[1] - times[0] > 1e-3) look(times);
    };
    addEventListener("mousemove", move); addEventListener("mouseup", up);
  }
}
function look(times) { view = times; drawCharts(); }
const colorOf = reset => reset.kind === "loss" ? "var(--bad)" : "var(--good)";
const LEFT = () => Math.min(150, byId("charts").clientWidth / 5);

function drawLanes() {
  const parent = byId("charts"), doing = colored(data.doings, DOING_COLORS);
  html("h2", parent, "What each worker did");
  const marks = [["×", "was lost", "var(--bad)"], ["", "failure", "var(--bad)"], ["", "workers arrive or leave as planned", "var(--good)"]];
  legend(parent, doing, data.slow.length ? [...marks, ["!", "found to be slow", "var(--syncs)"]] : marks);
  const row = data.workers.length > 30 ? 14 : 24, chart = new Chart(parent, 28 + row * data.workers.length, LEFT());
  chart.marks();
  data.workers.forEach((worker, number) => drawLane(chart, worker, 24 + number * row, row, doing));
  drawResetNumbers(chart);
}
function drawLane(chart, worker, y, row, doing) {
  const last = worker.spans.at(-1);
  tip(svg("text", chart.root, { x: chart.left - 8, y: y + row / 2 + 4, "text-anchor": "end" }, worker.name), `${worker.name} on ${worker.host}`);
  for (const [name, start, end, generation] of worker.spans) {
    if (!seen(start, end)) continue;
    const rank = worker.ranks[generation];
    chart.bar(start, end, y + row / 8, row * 3 / 4, doing[name], `${worker.name} on ${worker.host} ${name}\n${rank === undefined ? "" : `rank ${rank} in generation ${generation}, `}${clock(start, 2)} to ${clock(end, 2)} (${(end - start).toFixed(2)} s)`);
  }
  if (worker.cause && last && seen(last[2], last[2])) {
    const cross = svg("text", chart.root, { x: chart.x(last[2]), y: y + row / 2 + 7, "text-anchor": "middle", style: "fill:var(--bad);font-size:22px;font-weight:bold" }, "×");
    tip(cross, `${worker.name} was lost: ${worker.cause}`);
  }
  for (const slow of data.slow.filter(slow => `worker ${slow.worker}` === worker.name && seen(slow.at, slow.at))) {
    tip(svg("circle", chart.root, { cx: chart.x(slow.at), cy: y + row / 2, r: row / 3.5, fill: "var(--syncs)" }), slow.sentence);
    svg("text", chart.root, { x: chart.x(slow.at), y: y + row / 2 + 4, "text-anchor": "middle", style: "fill:var(--back);font-weight:bold;pointer-events:none" }, "!");
  }
}
function drawResetNumbers(chart) {
  let last = -99;
  data.resets.forEach((reset, number) => {
    if (!seen(reset.noticed, reset.noticed)) return;
    const at = Math.max(chart.x(reset.noticed), last + 19);
    last = at;
    tip(svg("circle", chart.root, { cx: at, cy: 10, r: 9, fill: colorOf(reset) }), `${reset.kind}: ${reset.reason}`);
    svg("text", chart.root, { x: at, y: 14, "text-anchor": "middle", style: "fill:var(--back);pointer-events:none" }, number + 1);
  });
}
function drawSize() {
  html("h2", byId("charts"), `Workers in the world, of at most ${data.maxNp}`);
  const chart = new Chart(byId("charts"), 70, LEFT()), y = chart.scale(0, Math.max(data.maxNp, 1));
  for (const [generation, size, start, end] of data.generations) {
    if (!seen(start, end)) continue;
    const from = chart.x(clip(start)), wide = chart.x(clip(end)) - from;
    chart.bar(start, end, y(size), chart.height - y(size), "var(--mark)", `generation ${generation}: ${plural(size, "worker")}, ${clock(start, 2)} to ${clock(end, 2)}`, { opacity: .55 });
    if (wide > 30) svg("text", chart.root, { x: from + wide / 2, y: chart.height - 6, "text-anchor": "middle", style: "pointer-events:none" }, wide > 100 ? `generation ${generation}` : generation);
  }
  chart.marks();
}
function drawSpeed() {
  if (!data.speeds.length) return;
  html("h2", byId("charts"), `${data.unit === "rows" ? "Rows" : "Steps"} a second, on all workers together`);
  const shown = data.speeds.filter(([start, end]) => seen(start, end));
  const chart = new Chart(byId("charts"), 90, LEFT()), y = chart.scale(0, Math.max(...shown.map(speed => speed[2]), 1e-9));
  for (const [start, end, speed] of shown) chart.bar(start, end, y(speed), chart.height - y(speed), "var(--trains)", `${amount(speed)} ${data.unit}/s at ${clock(start)}`, { opacity: .85 });
  chart.marks();
}
function drawMetric(parent, name, points, left) {
  html("h3", parent, points.length > 1 ? name : `${name}: ${amount(points[0][1])}`);
  const near = points.filter(([time]) => seen(time, time)), shown = near.length ? near : points, values = shown.map(point => point[1]);
  const chart = new Chart(parent, 90, left), y = chart.scale(Math.min(...values), Math.max(...values));
  if (near.length > 1) svg("polyline", chart.root, { points: near.map(([time, value]) => `${chart.x(time).toFixed(1)},${y(value).toFixed(1)}`).join(" "), fill: "none", stroke: "var(--mark)", "stroke-width": 1.6, "stroke-linejoin": "round" });
  if (near.length && near.length < 40) for (const [time, value] of near) svg("circle", chart.root, { cx: chart.x(time), cy: y(value), r: near.length > 1 ? 2.2 : 4, fill: "var(--mark)" });
  chart.marks();
  if (near.length) chart.follow(near, y, (at, value) => `${name} ${amount(value)} at ${clock(at)}`);
}
const cores = ({ samples }) => samples.slice(1).map(([time, seconds], i) => [time, (seconds - samples[i][1]) / Math.max(time - samples[i][0], 1e-3)]);
const USES = [
  ["CPU, in cores", cores],
  ["Memory, in GiB", worker => worker.samples.map(([time, , bytes]) => [time, bytes / 2 ** 30])],
  ["GPU, in percent", worker => worker.gpu.filter(([, , percent]) => percent !== null).map(([time, , percent]) => [time, percent])],
  ["GPU memory, in GiB", worker => worker.gpu.map(([time, bytes]) => [time, bytes / 2 ** 30])],
];
function drawUse() {
  const parent = byId("use"), shown = data.workers.filter(worker => worker.samples.length > 1 || worker.gpu.length);
  parent.replaceChildren();
  if (!shown.length) return;
  html("h2", parent, "What each worker's process uses");
  const color = worker => LINE_COLORS[data.workers.indexOf(worker) % LINE_COLORS.length];
  if (shown.length <= 12) legend(parent, Object.fromEntries(shown.map(worker => [worker.name, color(worker)])));
  const grid = html("div", parent, undefined, { class: "grid" });
  const uses = USES.map(([title, values]) => [title, shown.map(worker => [worker, values(worker)])]).filter(([, lines]) => lines.some(([, points]) => points.length));
  const cells = uses.map(() => html("div", grid));  // all of them first: the width of each depends on their number
  uses.forEach(([title, lines], number) => drawLines(cells[number], title, lines, color));
}
function drawLines(parent, title, lines, color) {
  html("h3", parent, title);
  const near = lines.map(([worker, points]) => [worker, points.filter(([time]) => seen(time, time))]);
  const chart = new Chart(parent, 110, 64), y = chart.scale(0, near.flatMap(([, points]) => points).reduce((most, [, value]) => Math.max(most, value), 1e-3));
  for (const [worker, points] of near) {
    if (!points.length) continue;
    const path = points.map(([time, value]) => `${chart.x(time).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
    svg("circle", chart.root, { cx: chart.x(points.at(-1)[0]), cy: y(points.at(-1)[1]), r: 3, fill: color(worker) });
    tip(svg("polyline", chart.root, { points: path, fill: "none", stroke: color(worker), "stroke-width": 2, "stroke-linejoin": "round" }), `${worker.name} on ${worker.host}: ${amount(points.at(-1)[1])} at ${clock(points.at(-1)[0])}`);
  }
  chart.marks();
}
function drawMetrics() {
  const parent = byId("metrics"), metrics = Object.entries(data.metrics), texts = Object.entries(data.texts);
  parent.replaceChildren();
  if (!metrics.length && !texts.length) return;
  html("h2", parent, "What rank 0 has reported");
  if (texts.length) html("p", parent, texts.map(([name, text]) => `${name}: ${text}`).join(" · "), { class: "soft" });
  const grid = html("div", parent, undefined, { class: "grid" });
  const cells = metrics.map(() => html("div", grid));  // all of them first: the width of each depends on their number
  metrics.forEach(([name, points], number) => drawMetric(cells[number], name, points, 64));
}
function drawCharts() {
  const height = byId("charts").offsetHeight;
  byId("charts").style.minHeight = `${height}px`;  // keeps the place that is read while charts are drawn again
  byId("charts").replaceChildren();
  drawLanes();
  drawSize();
  drawSpeed();
  drawMetrics();
  drawUse();
  byId("charts").style.minHeight = "";
}

// ---------------------------------------------------------------- tables and texts

function stacked(parent, parts, colors, whole, big) {
  const bar = html("div", parent, undefined, { class: big ? "bar big" : "bar" });
  for (const [name, seconds, text] of parts) tip(html("i", bar, undefined, { style: `background:${colors[name]};width:${100 * seconds / whole}%` }), text);
}
function drawStart() {
  const parent = byId("start"), waits = data.start.map(([name, start, end, detail]) => [name, end - start, detail]);
  parent.replaceChildren();
  if (!waits.length) return;
  const whole = waits.reduce((sum, wait) => sum + wait[1], 0), trains = data.generations.length > 0;
  html("h2", parent, trains || data.isOver ? `The start took ${whole.toFixed(1)} s` : `The start, ${whole.toFixed(1)} s so far`);
  const colors = colored(data.stages, STAGE_COLORS), sums = new Map();
  for (const [name, seconds, detail] of waits) sums.set(name, [(sums.get(name)?.[0] ?? 0) + seconds, detail]);
  const entries = [...sums].map(([name, [seconds, detail]]) => [name, seconds, detail]);
  stacked(parent, waits.map(([name, seconds, detail]) => [name, seconds, `${name}: ${seconds.toFixed(2)} s${detail ? `\n${detail} at its end` : ""}`]), colors, whole || 1, true);
  const words = html("p", parent, undefined, { class: "soft legend" });
  for (const [name, seconds] of entries) html("i", html("span", words), undefined, { style: `background:${colors[name]}` }).after(`${name} ${seconds.toFixed(2)} s`);
  const [name, , detail] = waits.at(-1);
  if (!data.isOver && !trains && detail) html("p", parent, `At present: ${name}; ${detail}.`);
}
function table(parent, names) {
  const element = html("table", html("div", parent, undefined, { class: "scroll" })), head = html("tr", element);
  for (const name of names) html("th", head, name);
  return element;
}
function drawSlow() {
  const parent = byId("slow");
  parent.replaceChildren();
  if (!data.slow.length && !data.tooSlow.length) return;
  html("h2", parent, "Slow workers");
  for (const sentence of data.tooSlow) html("p", parent, `${sentence[0].toUpperCase()}${sentence.slice(1)}.`);
  if (!data.slow.length) return;
  html("p", parent, 'A step waits for its slowest rank. With balance="auto" others take rows of it.', { class: "soft" });
  const element = table(parent, ["worker", "on", "since", "times as long for a row as other ranks", "part of a step"]);
  for (const slow of data.slow) {
    const row = html("tr", element);
    for (const text of [`rank ${slow.rank} (worker ${slow.worker})`, slow.host, clock(slow.at), slow.times_as_long.toFixed(1), slow.part]) html("td", row, text);
  }
}
function drawResets() {
  const parent = byId("resets");
  parent.replaceChildren();
  html("h2", parent, data.resets.length ? "Resets, and where their time went" : data.isOver ? "There were no resets" : "There has been no reset");
  if (!data.resets.length) return;
  html("p", parent, "A reset goes from the survivors' last commit to their first step in the new world. Seconds lost are those without work: all but that step.", { class: "soft" });
  const colors = colored(data.parts, PART_COLORS), sum = reset => Object.values(reset.parts).reduce((a, b) => a + b, 0);
  legend(parent, colors);
  const longest = Math.max(...data.resets.map(sum), 1e-9);
  const element = table(parent, ["", "at", "what", "workers", "seconds lost", "steps lost", "where the time went"]);
  data.resets.forEach((reset, number) => {
    const row = html("tr", element), parts = Object.entries(reset.parts);
    html("b", html("td", row, undefined, { class: "narrow" }), number + 1, { class: "number", style: `background:${colorOf(reset)}` });
    html("td", row, clock(reset.at), { class: "narrow" });
    html("td", row, reset.reason);
    html("td", row, `${reset.old_size} to ${reset.new_size}`, { class: "narrow" });
    html("td", row, reset.seconds_lost === null ? "–" : reset.seconds_lost.toFixed(3), { class: "number" });
    html("td", row, reset.steps_lost, { class: "number" });
    const cell = html("td", row, parts.length ? undefined : data.isOver ? "training did not go on" : "not over", { style: "width:38%" });
    stacked(cell, parts.map(([name, seconds]) => [name, seconds, `${name}: ${seconds.toFixed(3)} s`]), colors, longest);
    html("span", cell, parts.filter(part => part[1] >= .0005).map(([name, seconds]) => `${name} ${seconds.toFixed(3)}`).join(" · "), { class: "soft" });
  });
}
function drawWords() {
  const parent = byId("words");
  parent.replaceChildren();
  if (!data.words.length) return;
  html("h2", parent, "What workers said");
  for (const [title, text] of data.words) {
    const element = html("details", parent);
    html("summary", element, title);
    html("pre", element, text);
    element.open = opened.has(title);
    element.addEventListener("toggle", () => element.open ? opened.add(title) : opened.delete(title));
  }
}

// ---------------------------------------------------------------- the whole page

function draw() {
  document.title = `${data.title} · spark_elastic`;
  byId("content").hidden = data.waiting !== undefined;
  byId("headline").textContent = data.waiting ?? data.headline;
  byId("headline").classList.toggle("failed", data.failed === true);
  byId("run").textContent = data.waiting ? "" : `${data.title}, begun ${new Date(data.began * 1000).toLocaleString()}`;
  byId("unread").hidden = !data.unread;
  byId("unread").textContent = data.unread ?? "";
  if (data.waiting) return;
  byId("figures").replaceChildren();
  for (const [name, value] of data.figures) html("b", html("div", byId("figures")), value).after(name);
  drawStart();
  drawCharts();
  drawSlow();
  drawResets();
  drawWords();
}
addEventListener("mousemove", event => {
  const text = event.target.closest?.("[data-tip]")?.dataset.tip, box = byId("tip");
  box.style.display = text ? "block" : "none";
  box.textContent = text || "";
  box.style.left = Math.max(Math.min(event.clientX + 12, innerWidth - box.offsetWidth - 8), 8) + "px";
  box.style.top = Math.min(event.clientY + 14, innerHeight - box.offsetHeight - 8) + "px";
});
addEventListener("resize", () => data.waiting || drawCharts());

// ---------------------------------------------------------------- a page that is served

function say(kind, text) { byId("state").className = kind; byId("state").textContent = text; }
async function follow() {
  let version = data.live.version, run = data.title;
  const save = html("a", byId("top"), "Save this page", { href: "save", download: "" });
  for (;;) {
    save.hidden = data.waiting !== undefined;
    say(data.isOver ? "" : "live", data.isOver ? "over" : data.waiting ? "waiting" : data.live.silent ? data.live.silent : "live");
    await new Promise(wake => setTimeout(wake, 1000 * data.live.refresh));
    if (document.hidden || isDragging) continue;
    try {
      const answer = await fetch("facts.json", { cache: "no-store", headers: { "If-None-Match": version } });
      if (answer.status === 304) continue;
      if (!answer.ok) throw new Error(answer.status);
      data = await answer.json();
    } catch {
      say("gone", "the command that serves this page has ended, or cannot be reached");
      await new Promise(wake => setTimeout(wake, 5000));
      continue;
    }
    version = data.live.version;
    if (data.title !== run) view = null;
    run = data.title;
    draw();
  }
}
draw();
if (data.live) follow();
