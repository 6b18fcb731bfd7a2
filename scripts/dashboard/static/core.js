"use strict";
// What all screens share: elements, answers of the server, numbers as text, colours of versions.
// Text of a run is only ever set as text: `h` knows no other way.

const screens = {}; // name -> {title, open(main, params)}; open may return {refresh(), close()}
const EVERY_MS = 2000;
const embedded = readEmbedded(); // answers by key, in an exported report; null where a server answers

function readEmbedded() {
  const element = document.getElementById("answers");
  return element ? JSON.parse(element.textContent) : null;
}

/** An element: h("td", {class: "text", onclick: f}, "text", child). Strings become text. */
function h(tag, props, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (name === "value" || name === "checked" || name === "disabled") element[name] = value;
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  fill(element, children);
  return element;
}

function fill(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

function clear(element, ...children) {
  element.textContent = "";
  return fill(element, children);
}

/** The answer of a route. Throws an Error with the server's words. */
async function get(route, params) {
  if (embedded) {
    const key = [route, ...Object.entries(params || {}).map(([name, value]) => `${name}=${value}`).sort()].join("|");
    if (!(key in embedded)) throw new Error("this is not in the report; open the run itself with `make dashboard`");
    return embedded[key];
  }
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params || {})) {
    for (const one of Array.isArray(value) ? value : [value]) query.append(name, one);
  }
  const answer = await fetch(`api/${route}?${query}`);
  const data = await answer.json();
  if (!answer.ok) throw new Error(data.error || JSON.stringify(data.detail || data));
  return data;
}

/** metrics.jsonl of a run, kept up to date: `read()` fetches what has come since. */
const meanings = {}; // metric -> what it means, of docs/metrics.md

class Metrics {
  constructor(run, keys) {
    this.run = run;
    this.keys = keys;
    this.restart();
  }

  restart() {
    this.steps = new Map(); // step -> {key: value}
    this.names = new Set();
    this.offset = 0;
    this.identity = "";
  }

  /** True where something new has come. */
  async read() {
    let isNew = false;
    for (;;) {
      const page = await get("metrics", {run: this.run, keys: this.keys, offset: this.offset, identity: this.identity});
      if (page.is_new) this.restart();
      for (const [step, time, ...values] of page.rows) {
        const row = this.steps.get(step) || {step};
        row.time = time;
        this.keys.forEach((key, i) => { if (values[i] !== null) row[key] = values[i]; });
        this.steps.set(step, row);
      }
      page.names.forEach((name) => this.names.add(name));
      Object.assign(meanings, page.meanings);
      isNew = isNew || page.rows.length > 0 || page.is_new;
      this.offset = page.offset;
      this.identity = page.identity;
      if (!page.has_more || embedded) return isNew;
    }
  }

  get rows() {
    return [...this.steps.values()].sort((a, b) => a.step - b.step);
  }

  get latest() {
    return this.steps.size ? Math.max(...this.steps.keys()) : null;
  }

  /** [[x, value]] of one metric; x is another metric's value, or the step. */
  points(key, x = "step") {
    return this.rows.filter((row) => row[key] !== undefined && row[x] !== undefined).map((row) => [row[x], row[key]]);
  }

  last(key) {
    const points = this.points(key);
    return points.length ? points[points.length - 1][1] : null;
  }
}

// -- numbers as text --

function short(value) {
  if (value === null || value === undefined) return "-";
  const size = Math.abs(value);
  if (size >= 1e9) return value.toExponential(1);
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  if (Number.isInteger(value)) return String(value);
  if (size < 5e-4) return value.toExponential(1);
  return value.toFixed(size >= 100 ? 0 : size >= 1 ? 2 : 3);
}

const countOf = (number, noun, plural = `${noun}s`) => `${number} ${Number(number) === 1 ? noun : plural}`;
const percent = (value) => (value === null || value === undefined ? "-" : `${(100 * value).toFixed(0)}%`);
const seconds = (value) => (value === null || value === undefined ? "-" : value < 1 ? `${(1000 * value).toFixed(0)} ms` : `${value.toFixed(2)} s`);
const clock = (time) => (time === null || time === undefined ? "-" : new Date(1000 * time).toLocaleString());

// -- colours --

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Versions that follow one another are far apart on the wheel, and a version has one colour everywhere. */
const hue = (version) => Math.round((version * 137.508 + 210) % 360);
const barColour = (version, tone) => (version === null ? css("--muted") : `hsl(${hue(version)} ${tone})`);
const tokenColour = (version) => `hsl(${hue(version)} ${css("--token")})`;

/** Of a part of a step: wait, train, or another. */
function partColour(part) {
  if (part === "wait") return css("--line");
  return `hsl(${{train: 215, update: 160}[part] || 40} ${css("--token")})`;
}

/** Every other version is striped as well, so that neighbours differ without their colours. */
const isStriped = (version) => version !== null && version % 2 === 1;
const stripesOf = (version) => (isStriped(version) ? "striped" : null);

/** A bar of a picture in the colour of its version, with its stripes, and with its name where there is room. */
function versionBar(context, version, tone, x, y, width, height) {
  context.fillStyle = barColour(version, tone);
  context.fillRect(x, y, width, height);
  if (isStriped(version) && width > 3) {
    context.fillStyle = css("--card");
    context.globalAlpha = 0.45;
    for (let at = x + 2; at < x + width; at += 5) context.fillRect(at, y, Math.min(1.5, x + width - at), height);
    context.globalAlpha = 1;
  }
  const name = `v${version}`;
  if (version === null || height < 10 || width < context.measureText(name).width + 8) return;
  context.fillStyle = css("--card");
  context.fillRect(x + 2, y, context.measureText(name).width + 4, height);
  context.fillStyle = css("--ink");
  context.fillText(name, x + 4, y + height / 2 + 4);
}

