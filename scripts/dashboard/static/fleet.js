"use strict";
// Replicas: how they are, what happened to them and why, and their weight updates.

screens.fleet = {
  title: "Fleet",
  async open(main) {
    const metrics = new Metrics(currentRun(), pulseKeys);
    const refresh = async () => {
      await metrics.read();
      const data = await get("fleet", {run: currentRun()});
      clear(main, h("h1", null, "Fleet"),
        h("p", null, `${data.has_ended ? "The run has ended. " : ""}Replicas: ${short(metrics.last("rollout/replicas_ready"))} ready, ${short(metrics.last("rollout/replicas_lost"))} lost, `
          + `${short(metrics.last("rollout/replicas_replaced"))} replaced, ${short(metrics.last("rollout/retried_groups"))} groups tried again.`
          + (data.events_seen < 1 ? ` Events are being read: ${percent(data.events_seen)}.` : "")),
        data.error ? h("section", {class: "card error"}, `the run ended with: ${data.error}`) : null,
        data.has_events ? null : h("p", {class: "muted"}, "this run has no events.jsonl: only its metrics say something of its replicas"),
        data.replicas.length ? card("Replicas", replicaTable(data.replicas)) : null,
        loadCharts(data.replicas),
        data.has_events ? card("What happened", h("div", null, table(["time", "replica", "state", "what"],
          data.events.slice().reverse().map(([time, replica, state, text]) => [clock(time), replica || "all", state, text]), "no replica was lost, added, paused or replaced"),
        data.left_out ? h("p", {class: "muted"}, `${data.left_out} earlier ones are left out`) : null)) : null,
        data.messages.length ? card("Trainer and resumes", table(["time", "what"], data.messages.map(([time, text]) => [clock(time), text]))) : null,
        data.dropped ? h("p", {class: "bad"}, `${data.dropped} events were dropped: see docs/observe.md`) : null);
    };
    await refresh();
    return {refresh};
  },
};

function replicaTable(replicas) {
  return table(["replica", "state", "serves", "running", "waiting", "KV cache", "as of", "stood still in the latest updates"], replicas.map((one) => [
    one.name, one.state || "in service", one.version === null ? "-" : `v${one.version}`, one.load ? one.load.running : "-", one.load ? one.load.waiting : "-",
    one.load ? percent(one.load.kv_usage) : "-", one.load ? clock(one.load.time) : "-", pauses(one.updates)]));
}

/** What replicas had to do over the run, one line each. */
function loadCharts(replicas) {
  const known = replicas.filter((one) => one.loads.length).slice(0, 8);
  if (!known.length) return null;
  const zero = Math.min(...known.map((one) => one.loads[0][0]));
  const chart = (title, place, more) => lines(title, known.map((one, i) => ({name: one.name, colour: `--s${i % 4}`,
    points: one.loads.filter((sample) => sample[place] !== null).map((sample) => [sample[0] - zero, sample[place]])})), {xName: "s", ...more});
  return h("div", {class: "grid"}, chart("Requests in the engine", 1), chart("Requests that wait for a seat", 2), chart("KV cache in use", 3, {format: percent}));
}

function pauses(updates) {
  const failed = updates.filter((update) => update[2]);
  const known = updates.filter((update) => update[1] !== null);
  return [known.slice(-5).map(([version, pause]) => `v${version} ${seconds(pause)}`).join(", ") || "-",
    failed.map(([version, , error]) => h("div", {class: "bad"}, `v${version}: ${error}`))];
}
