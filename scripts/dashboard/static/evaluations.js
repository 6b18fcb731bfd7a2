"use strict";
// The accuracy over the run, and the samples of one evaluation.

const SAMPLES = {all: "all samples", right: "right answers", wrong: "wrong answers", failed: "with an error"};

screens.evaluations = {
  title: "Evaluations",
  async open(main, params) {
    const {versions, holds_out: holdsOut} = await get("evaluations", {run: currentRun()});
    const all = new Metrics(currentRun(), []);
    await all.read();
    const names = [...all.names].filter(isOfEvaluation).sort();
    const metrics = new Metrics(currentRun(), names);
    if (names.length) await metrics.read();
    const charts = names.length ? h("div", {class: "grid"}, names.map((name) => lines(name, [{name, key: name, points: metrics.points(name), colour: "--s1", dots: true}]))) : null;
    const isNews = async () => { if ((await get("evaluations", {run: currentRun()})).versions.length !== versions.length && params.get("version") === null) reopen(); };
    if (!versions.length) {
      const why = holdsOut ? `no evaluation has been recorded${runStatus ? `: ${stateOfRun()}` : ""}` : "this run has no held-out set (data.val_files=none): nothing is evaluated";
      clear(main, h("h1", null, "Evaluations"), charts, card(null, why));
      return embedded ? null : {refresh: isNews};
    }
    const asked = {version: Number(params.get("version") || versions[versions.length - 1]), which: params.get("which") || "all",
      text: params.get("text") || "", offset: Number(params.get("offset") || 0)};
    const data = await get("evaluation", {run: currentRun(), ...asked});
    clear(main, h("h1", null, `Evaluation of v${asked.version}`), sampleControls(asked, versions),
      card("Accuracy by data source", table(["source", "accuracy", "samples", "prompts", "failed", "mean tokens"], data.sources.map((one) => [
        one.name || "(none)", meter(one.accuracy, 0, 1), one.samples, one.prompts, one.failed ? h("span", {class: "bad"}, one.failed) : 0, short(one.tokens)]))),
      charts, card("Samples", sampleTable(data), pager("evaluations", data, asked), data.damaged ? h("p", {class: "bad"}, `damaged lines in the file: ${data.damaged}`) : null));
    const at = versions.indexOf(asked.version);
    const go = (by) => () => { if (versions[at + by] !== undefined) location.hash = to("evaluations", {...asked, offset: 0, version: versions[at + by]}); };
    return {...(embedded ? {} : {refresh: isNews}), keys: {n: go(1), p: go(-1)}};
  },
};

function sampleControls(asked, versions) {
  const go = (change) => { location.hash = to("evaluations", {...asked, offset: 0, ...change}); };
  const text = h("input", {type: "search", value: asked.text, placeholder: "text of prompt, response or source", "aria-label": "filter", onchange: () => go({text: text.value})});
  const beside = (by, name) => walk(versions, asked.version, by, name, (version) => go({version}));
  return h("div", {class: "controls"}, beside(-1, "earlier"),
    choice("version", versions.map((value) => [value, `v${value}`]), asked.version, (version) => go({version})), beside(1, "later"),
    choice("which samples", Object.entries(SAMPLES), asked.which, (which) => go({which})), text, h("span", {class: "muted"}, "keys: n for later, p for earlier"));
}

function sampleTable(data) {
  return table(["number", "reward", "prompt", "response", "answer", "reference", "tokens", "source"], data.rows.map((row) => [
    row.index ? `${row.ordinal}.${row.index}` : row.ordinal, short(row.accuracy), folded(row.prompt), [folded(row.response), row.error ? h("p", {class: "bad"}, row.error) : null],
    row.answer === null ? "-" : brief(row.answer), brief(row.truth), row.tokens, row.source]), "no sample matches");
}

const brief = (text) => (text.length < 40 ? text : clipped(text));

/** A few lines of a text, and all of it when it is opened. */
function folded(text) {
  if (text.length < 200) return clipped(text);
  return h("details", {class: "folded"}, h("summary", null, clipped(text)), h("div", {class: "text-block", tabindex: 0}, text));
}
