"use strict";
// Is it learning, is it async, who waits for whom, and what to change.

screens.pulse = {
  title: "Pulse",
  async open(main, params) {
    const metrics = new Metrics(currentRun(), pulseKeys);
    const advice = h("section", {class: "card advice", "aria-live": "polite"}, "…");
    const tiles = h("div", {class: "tiles"});
    const charts = h("div", {class: "grid"});
    clear(main, h("h1", null, "Pulse"), advice, tiles, h("p", {class: "muted note"}, `Throughput, idle time, pauses and step times are means of the last ${MEAN_STEPS} steps. `
      + "Faint lines show every step, strong lines a moving mean. Drag in a chart to zoom in, double-click to see everything. All other metrics are on the screen ",
    h("a", {href: to("metrics", {})}, "Metrics"), "."), charts);
    let isPending = false, told = ""; // what charts without a step say
    const advise = async () => {
      const given = await get("advice", {run: currentRun()});
      isPending = given.is_pending;
      clear(advice, given.text, h("p", {class: "muted"}, given.about, isPending ? " A prediction is being worked out." : ""));
    };
    const refresh = async (first) => {
      const isNew = await metrics.read(), now = runStatus ? `${runStatus.state} ${runStatus.step === null ? runStatus.detail : ""}` : "";
      const isOther = now !== told;
      told = now;
      if (!isNew && !isOther && !first) return isPending ? advise() : null;
      fillTiles(tiles, metrics);
      const stale = await get("staleness", {run: currentRun(), step: 0});
      const names = [...metrics.names].sort(), ofSources = names.filter((name) => OF_SOURCE.test(name));
      clear(charts, pulseCharts(metrics, stale), ofSources.length ? sourceCharts(await metricsOf(names, ofSources, "step"), ofSources) : []);
      return advise();
    };
    await refresh(true);
    return {refresh: () => refresh(false)};
  },
};

const MEAN_STEPS = 20;
const OF_SOURCE = /^sources\/([^/]+)\/(score|response_length|staleness_mean|trained_groups)$/;
const SOURCE_TITLES = {score: "Reward by source", response_length: "Response length by source, tokens",
  staleness_mean: "Mean staleness by source, versions", trained_groups: "Trained groups by source"};

/** A chart for each of SOURCE_TITLES, with a line for each source of data.sources. */
function sourceCharts(metrics, keys) {
  return Object.entries(SOURCE_TITLES).map(([what, title]) => lines(title, keys.map((key) => [key, OF_SOURCE.exec(key)])
    .filter(([, match]) => match[2] === what)
    .map(([key, match], place) => ({name: match[1], key, points: metrics.points(key), colour: `--s${place % 4}`}))));
}

function fillTiles(tiles, metrics) {
  const last = (key) => metrics.last(key);
  const mean = (key) => {
    const values = metrics.points(key).slice(-MEAN_STEPS).map((point) => point[1]);
    return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
  };
  const tile = (name, value, keys, how) => h("div", {class: "tile"}, h("span", null, name, " ", explained([how, explain(keys.map((key) => [key, key]))].filter(Boolean).join("\n"))), h("b", null, value));
  const latest = "in the latest step", average = `mean of the last ${MEAN_STEPS} steps`;
  const stale = last("staleness/max"), pause = mean("weight_sync/pause_ms");
  clear(tiles,
    tile("reward", short(last("critic/rewards/mean")), ["critic/rewards/mean"], latest),
    tile("accuracy", isUnevaluated(metrics) ? "no evaluation" : short(last("eval/accuracy")), ["eval/accuracy"], "in the latest evaluation"),
    tile("tokens/s sampled", short(mean("perf/throughput/generated")), ["perf/throughput/generated"], average),
    tile("tokens/s trained", short(mean("perf/throughput/trained")), ["perf/throughput/trained"], average),
    tile("trainer idle", percent(mean("perf/trainer_idle")), ["perf/trainer_idle"], average),
    tile("replicas idle", percent(mean("perf/replica_idle")), ["perf/replica_idle"], average),
    tile("largest staleness", stale === null ? "-" : countOf(short(stale), "version"), ["staleness/max"], latest),
    tile("pause per update", pause === null ? "-" : `${short(pause)} ms`, ["weight_sync/pause_ms"], average),
    tile("step time", seconds(mean("timing_s/step")), ["timing_s/step"], average),
    tile("slots: busy / ready / free",
      ["inflight_groups", "ready_groups", "free_slots"].map((name) => short(last(`rollout/${name}`))).join(" / "),
      ["rollout/inflight_groups", "rollout/ready_groups", "rollout/free_slots"], latest));
}

