"use strict";
// One trajectory: its facts, its tokens as messages and branches, its texts.

screens.trajectory = {
  title: "Trajectory",
  async open(main, params) {
    const where = await chosenTrajectory(params);
    if (!where) return clear(main, h("h1", null, "Trajectory"), card(null, noStep()));
    const start = Number(params.get("start") || 0);
    const data = await get("trajectory", {run: currentRun(), ...where, start});
    const {record, strip} = data;
    const versions = [...new Set(record.sequences.flatMap((one) => one.versions.map((span) => span[2])))].sort((a, b) => a - b);
    clear(main, h("h1", null, `Step ${where.step}, prompt ${where.ordinal}, episode ${where.index}`), neighbours(where, data),
      card(null, facts(record, where.step, versions)),
      card("Tokens", strip.why === null ? tokenView(strip, record, where.step)
        : [h("p", {class: "muted"}, strip.why), versionLegend(versions), record.sequences.map(spanStrip)],
        strip.left_out ? h("a", {href: to("trajectory", {...where, start: start + 20000})}, `${strip.left_out} more tokens`) : null),
      texts(record, strip.why === null && strip.has_text));
    const go = (by) => () => { if (where.index + by >= 0 && where.index + by < data.group_size) location.hash = to("trajectory", {...where, index: where.index + by}); };
    return {keys: {n: go(1), p: go(-1), ...groupKeys(data.beside, (ordinal) => to("trajectory", {...where, ordinal, index: 0}), ["N"], ["P"])}};
  },
};

/** The one of the address, or the first of the group of the latest step whose rewards differ most. */
async function chosenTrajectory(params) {
  if (params.get("ordinal") !== null) {
    return {step: Number(params.get("step")), ordinal: Number(params.get("ordinal")), index: Number(params.get("index") || 0)};
  }
  const table_ = {run: currentRun(), step: 0, sort: "std", descending: true, which: "all", text: "", offset: 0};
  const data = await get("groups", embedded ? {...table_, sort: "ordinal", descending: false} : table_);
  return data.rows.length ? {step: data.step, ordinal: data.rows[0].ordinal, index: 0} : null;
}

function neighbours(where, {group_size: size, beside}) {
  const group = (ordinal, words) => (ordinal === null ? null : h("a", {href: to("trajectory", {...where, ordinal, index: 0})}, words));
  const by = (more) => to("trajectory", {...where, index: where.index + more});
  return h("div", {class: "controls"}, where.index > 0 ? h("a", {href: by(-1)}, "previous episode") : null, where.index + 1 < size ? h("a", {href: by(1)}, "next episode") : null,
    group(beside[0], "previous group"), group(beside[1], "next group"), h("span", {class: "muted"}, "keys: n and p for episodes, N and P for groups"),
    h("a", {href: to("groups", {step: where.step, ordinal: where.ordinal})}, "its group"),
    h("a", {href: to("timeline", {first: where.step, last: where.step})}, "its step in the timeline"),
    h("a", {href: to("anatomy", {step: where.step})}, "its batch"));
}

/** Prompt, response and reference as texts; folded where the tokens show them already. */
function texts(record, isShown) {
  const block = (name, text) => [h("h2", null, name), h("div", {class: "text-block", tabindex: 0}, text)];
  return h("details", {class: "card", open: !isShown}, h("summary", null, "Prompt, response and reference as text"), block("Prompt", record.prompt),
    block("Response", record.response), block("Reference answer", record.ground_truth));
}

const staleRange = (least, most) => (least === most ? countOf(most, "version") : `${least} to ${countOf(most, "version")}`);

function facts(record, step, versions) {
  const rows = [["reward", short(record.reward)], ["advantage", short(record.advantage)],
    ["versions", versions.length ? `${versions.map((version) => `v${version}`).join(", ")}; trained by step ${step} on v${step - 1}` : "none"],
    ["staleness", versions.length ? staleRange(step - 1 - versions[versions.length - 1], step - 1 - versions[0]) : "-"],
    ["finish reason", record.finish_reason], ["replica", record.replica], ["generated in", seconds(record.generate_s)],
    ["reward took", seconds(record.reward_s)], ["source", [record.source, record.data_source].filter(Boolean).join("/")], ["row of the data", record.row ?? ""], ["reference", record.ground_truth.length <= 60 ? record.ground_truth : ""],
    ["tokens", record.sequences.map((one) => `${one.prompt_tokens} + ${one.response_tokens}, ${one.loss_tokens} trained`).join("; ")]];
  if (record.overlong_penalty) rows.push(["length penalty", short(record.overlong_penalty)]);
  if (record.error) rows.push(["error", h("span", {class: "bad"}, record.error)]);
  for (const [name, value] of Object.entries({...record.reward_metrics, ...record.agent_metrics})) rows.push([name, short(value)]);
  return h("dl", {class: "pairs"}, rows.filter(([, value]) => value !== "").map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value))));
}