function versionLegend(versions) {
  const tone = css("--bar");
  const shown = versions.slice(0, 24);
  return h("div", {class: "legend", "aria-label": "colours and stripes of versions"},
    shown.map((version) => h("span", null, h("i", {class: stripesOf(version), style: {backgroundColor: barColour(version, tone)}}), `v${version}`)),
    versions.length > shown.length ? h("span", null, `and ${versions.length - shown.length} more`) : null);
}

// -- pieces of screens --

function card(title, ...children) {
  return h("section", {class: "card"}, title ? h("h2", null, title) : null, children);
}

/** A mark that explains on hover and on focus. */
function explained(text) {
  const show = (event) => { const box = event.target.getBoundingClientRect(); showTip(text, box.left, box.bottom - 8); };
  return h("button", {class: "why", "aria-label": text, onmouseenter: show, onfocus: show,
    onmouseleave: () => showTip(null), onblur: () => showTip(null)}, "?");
}

/** What metrics are called in metrics.jsonl, and what they mean. rows: [[name, key]]. */
function explain(rows) {
  return rows.map(([name, key]) => `${name === key ? "" : `${name}: `}${key}${meanings[key] ? ` \u2013 ${meanings[key]}` : ""}`).join("\n");
}

function problem(error) {
  return h("section", {class: "card error", role: "alert"}, error.message);
}

function table(heads, rows, empty = "nothing") {
  if (!rows.length) return h("p", {class: "muted"}, empty);
  const head = heads.map((one) => h("th", {scope: "col"}, one));
  return h("div", {class: "scroll"}, h("table", null, h("thead", null, h("tr", null, head)),
    h("tbody", null, rows.map((row) => (row instanceof Node ? row : h("tr", null, row.map((cell) => h("td", null, cell))))))));
}

/** A list to choose from. options: [[value, name]]; choose(value): called once a choice is made. */
function choice(label, options, value, choose) {
  const select = h("select", {"aria-label": label, onchange: () => choose(select.value)}, options.map(([one, name]) => h("option", {value: one}, name)));
  select.value = value;
  return select;
}

const axisChoice = (x, choose) => choice("over", [["step", "over steps"], ["timing_s/elapsed", "over seconds"]], x, choose);

/** A button that goes to the number so many places after `at`, where there is one. */
function walk(numbers, at, by, name, go) {
  const number = numbers[numbers.indexOf(at) + by];
  return h("button", {disabled: number === undefined, onclick: () => go(number)}, name);
}

/** Where a page of a table is in the whole, and the pages beside it. */
function pager(screen, data, asked) {
  const go = (offset) => { location.hash = to(screen, {...asked, offset}); };
  return h("div", {class: "controls"}, h("button", {disabled: data.offset === 0, onclick: () => go(Math.max(0, data.offset - data.page))}, "previous"),
    `${data.total ? data.offset + 1 : 0} to ${data.offset + data.rows.length} of ${data.total}`,
    h("button", {disabled: data.offset + data.rows.length >= data.total, onclick: () => go(data.offset + data.page)}, "next"));
}

/** The address of a screen, of the run that is shown. */
function to(screen, params) {
  return `#${screen}?${new URLSearchParams({run: currentRun(), ...params})}`;
}

function currentRun() {
  return document.getElementById("run").value;
}

/** Whether the run that is shown is known to be over: what it has left open goes on no more. */
const isOver = () => runStatus !== null && !["starting", "running", "silent"].includes(runStatus.state);

const OVER = {finished: "finished", failed: "failed", stopped: "was stopped", killed: "was killed"};

/** "the run failed (the error)", "the run is starting (loading models)": the state as a sentence, for a screen that has nothing. */
const stateOfRun = () => `the run ${OVER[runStatus.state] || `is ${runStatus.state}`}${runStatus.detail ? ` (${runStatus.detail})` : ""}`;

/** Why a screen of steps has nothing. */
const noStep = () => `no step has been recorded${runStatus ? `: ${stateOfRun()}` : " yet"}`;

function say(text) {
  document.getElementById("status").textContent = text;
}

function showTip(text, x, y) {
  const tip = document.getElementById("tip");
  tip.hidden = text === null;
  if (text === null) return;
  tip.textContent = text;
  tip.style.left = `${Math.max(4, Math.min(x + 14, window.innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${Math.max(4, Math.min(y + 14, window.innerHeight - tip.offsetHeight - 8))}px`;
}

/** Arrow keys up and down choose one of what a picture shows, Enter opens it, Escape chooses none. choose(by): null ends. */
function listenToKeys(element, {choose, open, more}) {
  element.tabIndex = 0;
  element.addEventListener("keydown", (event) => {
    const act = {ArrowUp: () => choose(-1), ArrowDown: () => choose(1), Escape: () => choose(null), Enter: open, ...more}[event.key];
    if (act) { event.preventDefault(); event.stopPropagation(); act(); }
  });
  element.addEventListener("blur", () => choose(null));
}

/** A canvas of this height that is drawn again when its width or the theme changes. draw(context, width, height). */
function canvas(height, label, draw) {
  const element = h("canvas", {role: "img", "aria-label": label, style: {height: `${height}px`}});
  const redraw = () => {
    const width = element.clientWidth;
    if (!width) return;
    const ratio = window.devicePixelRatio || 1;
    element.width = Math.round(width * ratio);
    element.height = Math.round(element.clientHeight * ratio);
    const context = element.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, element.clientHeight);
    draw(context, width, element.clientHeight);
  };
  new ResizeObserver(redraw).observe(element);
  element.redraw = redraw;
  return element;
}
