"use strict";
// Every metric of the run, own ones included, with a filter.

const METRICS_SHOWN = 24;
const MANY_STEPS = 40; // a run of more steps is smoothed unless the address says otherwise
const MOST_SMOOTHING = 0.99;

screens.metrics = {
  title: "Metrics",
  async open(main, params) {
    const text = params.get("text") || "", x = params.get("x") || "step", offset = Number(params.get("offset") || 0);
    const all = new Metrics(currentRun(), []);
    await all.read();
    const look = {smoothing: smoothingOf(params.get("smoothing"), all.steps.size), isLog: params.get("log") === "true"};
    const address = (change) => to("metrics", {text, x, offset: 0, smoothing: look.smoothing, log: look.isLog, ...change});
    const go = (change) => { location.hash = address(change); };
    const keep = () => history.replaceState(null, "", address({offset})); // opens nothing anew: the control stays in hand
    const matches = matcher(text);
    const names = [...all.names].sort();
    const chosen = names.filter(matches);
    const shown = chosen.slice(offset, offset + METRICS_SHOWN);
    const metrics = await metricsOf(names, shown, x);
    const charts = h("div", {class: "grid"});
    const filter = h("input", {type: "search", value: text, placeholder: "part of a name or a pattern", "aria-label": "filter", onchange: () => go({text: filter.value})});
    const axis = axisChoice(x, (over) => go({x: over, offset}));
    const families = [...new Set(names.map((name) => name.split("/")[0]))];
    clear(main, h("h1", null, "Metrics"), h("div", {class: "controls"}, filter, axis, `${chosen.length} of ${names.length} metrics`,
      lookControls(look, () => draw(), keep),
      h("button", {disabled: offset === 0, onclick: () => go({offset: Math.max(0, offset - METRICS_SHOWN)})}, "previous"),
      h("button", {disabled: offset + METRICS_SHOWN >= chosen.length, onclick: () => go({offset: offset + METRICS_SHOWN})}, "next")),
    h("div", {class: "controls", role: "group", "aria-label": "families"}, ["", ...families].map((family) => h("button", {
      "aria-pressed": text === (family && `^${family}/`) ? "true" : "false", onclick: () => go({text: family && `^${family}/`})}, family || "all"))),
    charts);
    const draw = () => clear(charts, shown.length ? shown.map((name) => lines(name, [{name, key: name, points: metrics.points(name, x), colour: "--s0",
      dots: isOfEvaluation(name)}], {zero: false, xName: x === "step" ? "step" : "second", canSave: true, ...look}))
      : card(null, names.length ? "no metric matches" : noStep()));
    draw();
    return {async refresh() {
      if (!await metrics.read()) return;
      if ([...metrics.names].some((name) => !names.includes(name) && matches(name))) return reopen();
      draw();
    }};
  },
};

function smoothingOf(text, numSteps) {
  const value = text === null ? NaN : Number(text);
  return value >= 0 && value <= MOST_SMOOTHING ? value : numSteps > MANY_STEPS ? 0.9 : 0;
}

/** The controls of all charts: a moving average and a logarithmic axis. keep(): called once a choice is made. */
function lookControls(look, draw, keep) {
  const output = h("output", null, look.smoothing.toFixed(2));
  const smoothing = h("input", {type: "range", min: 0, max: MOST_SMOOTHING, step: 0.01, value: look.smoothing,
    oninput: () => { look.smoothing = Number(smoothing.value); clear(output, look.smoothing.toFixed(2)); draw(); },
    onchange: keep});
  const log = h("input", {type: "checkbox", checked: look.isLog, onchange: () => { look.isLog = log.checked; draw(); keep(); }});
  return [h("label", {class: "control"}, "smoothing", smoothing, output, explained("An exponential moving average over the steps: each value is this fraction of the "
    + "average before it, and the rest itself. The faint line is what was recorded. At 0, nothing is smoothed; results of evaluations never are.")),
  h("label", {class: "control"}, log, "logarithmic axis")];
}

const isOfEvaluation = (name) => name === "eval/accuracy" || name.startsWith("val/");

/** Whether a name has the text, in any case, or matches it as a pattern. */
function matcher(text) {
  let pattern = null;
  try { pattern = new RegExp(text, "i"); } catch (error) { if (!(error instanceof SyntaxError)) throw error; }
  const part = text.toLowerCase();
  return (name) => name.toLowerCase().includes(part) || (pattern !== null && pattern.test(name));
}

/** The values of some metrics. A report has them in parts of METRICS_SHOWN names. */
async function metricsOf(names, shown, x) {
  if (!embedded) {
    const metrics = new Metrics(currentRun(), [...new Set([...shown, "timing_s/elapsed"])]);
    await metrics.read();
    return metrics;
  }
  const whole = new Metrics(currentRun(), []);
  for (let first = 0; first < names.length; first += METRICS_SHOWN) {
    const part = new Metrics(currentRun(), names.slice(first, first + METRICS_SHOWN));
    await part.read();
    for (const [step, row] of part.steps) whole.steps.set(step, {...whole.steps.get(step), ...row});
  }
  return whole;
}
