"use strict";
// Chooses the screen by the address, and asks for news while the page is seen.

const ORDER = ["pulse", "timeline", "anatomy", "groups", "trajectory", "fleet", "files", "compare"];
let pulseKeys = [];
let runNames = [];
let opened = null; // what the screen gave: refresh
let turn = 0; // counts openings, so that an answer that comes late is dropped
let isBusy = false;

async function start() {
  try {
    const known = await get("runs", {});
    pulseKeys = known.keys;
    runNames = known.runs.map((run) => run.name);
    const select = document.getElementById("run");
    clear(select, known.runs.map((run) => h("option", {value: run.name, title: run.folder}, run.name)));
    select.addEventListener("change", () => { location.hash = to(where().name, {}); });
  } catch (error) {
    return clear(document.getElementById("main"), problem(error));
  }
  window.addEventListener("hashchange", reopen);
  document.addEventListener("keydown", byKey);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
    document.querySelectorAll("canvas").forEach((one) => one.redraw()));
  await reopen();
  if (!embedded) setInterval(refresh, EVERY_MS);
  return null;
}

function where() {
  const [name, query] = location.hash.slice(1).split("?");
  return {name: screens[name] ? name : "pulse", params: new URLSearchParams(query || "")};
}

async function reopen() {
  const {name, params} = where();
  const mine = ++turn;
  const select = document.getElementById("run");
  if (runNames.includes(params.get("run"))) select.value = params.get("run");
  clear(document.getElementById("nav"), ORDER.map((one, i) => h("a", {href: to(one, {}), "aria-current": one === name ? "page" : null,
    title: `key ${i + 1}`}, screens[one].title)));
  document.title = `${screens[name].title} · ${currentRun()} · slipstream`;
  showTip(null);
  opened = null;
  const main = h("div");
  document.getElementById("main").setAttribute("aria-busy", "true");
  let screen = null;
  try {
    screen = await screens[name].open(main, params);
  } catch (error) {
    clear(main, h("h1", null, screens[name].title), problem(error));
    if (!(error instanceof TypeError)) screen = null; else console.error(error);
  }
  if (mine !== turn) return;
  clear(document.getElementById("main"), main);
  document.getElementById("main").setAttribute("aria-busy", "false");
  document.body.dataset.screen = name;
  performance.mark("shown");
  main.querySelectorAll("canvas").forEach((one) => one.redraw());
  opened = screen && screen.refresh ? screen : null;
}

async function refresh() {
  if (!opened || isBusy || document.hidden) return;
  isBusy = true;
  const mine = turn;
  try {
    await opened.refresh();
    if (mine === turn && document.getElementById("status").textContent.startsWith("no answer")) say("");
  } catch (error) {
    say(`no answer: ${error.message}`);
  } finally {
    isBusy = false;
  }
}

function byKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName)) return;
  const name = ORDER[Number(event.key) - 1];
  if (name) location.hash = to(name, {});
}

start();
