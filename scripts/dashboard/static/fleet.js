"use strict";
// Replicas: how they are, what happened to them and why, and their weight updates.

screens.fleet = {
  title: "Fleet",
  async open(main) {
    const metrics = new Metrics(currentRun(), pulseKeys);
    const refresh = async () => {
      await metrics.read();
      const data = await get("fleet", {run: currentRun()});
      const hasEnded = data.has_ended || isOver();
      const ready = data.replicas.filter((one) => one.is_in_service).length;
      clear(main, h("h1", null, "Fleet"),
        h("p", null, `${hasEnded ? "The run has ended. " : ""}Replicas: ${data.replicas.length ? ready : short(metrics.last("rollout/replicas_ready"))} ${hasEnded ? "in service at its end" : "in service"}, ${short(metrics.last("rollout/replicas_lost"))} lost, `
          + `${short(metrics.last("rollout/replicas_replaced"))} replaced, ${short(metrics.last("rollout/retried_groups"))} groups retried.`
          + (data.events_seen < 1 ? ` Reading events: ${percent(data.events_seen)}.` : "")),
        data.error ? h("section", {class: "card error"}, `the run ended with: ${data.error}`) : null,
        data.has_events ? null : h("p", {class: "muted"}, "this run has no events.jsonl: only its metrics say anything about its replicas"),
        data.replicas.length ? card("Replicas", replicaTable(data.replicas, hasEnded)) : null,
        loadCharts(data.replicas),
        data.processes.length ? card("Processes", table(["process", "machine", "address", "process id", "since"], data.processes.map(([name, host, address, pid, since]) => [name, host, address, pid, clock(since)]))) : null,
        data.has_events ? card("What happened", h("div", null, table(["time", "replica", "state", "what happened"],
          data.events.slice().reverse().map(([time, replica, state, text]) => [clock(time), replica || "all", state, text]), "no replica was lost, added, paused or replaced"),
        data.left_out ? h("p", {class: "muted"}, `earlier events that are not shown: ${data.left_out}`) : null)) : null,
        data.messages.length ? card("Trainer and resumes", table(["time", "what happened"], data.messages.map(([time, text]) => [clock(time), text]))) : null,
        data.dropped ? h("p", {class: "bad"}, `events that were dropped: ${data.dropped} (see docs/observe.md)`) : null);
    };
    await refresh();
    return {refresh};
  },
};

function replicaTable(replicas, hasEnded) {
  return table(["replica", "state", "serves", "running", "waiting", "KV cache", "as of", "frozen during the latest updates"], replicas.map((one) => [
    one.name, hasEnded && one.is_in_service ? "ended with the run" : one.state || "in service", one.version === null ? "-" : `v${one.version}`, one.load ? one.load.running : "-", one.load ? one.load.waiting : "-",
    one.load ? percent(one.load.kv_usage) : "-", one.load ? clock(one.load.time) : "-", pauses(one.updates)]));
}

/** What replicas had to do over the run, one line each. */
function loadCharts(replicas) {
  const known = replicas.filter((one) => one.loads.length).slice(0, 8);
  if (!known.length) return null;
  const zero = Math.min(...known.map((one) => one.loads[0][0]));
  const chart = (title, place, more) => lines(title, known.map((one, i) => ({name: one.name, colour: `--s${i % 4}`,
    points: one.loads.filter((sample) => sample[place] !== null).map((sample) => [sample[0] - zero, sample[place]])})), {xName: "s", ...more});
  return h("div", {class: "grid"}, chart("Requests in the engine", 1, {about: "running, in the events replica_load: requests that the engine is working on"}),
    chart("Requests waiting for an engine slot", 2, {about: "waiting, in the events replica_load: requests that the engine has not begun to work on"}),
    chart("KV cache in use", 3, {format: percent, empty: "the engine does not report it", about: "kv_usage, in the events replica_load: the fraction of the KV cache that the tokens of its requests need"}));
}

function pauses(updates) {
  const failed = updates.filter((update) => update[2]);
  const known = updates.filter((update) => update[1] !== null);
  return [known.slice(-5).map(([version, pause]) => `v${version} ${seconds(pause)}`).join(", ") || "-",
    failed.map(([version, , error]) => h("div", {class: "bad"}, `v${version}: ${error}`))];
}
