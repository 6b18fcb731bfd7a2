"use strict";
// Why a step took as long as it did: its groups from claim to training, the path that it waited for marked.

screens.anatomy = {
  title: "Batch",
  async open(main, params) {
    const known = await steps();
    const numbers = [...new Set([...known.trained, ...known.with_events])].sort((a, b) => a - b);
    if (!numbers.length) return clear(main, h("h1", null, "Batch"), card(null, noStep()));
    const done = known.trained.length ? known.trained[known.trained.length - 1] : numbers[numbers.length - 1];
    const step = Number(params.get("last") || params.get("step") || done);
    const data = await get("anatomy", {run: currentRun(), step});
    const picture = anatomyPicture(data, step);
    clear(main, h("h1", null, `Batch of step ${step}`), stepChooser("anatomy", numbers, step),
      h("section", {class: "card advice"}, data.why),
      h("section", {class: "card"}, picture, anatomyLegend(data)),
      data.left_out ? h("p", {class: "muted"}, `groups that were ready earlier and are not shown: ${data.left_out}`) : null,
      card("Groups, the last to become ready first; times are relative to the start of the step", table(["prompt", "claimed", "ready", "waited for the step", "mean reward", "attempts"],
        data.groups.map((group) => [h("a", {href: to("groups", {step, ordinal: group.ordinal})}, group.ordinal),
          seconds2(group.claimed), seconds2(group.ready), group.ready === null || group.ready > 0 ? "-" : seconds(-group.ready),
          short(group.reward), group.moves.length ? `${group.moves.length + 1}: ${group.moves.join("; ")}` : "1"]))));
    picture.redraw();
    return null;
  },
};

const seconds2 = (value) => (value === null ? "-" : `${value < 0 ? "-" : "+"}${Math.abs(value).toFixed(2)} s`);
const KINDS = {wait: "--line", tool: "--muted", reward: "--ink"};

function anatomyPicture(data, step) {
  const rows = data.groups.flatMap((group) => group.trajectories.map((one) => ({group, one})));
  const tall = Math.max(2, Math.min(12, Math.floor(700 / Math.max(rows.length, 1))));
  const times = [...data.parts.flatMap((part) => [part[1], part[2]]), ...data.groups.flatMap((group) => [group.claimed, group.ready]),
    ...rows.flatMap(({one}) => one.bars.flatMap((bar) => [bar[1], bar[2]]))].filter((at) => at !== null);
  const [low, high] = range(times, false);
  const isCritical = ({group, one}) => data.critical && group.ordinal === data.critical[0] && one.episode === data.critical[1];
  let px = null, chosen = null;
  const top = 44;
  const view = canvas(top + rows.length * tall + 10, `anatomy of the batch: ${data.why}`, (context, width, height) => {
    px = (at) => 70 + ((at - low) / (high - low)) * (width - 80);
    const tone = css("--bar"), ink = css("--ink");
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = css("--muted");
    const times = ticks(low, high, 8), texts = tickTexts(times, short);
    times.forEach((at, i) => context.fillText(`${texts[i]} s`, px(at), 12));
    for (const [name, start, end] of data.parts) {
      const w = Math.max(1, px(end === null ? high : end) - px(start));
      context.fillStyle = partColour(name);
      context.fillRect(px(start), 18, w, 16);
      context.fillStyle = ink;
      if (w > context.measureText(name).width + 6) context.fillText(name, px(start) + 3, 30);
    }
    context.fillStyle = ink;
    context.fillText("step", 4, 30);
    rows.forEach((row, i) => {
      const y = top + i * tall;
      if (row.group.claimed !== null && row.group.ready !== null) {
        context.fillStyle = css("--line");
        context.fillRect(px(row.group.claimed), y + tall / 2, px(row.group.ready) - px(row.group.claimed), 1);
      }
      for (const [kind, start, end, version] of row.one.bars) {
        const wide = Math.max(0.7, px(end) - px(start)), high_ = tall < 4 ? tall : tall - 1;
        if (kind === "turn") { versionBar(context, version, tone, px(start), y, wide, high_); continue; }
        context.fillStyle = css(KINDS[kind]);
        context.fillRect(px(start), y, wide, high_);
      }
      if (row === chosen) {
        context.strokeStyle = ink;
        context.strokeRect(66, y - 1, width - 70, tall + 1);
      }
      if (row.one === row.group.trajectories[0]) { context.fillStyle = ink; context.fillText(row.group.ordinal, 4, y + Math.min(10, tall + 4), 56); }
    });
    context.strokeStyle = ink;
    context.beginPath();
    context.moveTo(px(0), 16);
    context.lineTo(px(0), height);
    context.stroke();
    const place = rows.findIndex(isCritical);
    drawPath(context, px, data, rows[place], top + (place + 0.5) * tall);
  });
  const under = (event) => rows[Math.floor((event.offsetY - top) / tall)];
  const open = (row) => { if (row) location.hash = to("trajectory", {step, ordinal: row.group.ordinal, index: row.one.episode}); };
  view.addEventListener("mousemove", (event) => showTip(under(event) ? describeRow(under(event)) : null, event.clientX, event.clientY));
  view.addEventListener("mouseleave", () => showTip(null));
  view.addEventListener("click", (event) => open(under(event)));
  listenToKeys(view, {open: () => open(chosen), choose: (by) => {
    const place = rows.indexOf(chosen), next = place < 0 ? 0 : Math.max(0, Math.min(rows.length - 1, place + by));
    chosen = by === null ? null : rows[next] || null;
    view.redraw();
    const box = view.getBoundingClientRect();
    showTip(chosen && describeRow(chosen), box.left + 70, box.top + top + next * tall);
  }});
  return view;
}

