"use strict";
// One trajectory: its text with every token coloured by the version that sampled it.

screens.trajectory = {
  title: "Trajectory",
  async open(main, params) {
    const where = await chosenTrajectory(params);
    if (!where) return clear(main, h("h1", null, "Trajectory"), card(null, "no step has been recorded yet"));
    const start = Number(params.get("start") || 0);
    const data = await get("trajectory", {run: currentRun(), ...where, start});
    const {record, strip} = data;
    const versions = [...new Set(record.sequences.flatMap((one) => one.versions.map((span) => span[2])))].sort((a, b) => a - b);
    clear(main, h("h1", null, `Step ${where.step}, prompt ${where.ordinal}, episode ${where.index}`), neighbours(where),
      card(null, facts(record, where.step, versions)),
      card("Tokens by the version that sampled them", versionLegend(versions), strip.why === null
        ? tokenStrips(strip, record, where.step) : [h("p", {class: "muted"}, strip.why), record.sequences.map(spanStrip)],
        strip.left_out ? h("a", {href: to("trajectory", {...where, start: start + 20000})}, `${strip.left_out} more tokens`) : null),
      card("Prompt", h("div", {class: "text-block", tabindex: 0}, record.prompt)),
      card("Response", h("div", {class: "text-block", tabindex: 0}, record.response)),
      card("Reference answer", h("div", {class: "text-block"}, record.ground_truth)));
    return null;
  },
};

/** The one of the address, or the first of the latest step. */
async function chosenTrajectory(params) {
  if (params.get("ordinal") !== null) {
    return {step: Number(params.get("step")), ordinal: Number(params.get("ordinal")), index: Number(params.get("index") || 0)};
  }
  const data = await get("groups", {run: currentRun(), step: 0, sort: "ordinal", descending: false, which: "all", text: "", offset: 0});
  return data.rows.length ? {step: data.step, ordinal: data.rows[0].ordinal, index: 0} : null;
}

function neighbours(where) {
  const by = (more) => to("trajectory", {...where, index: where.index + more});
  return h("div", {class: "controls"}, where.index > 0 ? h("a", {href: by(-1)}, "previous episode") : null, h("a", {href: by(1)}, "next episode"),
    h("a", {href: to("groups", {step: where.step, ordinal: where.ordinal})}, "its group"),
    h("a", {href: to("timeline", {first: where.step, last: where.step})}, "its step in the timeline"),
    h("a", {href: to("anatomy", {step: where.step})}, "its batch"));
}

function facts(record, step, versions) {
  const rows = [["reward", short(record.reward)], ["advantage", short(record.advantage)],
    ["versions", versions.length ? `${versions.map((version) => `v${version}`).join(", ")}; trained by step ${step} on v${step - 1}` : "none"],
    ["staleness", versions.length ? `${step - 1 - versions[versions.length - 1]} to ${step - 1 - versions[0]} versions` : "-"],
    ["ends with", record.finish_reason], ["replica", record.replica], ["generated in", seconds(record.generate_s)],
    ["reward took", seconds(record.reward_s)], ["source", record.data_source],
    ["tokens", record.sequences.map((one) => `${one.prompt_tokens} + ${one.response_tokens}, ${one.loss_tokens} trained`).join("; ")]];
  if (record.overlong_penalty) rows.push(["penalty of length", short(record.overlong_penalty)]);
  if (record.error) rows.push(["error", h("span", {class: "bad"}, record.error)]);
  for (const [name, value] of Object.entries({...record.reward_metrics, ...record.agent_metrics})) rows.push([name, short(value)]);
  return h("div", {class: "scroll"}, h("table", null, h("tbody", null, rows.map(([name, value]) =>
    h("tr", null, h("th", {scope: "row"}, name), h("td", null, value))))));
}

function tokenStrips(strip, record, step) {
  const detail = h("div", {class: "card facts", role: "status"}, "point at a token, or use the arrow keys in the text");
  return [detail, strip.sequences.map((tokens, number) => [
    strip.sequences.length > 1 ? h("h2", null, `sequence ${number + 1} of ${strip.sequences.length}`) : null,
    tokenStrip(tokens, detail, record, step)])];
}

function tokenStrip(tokens, detail, record, step) {
  const spans = tokens.map(([text, , version, , isTrained, isPrompt], i) => {
    const span = h("span", {"data-i": i, class: isPrompt ? "prompt" : isTrained ? null : "masked"}, text);
    if (version !== null) span.style.background = tokenColour(version);
    return span;
  });
  let chosen = null;
  const choose = (i) => {
    if (i < 0 || i >= spans.length) return;
    if (chosen !== null) spans[chosen].classList.remove("chosen");
    chosen = i;
    spans[i].classList.add("chosen");
    detail.textContent = describeToken(tokens[i], i, record, step);
  };
  const text = h("div", {class: "tokens", tabindex: 0, role: "group", "aria-label": "tokens; arrow keys move"}, spans);
  text.addEventListener("mouseover", (event) => { if (event.target.dataset.i !== undefined) choose(Number(event.target.dataset.i)); });
  text.addEventListener("keydown", (event) => {
    const by = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (by === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    choose(chosen === null ? 0 : chosen + by);
  });
  return text;
}

function describeToken([text, id, version, logprob, isTrained, isPrompt], i, record, step) {
  const shown = `token ${i}: ${JSON.stringify(text)} (id ${id})`;
  if (isPrompt) return `${shown} · of the prompt`;
  if (version === null) return `${shown} · not sampled: of the environment, masked`;
  return `${shown} · sampled by v${version}, ${step - 1 - version} versions old when trained · rollout logprob ${logprob === null ? "-" : logprob.toFixed(4)}`
    + ` (p ${logprob === null ? "-" : Math.exp(logprob).toFixed(4)}) · ${isTrained ? `trained, advantage ${short(record.advantage)}` : "masked"}`;
}

/** Where tokens were not recorded: the share of each version in the response. */
function spanStrip(sequence) {
  const total = Math.max(sequence.response_tokens, 1), tone = css("--bar");
  const strip = h("div", {class: "strip", role: "img", "aria-label": sequence.versions.map(([a, b, v]) => `tokens ${a} to ${b}: v${v}`).join("; ")});
  let at = 0;
  const part = (length, colour, title) => strip.append(h("div", {title, style: {width: `${(100 * length) / total}%`, background: colour}}));
  for (const [start, end, version] of sequence.versions) {
    if (start > at) part(start - at, "transparent", "not sampled");
    part(end - start, barColour(version, tone), `tokens ${start} to ${end}: v${version}`);
    at = end;
  }
  return strip;
}