/** True for a run with rollouts and steps that has no evaluation: one with a held-out set begins with one. */
const isUnevaluated = (metrics) => metrics.last("critic/rewards/mean") !== null && metrics.last("eval/accuracy") === null;

function nothingYet() {
  if (runStatus === null) return "nothing recorded yet";
  return isOver() ? `nothing was recorded: the run ${OVER[runStatus.state]} before its first step` : `nothing recorded yet: ${stateOfRun()}`;
}

/** Why a chart has nothing: the run has no step, or no group of the steps had a gradient. */
function whyEmpty(metrics, series) {
  if (metrics.latest === null || !metrics.points("timing_s/step").length) return nothingYet();
  const flat = metrics.last("rollout/zero_variance_groups");
  if (flat === 1 && series.some((one) => (one.key || "").startsWith("actor/"))) return "no group had a gradient, because the rewards within every group were equal";
  const shown = series.map((one) => one.key).filter(Boolean).join(", ");
  return `this run has not recorded ${shown || "it"}`;
}

function pulseCharts(metrics, stale) {
  const of = (name, key, colour, more) => ({name, key, points: metrics.points(key), colour, ...more});
  const chart = (title, series, options) => lines(title, series, {empty: whyEmpty(metrics, series), ...options});
  const learned = [of("training", "actor/ce_loss", "--s0"), of("validation", "eval/ce_loss", "--s1", {dots: true})];
  return [
    ...(learned.some((line) => line.points.length) ? [chart("Cross-entropy of conversations, nats", learned)] : []),
    chart("Reward and held-out accuracy", [
      of("reward", "critic/rewards/mean", "--s0"), of("accuracy", "eval/accuracy", "--s1", {dots: true})]),
    chart("Tokens per second", [
      of("sampled", "perf/throughput/generated", "--s0"), of("trained", "perf/throughput/trained", "--s2")]),
    chart("Idle time", [
      of("trainer", "perf/trainer_idle", "--s1"), of("replicas", "perf/replica_idle", "--s0")], {format: percent}),
    bars(`Staleness of the tokens of step ${stale.step}`, stale.tokens.map(([age, count]) => [String(age), count]),
      "versions between sampling and training", {empty: whyEmpty(metrics, []),
        about: "The tokens sampled for the step, by how many versions the weights that sampled them are older than those that the step trains."}),
    chart("Staleness", [of("max", "staleness/max", "--s1", {isRaw: true}), of("mean", "staleness/mean", "--s0")]),
    chart("Trained against claimed, distance", [
      of("lengths", "coverage/length_distance", "--s0", {dots: true}), of("turns", "coverage/turns_distance", "--s2", {dots: true}),
      of("tool times", "coverage/tool_s_distance", "--s1", {dots: true})],
    metrics.points("timing_s/step").length ? {empty: "nothing compared yet: that takes the prompts of ten steps that have all ended"} : {}),
    chart("Slots, in groups", [of("in flight", "rollout/inflight_groups", "--s0"),
      of("ready", "rollout/ready_groups", "--s2"), of("free", "rollout/free_slots", "--s3")]),
    chart("Pause per update, ms", [of("pause", "weight_sync/pause_ms", "--s1"), of("swap", "weight_sync/swap_ms", "--s0")]),
    chart("Parts of a step, s", [of("wait for a batch", "timing_s/wait_batch", "--s1"),
      of("train", "timing_s/train_step", "--s0"), of("update", "timing_s/update_weights", "--s2")]),
    chart("Response length, tokens", [of("mean", "response_length/mean", "--s0"), of("max", "response_length/max", "--s3", {isRaw: true})]),
    chart("Groups that teach nothing", [of("equal rewards", "rollout/zero_variance_groups", "--s1")], {format: percent}),
    chart("Entropy of the policy, nats", [of("entropy", "actor/entropy", "--s2")]),
    chart("Off-policy: trainer vs. rollout", [of("effective sample size", "actor/ess", "--s0"), of("tokens clipped", "actor/pg_clipfrac", "--s1")], {format: percent}),
  ];
}