/** Why the step took so long: the last trajectory that it waited for, from claim to ready, and then its own parts. */
function drawPath(context, px, data, critical, y) {
  const ends = data.parts.map((part) => part[2]).filter((end) => end !== null);
  const points = ends.length ? [[px(Math.max(...ends)), 35]] : [];
  if (critical && critical.group.ready !== null) {
    const ready = px(critical.group.ready), claimed = critical.group.claimed === null ? ready : px(critical.group.claimed);
    points.push(...(ends.length ? [[ready, 35]] : []), [ready, y], [claimed, y]);
  } else {
    points.push([px(0), 35]);
  }
  context.strokeStyle = css("--bad");
  context.lineWidth = 2.5;
  context.beginPath();
  points.forEach(([x, at], i) => (i ? context.lineTo(x, at) : context.moveTo(x, at)));
  context.stroke();
}

function describeRow({group, one}) {
  const took = {};
  for (const [kind, start, end] of one.bars) took[kind] = (took[kind] || 0) + end - start;
  return [`prompt ${group.ordinal}, episode ${one.episode}, reward ${short(one.reward)}`,
    ...Object.entries(took).map(([kind, value]) => `${kind === "wait" ? "until the first token" : kind}: ${seconds(value)}`),
    one.error || "", "click or Enter opens it"].filter(Boolean).join("\n");
}

function anatomyLegend(data) {
  const versions = [...new Set(data.groups.flatMap((group) => group.trajectories.flatMap((one) => one.bars)).map((bar) => bar[3]))];
  const kinds = {wait: "until the first token", tool: "tool", reward: "reward"};
  return [versionLegend(versions.filter((version) => version !== null).sort((a, b) => a - b)),
    h("div", {class: "legend"}, Object.entries(kinds).map(([kind, name]) => h("span", null, h("i", {style: {background: `var(${KINDS[kind]})`}}), name)),
      h("span", null, h("i", {style: {background: "var(--bad)", height: "3px", width: "14px", verticalAlign: "middle"}}),
        data.critical ? "critical path: what the step waited for, then the parts of the step" : "critical path: the parts of the step, which waited for no group"))];
}
