"use strict";
// Is it learning, is it async, who waits for whom, and what to change.

screens.pulse = {
  title: "Pulse",
  async open(main, params) {
    const metrics = new Metrics(currentRun(), pulseKeys);
    const advice = h("section", {class: "card advice", "aria-live": "polite"}, "…");
    const tiles = h("div", {class: "tiles"});
    const charts = h("div", {class: "grid"});
    clear(main, h("h1", null, "Pulse"), advice, tiles, h("p", {class: "muted note"}, `Throughput, idle shares, pause and step: means of the latest ${MEAN_STEPS} steps. `
      + "Faint lines: every step; strong ones: means of the steps around."), charts);
    let isPending = false;
    const advise = async () => {
      const given = await get("advice", {run: currentRun()});
      isPending = given.is_pending;
      clear(advice, given.text, h("p", {class: "muted"}, given.about, isPending ? " The predictor is at work." : ""));
    };
    const refresh = async (first) => {
      const isNew = await metrics.read();
      if (!isNew && !first) return isPending ? advise() : null;
      fillTiles(tiles, metrics);
      const stale = await get("staleness", {run: currentRun(), step: 0});
      clear(charts, pulseCharts(metrics, stale));
      say(`step ${metrics.latest || 0}`);
      return advise();
    };
    await refresh(true);
    return {refresh: () => refresh(false)};
  },
};

const MEAN_STEPS = 20;

function fillTiles(tiles, metrics) {
  const last = (key) => metrics.last(key);
  const mean = (key) => {
    const values = metrics.points(key).slice(-MEAN_STEPS).map((point) => point[1]);
    return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
  };
  const tile = (name, value) => h("div", {class: "tile"}, h("span", null, name), h("b", null, value));
  clear(tiles,
    tile("reward", short(last("critic/rewards/mean"))),
    tile("accuracy", short(last("eval/accuracy"))),
    tile("tokens/s sampled", short(mean("perf/throughput/generated"))),
    tile("tokens/s trained", short(mean("perf/throughput/trained"))),
    tile("trainer idle", percent(mean("perf/trainer_idle"))),
    tile("replicas idle", percent(mean("perf/replica_idle"))),
    tile("staleness, at most", `${short(last("staleness/max"))} versions`),
    tile("pause of an update", `${short(mean("weight_sync/pause_ms"))} ms`),
    tile("step", seconds(mean("timing_s/step"))),
    tile("slots: busy / ready / free",
      ["inflight_groups", "ready_groups", "free_slots"].map((name) => short(last(`rollout/${name}`))).join(" / ")));
}

function pulseCharts(metrics, stale) {
  const of = (name, key, colour, more) => ({name, points: metrics.points(key), colour, ...more});
  const learned = [of("training", "actor/ce_loss", "--s0"), of("validation", "eval/ce_loss", "--s1", {dots: true})];
  return [
    ...(learned.some((line) => line.points.length) ? [lines("Cross-entropy of conversations, nats", learned)] : []),
    lines("Reward and held-out accuracy", [
      of("reward", "critic/rewards/mean", "--s0"), of("accuracy", "eval/accuracy", "--s1", {dots: true})]),
    lines("Tokens per second", [
      of("sampled", "perf/throughput/generated", "--s0"), of("trained", "perf/throughput/trained", "--s2")]),
    lines("Idle share: who waits", [
      of("trainer", "perf/trainer_idle", "--s1"), of("replicas", "perf/replica_idle", "--s0")], {format: percent}),
    bars(`Staleness of the tokens of step ${stale.step}`, stale.tokens.map(([age, count]) => [String(age), count]),
      "versions between sampling and training"),
    lines("Staleness", [of("max", "staleness/max", "--s1"), of("mean", "staleness/mean", "--s0")]),
    lines("Slots, in groups", [of("in flight", "rollout/inflight_groups", "--s0"),
      of("ready", "rollout/ready_groups", "--s2"), of("free", "rollout/free_slots", "--s3")]),
    lines("Pause of an update, ms", [of("pause", "weight_sync/pause_ms", "--s1"), of("swap", "weight_sync/swap_ms", "--s0")]),
    lines("Parts of a step, s", [of("wait for a batch", "timing_s/wait_batch", "--s1"),
      of("train", "timing_s/train_step", "--s0"), of("update", "timing_s/update_weights", "--s2")]),
    lines("Response length, tokens", [of("mean", "response_length/mean", "--s0"), of("max", "response_length/max", "--s3")]),
    lines("Groups that teach nothing", [of("equal rewards", "rollout/zero_variance_groups", "--s1")], {format: percent}),
    lines("Entropy of the policy, nats", [of("entropy", "actor/entropy", "--s2")]),
    lines("Off-policy: trainer against rollout", [of("effective sample size", "actor/ess", "--s0"), of("tokens clipped", "actor/pg_clipfrac", "--s1")], {format: percent}),
  ];
}
