"use strict";
// The groups of a step as a table that can be sorted and filtered; a group's trajectories side by side.

const COLUMNS = {ordinal: "prompt", reward: "reward", std: "deviation", tokens: "mean tokens", longest: "longest",
  failed: "failed", versions: "versions", seconds: "slowest"};
const WHICH = {all: "all groups", failed: "with failures", equal: "with equal rewards", mixed: "with different rewards",
  spanning: "with trajectories of several versions"};

screens.groups = {
  title: "Groups",
  async open(main, params) {
    const known = await get("steps", {run: currentRun()});
    if (!known.trained.length) {
      clear(main, h("h1", null, "Groups"), card(null, noStep()), await discardedCard());
      return null;
    }
    const asked = {step: Number(params.get("step") || known.trained[known.trained.length - 1]), sort: params.get("sort") || "ordinal",
      descending: params.get("descending") === "true", which: params.get("which") || "all", text: params.get("text") || "",
      offset: Number(params.get("offset") || 0)};
    const data = await get("groups", {run: currentRun(), ...asked});
    const ordinal = params.get("ordinal");
    const group = ordinal === null ? null : await get("group", {run: currentRun(), step: asked.step, ordinal: Number(ordinal)});
    clear(main, h("h1", null, `Groups of step ${asked.step}`), groupControls(asked, known.trained),
      group ? groupCard(group, asked) : null,
      card(null, groupTable(data, asked), pager("groups", data, asked),
        data.damaged ? h("p", {class: "bad"}, `damaged lines in the file: ${data.damaged}`) : null),
      await discardedCard());
    return group ? {keys: groupKeys(group.beside, (ordinal_) => to("groups", {...asked, ordinal: ordinal_}), ["n", "N"], ["p", "P"])} : null;
  },
};

/** Keys that go to the next and the previous group, where there is one. beside: [before, after]. */
function groupKeys([before, after], address, next, previous) {
  const go = (ordinal) => () => { if (ordinal !== null) location.hash = address(ordinal); };
  return Object.fromEntries([...next.map((key) => [key, go(after)]), ...previous.map((key) => [key, go(before)])]);
}

function groupControls(asked, numbers) {
  const go = (change) => { location.hash = to("groups", {...asked, offset: 0, ...change}); };
  const step = h("input", {type: "number", value: asked.step, min: numbers[0], max: numbers[numbers.length - 1], "aria-label": "step",
    onchange: () => go({step: step.value})});
  const text = h("input", {type: "search", value: asked.text, placeholder: "text or number of a prompt, or source", "aria-label": "filter",
    onchange: () => go({text: text.value})});
  const beside = (by, name) => walk(numbers, asked.step, by, name, (number) => go({step: number}));
  return h("div", {class: "controls"}, beside(-1, "earlier"), "step", step, beside(1, "later"),
    choice("which groups", Object.entries(WHICH), asked.which, (which) => go({which})), text);
}

function groupTable(data, asked) {
  const head = Object.entries(COLUMNS).map(([name, shown]) => h("button", {
    "aria-label": `sort by ${shown}`,
    onclick: () => { location.hash = to("groups", {...asked, sort: name, offset: 0, descending: asked.sort === name ? !asked.descending : name !== "ordinal"}); },
  }, shown + (asked.sort === name ? (asked.descending ? " ↓" : " ↑") : "")));
  const hasSource = data.rows.some((row) => row.source);
  const low = Math.min(0, ...data.rows.map((row) => row.reward || 0)), high = Math.max(1e-9, ...data.rows.map((row) => row.reward || 0));
  const known = commonStart(data.rows.map((row) => row.prompt));
  return table([...head, ...(hasSource ? ["source"] : []), "prompt begins with"], data.rows.map((row) => [
    h("a", {href: to("groups", {...asked, ordinal: row.ordinal})}, row.ordinal), meter(row.reward, low, high), short(row.std), short(row.tokens),
    short(row.longest), row.failed ? h("span", {class: "bad"}, row.failed) : 0, h("span", {class: "nowrap"}, versionRange(row.versions)), h("span", {class: "nowrap"}, seconds(row.seconds)),
    ...(hasSource ? [row.source] : []), h("div", {class: "begins", title: row.prompt}, known ? `… ${row.prompt.slice(known)}` : row.prompt)]), "no group matches");
}

/** How many characters, whole words, all texts begin with; 0 where one has no more than them. */
function commonStart(texts) {
  if (texts.length < 2) return 0;
  let length = Math.min(...texts.map((text) => text.length));
  while (texts.some((text) => !text.startsWith(texts[0].slice(0, length)))) length -= 1;
  return texts.some((text) => text.length === length) ? 0 : texts[0].lastIndexOf(" ", length - 1) + 1;
}

/** A number with a bar. */
function meter(value, low, high) {
  if (value === null) return "-";
  return h("span", {class: "meter"}, h("span", null, short(value)), h("i", null, h("i", {style: {width: `${(100 * (value - low)) / (high - low)}%`}})));
}

const versionRange = (pair) => (pair === null ? "-" : pair[0] === pair[1] ? `v${pair[0]}` : `v${pair[0]} – v${pair[1]}`);

function groupCard(group, asked) {
  const [before, after] = group.beside, link = (ordinal, words) => (ordinal === null ? null : h("a", {href: to("groups", {...asked, ordinal})}, words));
  const truth = group.rows.length ? group.rows[0].truth : "";
  return card(`Prompt ${group.ordinal}: ${countOf(group.rows.length, "trajectory", "trajectories")}`,
    h("div", {class: "controls"}, link(before, "previous group"), link(after, "next group"), h("span", {class: "muted"}, "keys: n for next, p for previous")),
    h("div", {class: "text-block prompt-text", tabindex: 0}, group.prompt), truth ? h("p", {class: "muted"}, `reference: ${truth}`) : null, table(
    ["episode", "reward", "response", "advantage", "tokens", "versions", "sequences", "finish reason", "time", "replica", "error"],
    group.rows.map((row) => [h("a", {href: to("trajectory", {step: group.step, ordinal: row.ordinal, index: row.index})}, `open ${row.index}`),
      short(row.reward), clipped(row.response), short(row.advantage), row.tokens, row.versions.map((version) => `v${version}`).join(" "), row.sequences,
      row.finish, seconds(row.seconds), row.replica, row.error ? h("span", {class: "bad"}, row.error) : ""])));
}

/** A text of a few lines; the whole of it on hover. */
const clipped = (text) => h("div", {class: "clip", title: text}, text);

async function discardedCard() {
  const data = await get("discarded", {run: currentRun(), offset: 0});
  if (!data.rows.length) return null;
  return card(`Groups that were not trained (the latest ${Math.min(20, data.total)} of ${countOf(data.total, "file")})`,
    table(["prompt", "source", "during step", "reason", "trajectories", "error", "time"],
      data.rows.map((row) => [row.ordinal, row.source || "-", row.step, row.reason, row.size, row.error || "", clock(row.time)])));
}
