"use strict";
// Chooses the screen by the address, and asks for news while the page is seen.

const ORDER = ["pulse", "timeline", "anatomy", "groups", "trajectory", "fleet", "files", "compare", "metrics", "evaluations", "runs"];
const KEYS = "1234567890r"; // the keys of these screens
const RUNS_EVERY_MS = 10000;
let pulseKeys = [];
let runs = []; // as `list_of_runs` has them
let runStatus = null; // of the run that is shown
let opened = null; // what the screen gave: refresh, keys
let turn = 0; // counts openings, so that an answer that comes late is dropped
let isBusy = false;

async function start() {
  try {
    await readRuns();
    document.getElementById("run").addEventListener("change", () => { location.hash = to(where().name, {}); });
  } catch (error) {
    return clear(document.getElementById("main"), problem(error));
  }
  window.addEventListener("hashchange", reopen);
  document.addEventListener("keydown", byKey);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
    document.querySelectorAll("canvas").forEach((one) => one.redraw()));
  await reopen();
  if (!embedded) {
    setInterval(refresh, EVERY_MS);
    setInterval(() => { if (!document.hidden) readRuns().catch(() => {}); }, RUNS_EVERY_MS);
  }
  return null;
}

/** The runs that there are now, for the chooser; the one that is shown stays. */
async function readRuns() {
  const known = await get("runs", {});
  const select = document.getElementById("run"), shown = select.value;
  pulseKeys = known.keys;
  Object.assign(meanings, known.meanings);
  runs = known.runs;
  const name = (run) => `${run.name}${run.status ? ` \u2013 ${run.status.state}` : ""}`;
  if ([...select.options].map((one) => one.text).join("\n") === runs.map(name).join("\n")) return;
  clear(select, runs.map((run) => h("option", {value: run.name, title: run.folder}, name(run))));
  if (isRun(shown)) select.value = shown;
}

const isRun = (name) => runs.some((run) => run.name === name);

/** The line that every screen has: the state of the run, its step, and when it was last heard of. */
async function readStatus() {
  const run = currentRun(), line = document.getElementById("state");
  const found = await get("status", {run});
  if (run !== currentRun()) return;
  runStatus = found;
  line.dataset.step = found.step === null ? "" : found.step;
  const ago = found.updated === null ? null : Math.max(0, Math.round(found.now - found.updated));
  const updated = ago === null ? "" : embedded ? `last update ${clock(found.updated)}` : `last update ${clock(found.updated)}, ${ago < 120 ? `${ago} s` : `${Math.round(ago / 60)} min`} ago`;
  clear(line, h("b", {class: `state ${found.state}`}, found.state), " ", h("span", {class: "sentence", title: found.text}, found.text), " ", h("span", {class: "muted"}, updated));
}

function where() {
  const [name, query] = location.hash.slice(1).split("?");
  return {name: screens[name] ? name : "pulse", params: new URLSearchParams(query || "")};
}

async function reopen() {
  const {name, params} = where();
  const mine = ++turn;
  const select = document.getElementById("run");
  const wanted = params.get("run");
  if (wanted !== null && !isRun(wanted) && !embedded) await readRuns().catch(() => {}); // it may have begun just now
  const isUnknown = wanted !== null && !isRun(wanted);
  if (wanted !== null && !isUnknown) select.value = wanted;
  clear(document.getElementById("nav"), ORDER.map((one, i) => h("a", {href: to(one, {}), "aria-current": one === name ? "page" : null,
    title: `key ${KEYS[i]}`}, screens[one].title)));
  document.title = `${screens[name].title} · ${currentRun()} · slipstream`;
  showTip(null);
  opened = null;
  const main = h("div");
  document.getElementById("main").setAttribute("aria-busy", "true");
  let screen = null;
  try {
    if (isUnknown) throw new Error(`run=${wanted}: there is no such run here`);
    await readStatus();
    screen = await screens[name].open(main, params);
  } catch (error) {
    clear(main, h("h1", null, screens[name].title), problem(error), waysBack(name));
    if (!(error instanceof TypeError)) screen = null; else console.error(error);
  }
  if (mine !== turn) return;
  clear(document.getElementById("main"), main);
  document.getElementById("main").setAttribute("aria-busy", "false");
  document.body.dataset.screen = name;
  performance.mark("shown");
  main.querySelectorAll("canvas").forEach((one) => one.redraw());
  opened = screen || null;
}

/** Where to go from a page that has only an error. */
function waysBack(name) {
  return h("p", {class: "controls"}, h("a", {href: to(name, {})}, `${screens[name].title} of ${currentRun()}`),
    name === "pulse" ? null : h("a", {href: to("pulse", {})}, `Pulse of ${currentRun()}`), h("a", {href: to("runs", {})}, "all runs"));
}

async function refresh() {
  if (isBusy || document.hidden) return;
  isBusy = true;
  const mine = turn;
  try {
    await readStatus();
    if (mine === turn && opened && opened.refresh) await opened.refresh();
    if (mine === turn && document.getElementById("status").textContent.startsWith("no answer")) say("");
  } catch (error) {
    say(`no answer: ${error.message}`);
  } finally {
    isBusy = false;
  }
}

function byKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName)) return;
  if (opened && opened.keys && opened.keys[event.key]) return opened.keys[event.key]();
  const name = ORDER[KEYS.indexOf(event.key)];
  if (name) location.hash = to(name, {});
  return null;
}

start();
