"use strict";
// Two runs over each other, by step or by time.

const COMPARED = ["critic/rewards/mean", "eval/accuracy", "perf/throughput/trained", "perf/trainer_idle", "perf/replica_idle",
  "staleness/max", "weight_sync/pause_ms", "response_length/mean", "actor/entropy", "actor/ess", "actor/pg_clipfrac"];
// Only replays have them.
const OF_REPLAYS = ["replay/gradient_cosine", "replay/weights_distance", "replay/masked_fraction", "replay/logprob_difference"];

screens.compare = {
  title: "Compare",
  async open(main, params) {
    const names = runs.map((run) => run.name).filter((name) => name !== currentRun());
    if (!names.length) return clear(main, h("h1", null, "Compare"), card(null, ["there is no other run in this folder; name two with run=A run=B. All metrics of this one are on the screen ", h("a", {href: to("metrics", {})}, "Metrics")]));
    const other = params.get("with") || names[0];
    const x = params.get("x") || "step";
    const more = params.get("key") || "";
    const keys = [...new Set([...pulseKeys, ...OF_REPLAYS, ...(more ? [more] : [])])];
    const [ours, theirs] = [new Metrics(currentRun(), keys), new Metrics(other, keys)];
    const charts = h("div", {class: "grid"});
    const go = (change) => { location.hash = to("compare", {with: other, x, ...(more ? {key: more} : {}), ...change}); };
    const select = choice("the other run", names.map((name) => [name, name]), other, (name) => go({with: name}));
    const axis = axisChoice(x, (over) => go({x: over}));
    const key = h("input", {list: "names", value: more, placeholder: "add a metric", "aria-label": "add a metric", onchange: () => go({key: key.value})});
    const list = h("datalist", {id: "names"});
    const draw = () => {
      clear(list, [...ours.names].map((name) => h("option", {value: name})));
      const some = OF_REPLAYS.filter((name) => [ours, theirs].some((one) => one.points(name, x).length));
      clear(charts, [...(more ? [more] : []), ...COMPARED, ...some].map((name) => lines(name, [
        {name: currentRun(), points: ours.points(name, x), colour: "--s0", dots: name === "eval/accuracy"},
        {name: other, points: theirs.points(name, x), colour: "--s1", dots: name === "eval/accuracy"}],
      {zero: false, xName: x === "step" ? "step" : "second"})));
    };
    const [, , config, otherConfig, ...states] = await Promise.all([ours.read(), theirs.read(), get("config", {run: currentRun()}), get("config", {run: other}),
      get("status", {run: currentRun()}), get("status", {run: other})]);
    clear(main, h("h1", null, "Compare"), h("div", {class: "controls"}, `${currentRun()} compared with`, select, axis, key, list),
      ...states.filter((state) => state.detail.startsWith("replay of ")).map((state) => card(null, [state.detail])),
      card("Config keys that differ", differences(config.keys, otherConfig.keys, other)), card("At their last step", comparison(ours, theirs, other)), charts);
    draw();
    return {async refresh() { if ((await Promise.all([ours.read(), theirs.read()])).some(Boolean)) draw(); }};
  },
};

function comparison(ours, theirs, other) {
  return table(["metric", currentRun(), other], [["step", short(ours.latest), short(theirs.latest)],
    ...[...COMPARED, ...OF_REPLAYS].map((name) => [name, short(ours.last(name)), short(theirs.last(name))])]);
}

/** Keys of the configs whose values differ; those that only one of them has, too. */
function differences(ours, theirs, other) {
  const names = [...new Set([...Object.keys(ours), ...Object.keys(theirs)])].sort();
  return table(["key", currentRun(), other], names.filter((name) => ours[name] !== theirs[name])
    .map((name) => [name, ours[name] === undefined ? "-" : ours[name], theirs[name] === undefined ? "-" : theirs[name]]), "none");
}
