"use strict";
// A lane per replica and rank; trajectories coloured by the version that sampled them; updates across all lanes.

const STEPS_SHOWN = 3;

screens.timeline = {
  title: "Timeline",
  async open(main, params) {
    const known = await steps();
    const numbers = known.with_events;
    if (!numbers.length) {
      clear(main, h("h1", null, "Timeline"), card(null, h("p", null, known.has_events
        ? (known.events_seen < 1 ? `reading events: ${percent(known.events_seen)}` : noStep()) : "this run has no events.jsonl: a version that writes no events trained it")));
      return known.has_events && !embedded ? {refresh: () => screens.timeline.open(main, params)} : null;
    }
    const newest = numbers[numbers.length - 1];
    const follows = params.get("last") === null;
    const last = follows ? newest : Math.min(newest, Number(params.get("last")));
    const first = params.get("first") === null
      ? numbers[Math.max(0, numbers.indexOf(last) - STEPS_SHOWN + 1)] : Number(params.get("first"));
    const data = await get("timeline", {run: currentRun(), first, last});
    const picture = new Timeline(data);
    clear(main, h("h1", null, `Timeline, steps ${first} to ${last}`), stepsChooser("timeline", numbers, first, last),
      h("section", {class: "card"}, picture.element, picture.legend()),
      data.is_cut ? h("p", {class: "muted"}, `one picture cannot hold all turns (left out: ${data.left_out}); choose fewer steps`) : null,
      h("p", {class: "muted"}, "Zoom with the wheel or + and -, move by dragging or with the left and right arrow keys, show everything with 0. "
        + "Click a turn to open its trajectory, or choose one with the up and down arrow keys and press Enter. A bar is a turn at a replica; its colours are the versions that sampled it, every other version striped. "
        + "A band across all lanes is a weight update, a hairline in a replica is the pause for its swap, and the thin line above it the staging of the weights. Times count from the start of the first step."));
    picture.element.redraw();
    let shown = newest;
    return {
      async refresh() {
        if (!follows || picture.isMoved) return;
        const now = (await steps()).with_events;
        if (now[now.length - 1] !== shown) { shown = now[now.length - 1]; reopen(); }
      },
    };
  },
};

/** What steps there are, once the events have been read to their end, or for as long as a person waits. */
async function steps() {
  for (let tries = 0; ; tries++) {
    const known = await get("steps", {run: currentRun()});
    if (known.events_seen >= 1 || embedded || tries > 40) return known;
    say(`reading events: ${percent(known.events_seen)}`);
  }
}

function stepsChooser(screen, numbers, first, last) {
  const go = (a, b) => { location.hash = to(screen, {first: a, last: b}); };
  const width = numbers.indexOf(last) - numbers.indexOf(first);
  const at = (index) => numbers[Math.max(0, Math.min(numbers.length - 1, index))];
  const move = (by) => { const end = Math.max(width, numbers.indexOf(last) + by); go(at(end - width), at(end)); };
  const from = h("input", {type: "number", value: first, min: numbers[0], max: at(1e9), "aria-label": "first step"});
  const until = h("input", {type: "number", value: last, min: numbers[0], max: at(1e9), "aria-label": "last step"});
  const show = () => { if (Number(from.value) <= Number(until.value)) go(from.value, until.value); };
  return h("div", {class: "controls"}, h("button", {onclick: () => move(-width - 1), disabled: first === numbers[0]}, "earlier"),
    "steps", from, "to", until, h("button", {onclick: show}, "show"),
    h("button", {onclick: () => move(width + 1), disabled: last === at(1e9)}, "later"),
    h("button", {onclick: () => { location.hash = to(screen, {}); }}, "newest"));
}

function stepChooser(screen, numbers, step) {
  const go = (to_) => { location.hash = to(screen, {step: to_}); };
  const input = h("input", {type: "number", value: step, min: numbers[0], max: numbers[numbers.length - 1], "aria-label": "step", onchange: () => go(input.value)});
  return h("div", {class: "controls"}, walk(numbers, step, -1, "earlier", go), "step", input, walk(numbers, step, 1, "later", go),
    h("button", {onclick: () => { location.hash = to(screen, {}); }}, "newest"));
}

class Timeline {
  constructor(data) {
    this.data = data;
    this.isMoved = false;
    this.chosen = null; // a turn, by keys
    this.versions = new Set();
    this.rows = []; // {y, height, kind, name, replica}
    this.layOut();
    this.from = this.start = Math.min(0, ...this.turns.map((turn) => turn.start).filter((at) => at > -data.length));
    this.until = this.end = Math.max(this.lastEnd(), this.from + 1e-3);
    const label = `timeline of steps ${data.first} to ${data.last}: ${this.turns.length} turns on ${Object.keys(data.replicas).length} replicas, `
      + `${data.borders.length} weight updates, versions ${[...this.versions].sort((a, b) => a - b).join(", ")}`;
    this.element = canvas(this.height, label, (context, width) => this.draw(context, width));
    this.listen();
  }

  /** When the last bar ends: a run that has ended may have been there for a while after it. */
  lastEnd() {
    const {data} = this;
    const ends = [...this.turns.map((turn) => turn.end), ...[...data.steps, ...data.borders, ...data.evaluations].map((one) => one[one.length - 1])];
    return ends.includes(null) || !ends.length ? data.length : Math.min(data.length, Math.max(...ends));
  }

  layOut() {
    const {data} = this;
    let y = 24;
    const row = (kind, name, height, more) => { this.rows.push({kind, name, y, height, ...more}); y += height + 6; };
    row("steps", "trainer", 18);
    if (data.evaluations.some(([, , end]) => end === null || end > 0)) row("evaluations", "evaluation", 10);
    for (const rank of Object.keys(data.ranks)) row("rank", `rank ${rank}`, 10, {items: data.ranks[rank]});
    const lanes = Object.values(data.replicas).reduce((sum, one) => sum + one.lanes, 0);
    const tall = Math.max(2, Math.min(14, Math.floor(520 / Math.max(lanes, 1))));
    this.turns = [];
    for (const [name, replica] of Object.entries(data.replicas)) {
      row("replica", name, Math.max(14, replica.lanes * tall), {replica});
      const {y: top} = this.rows[this.rows.length - 1];
      for (const [lane, start, end, cuts, ordinal, episode, turn, tokens, reward, step, isEvaluation, isLost, movedTo] of replica.turns) {
        cuts.forEach((cut) => this.versions.add(cut[2]));
        this.turns.push({y: top + lane * tall, height: tall < 4 ? tall : tall - 1, start, end: end === null ? data.length : end,
          goesOn: end === null, cuts, ordinal, episode, turn, tokens, reward, step, isEvaluation, isLost, movedTo, name});
      }
    }
    this.turns.sort((a, b) => a.start - b.start);
    this.height = y + 16;
  }

  x(time) { return 92 + ((time - this.from) / (this.until - this.from)) * (this.width - 100); }
  time(x) { return this.from + ((x - 92) / (this.width - 100)) * (this.until - this.from); }

  draw(context, width) {
    this.width = width;
    const tone = css("--bar"), ink = css("--ink"), muted = css("--muted"), line = css("--line");
    context.font = "11px system-ui, sans-serif";
    this.drawTimes(context, muted, line);
    context.save();
    context.beginPath();
    context.rect(92, 0, width - 92, this.height);
    context.clip();
    context.globalAlpha = 0.22;
    for (const [version, start, end] of this.data.borders) {
      context.fillStyle = barColour(version, tone);
      context.fillRect(this.x(start), 18, Math.max(1, this.x(end === null ? this.data.length : end) - this.x(start)), this.height);
    }
    context.globalAlpha = 1;
    context.fillStyle = muted;
    let free = -Infinity; // where the last label ends: labels that would overprint it are left out
    for (const [version, start] of [...this.data.borders].sort((a, b) => a[1] - b[1])) {
      const at = this.x(start), text = `v${version}`;
      if (at < Math.max(free, 92)) continue;
      context.fillText(text, at, this.height - 3);
      free = at + context.measureText(text).width + 6;
    }
    for (const turn of this.turns) this.drawTurn(context, turn, tone, muted);
    for (const row of this.rows) this.drawRow(context, row, tone, ink, muted);
    if (this.chosen) this.drawChosen(context, ink);
    context.restore();
    context.fillStyle = ink;
    for (const row of this.rows) context.fillText(row.name, 4, row.y + Math.min(row.height, 14) - 2, 84);
  }

  drawTimes(context, muted, line) {
    context.strokeStyle = line;
    context.fillStyle = muted;
    const times = ticks(this.from, this.until, 8), texts = tickTexts(times, short);
    times.forEach((at, i) => {
      const x = Math.round(this.x(at)) + 0.5;
      if (x < 92) return;
      context.beginPath();
      context.moveTo(x, 16);
      context.lineTo(x, this.height);
      context.stroke();
      context.fillText(`${texts[i]} s`, x + 2, 12);
    });
  }

  drawTurn(context, turn, tone, muted) {
    if (turn.end < this.from || turn.start > this.until) return;
    if (!turn.cuts.length || turn.cuts[0][0] > turn.start) {
      context.fillStyle = muted;
      context.globalAlpha = 0.5;
      context.fillRect(this.x(turn.start), turn.y, Math.max(0.5, this.x(turn.end) - this.x(turn.start)), turn.height);
      context.globalAlpha = 1;
    }
    for (const [start, end, version] of turn.cuts) {
      versionBar(context, version, tone, this.x(start), turn.y, Math.max(0.5, this.x(end) - this.x(start) - 0.4), turn.height);
    }
    if (turn.isLost) { // hollow: what it sampled was thrown away or went on elsewhere
      const x = this.x(turn.start), width = Math.max(1, this.x(turn.end) - x);
      context.globalAlpha = 0.6;
      context.fillStyle = css("--card");
      context.fillRect(x, turn.y + 1, width, Math.max(0.5, turn.height - 2));
      context.globalAlpha = 1;
      context.fillStyle = css("--bad");
      context.fillRect(x + width - 2, turn.y, 2, turn.height);
    }
  }

  drawChosen(context, ink) {
    const {start, end, y, height} = this.chosen;
    context.strokeStyle = ink;
    context.lineWidth = 2;
    context.strokeRect(this.x(start) - 2, y - 2, this.x(end) - this.x(start) + 4, height + 4);
    context.lineWidth = 1;
  }

  drawRow(context, row, tone, ink, muted) {
    const part = (start, end, colour, text) => {
      const x = this.x(start), w = Math.max(1, this.x(end === null ? this.data.length : end) - x);
      context.fillStyle = colour;
      context.fillRect(x, row.y, w, row.height);
      const seen = Math.max(x, 92), room = x + w - seen - 6;
      context.fillStyle = ink;
      if (room > context.measureText(text).width && row.height > 12) context.fillText(text, seen + 3, row.y + 13);
    };
    if (row.kind === "steps") {
      for (const [step, name, start, end] of this.data.steps) part(start, end, partColour(name), `${step} ${name}`);
    } else if (row.kind === "rank") {
      for (const [version, start, end] of row.items) part(start, end, barColour(version, tone), "");
    } else if (row.kind === "evaluations") {
      for (const [version, start, end] of this.data.evaluations) part(start, end, barColour(version, tone), "");
    } else {
      for (const update of row.replica.updates) this.drawUpdate(context, row, update, ink, muted);
      for (const at of row.replica.lost) this.drawLoss(context, row, at);
    }
  }

  drawLoss(context, row, at) {
    const x = this.x(at), width = context.measureText("lost").width;
    context.fillStyle = css("--bad");
    context.fillRect(x - 1, row.y - 5, 2, row.height + 8);
    const left = x + width + 6 > this.width ? x - width - 6 : x + 4;
    context.fillStyle = css("--card");
    context.fillRect(left - 2, row.y - 1, width + 4, 13);
    context.fillStyle = css("--bad");
    context.fillText("lost", left, row.y + 10);
  }

  drawUpdate(context, row, update, ink, muted) {
    if (update.stage_started !== null) { // staging, while it generates
      const end = update.stage_ended === null ? this.data.length : update.stage_ended;
      context.fillStyle = muted;
      context.fillRect(this.x(update.stage_started), row.y - 4, Math.max(1, this.x(end) - this.x(update.stage_started)), 2);
    }
    if (update.frozen === null) return;
    const end = update.resumed === null ? update.frozen : update.resumed;
    context.fillStyle = update.error ? css("--bad") : ink;
    context.fillRect(this.x(update.frozen), row.y - 5, Math.max(1, this.x(end) - this.x(update.frozen)), row.height + 6);
  }

  legend() {
    const isWaiting = this.turns.some((turn) => !turn.cuts.length || turn.cuts[0][0] > turn.start);
    const isLost = this.turns.some((turn) => turn.isLost) || Object.values(this.data.replicas).some((one) => one.lost.length);
    const parts = {wait: "waits for a batch", train: "trains", update: "publishes, or waits for an update", other: "assembles, scores, copies a checkpoint"};
    const seen = new Set(this.data.steps.map(([, name]) => (parts[name] ? name : "other")));
    return [versionLegend([...this.versions].sort((a, b) => a - b)),
      h("div", {class: "legend", "aria-label": "parts of the trainer's steps"}, "trainer:", Object.entries(parts).filter(([name]) => seen.has(name))
        .map(([name, words]) => h("span", null, h("i", {style: {backgroundColor: partColour(name)}}), words))),
      h("div", {class: "legend"},
        isWaiting ? h("span", null, h("i", {style: {background: "var(--muted)", opacity: 0.5}}), "before the first token, or sampled by an unknown version") : null,
        isLost ? h("span", null, h("i", {style: {background: "var(--bad)"}}), "lost: the replica was given up or left, and its open turns end there") : null)];
  }

  // -- what a person does --

  zoom(factor, around) {
    const from = around - (around - this.from) * factor, until = around + (this.until - around) * factor;
    if (until - from < 1e-4) return;
    this.show(from, until);
  }

  show(from, until) {
    const length = Math.min(until - from, this.end - this.start);
    this.from = Math.max(this.start, Math.min(from, this.end - length));
    this.until = this.from + length;
    this.isMoved = this.from !== this.start || this.until !== this.end;
    this.element.redraw();
  }

  move(share) {
    const by = share * (this.until - this.from);
    this.show(this.from + by, this.until + by);
  }

  under(x, y) {
    const at = this.time(x), reach = 2 * (this.time(x + 1) - at);
    return this.turns.find((turn) => y >= turn.y && y < turn.y + turn.height + 1 && turn.start - reach <= at && at <= turn.end + reach);
  }

  /** The turn that begins after the chosen one, or before it, of those that are seen. */
  choose(by) {
    const seen = this.turns.filter((turn) => turn.end >= this.from && turn.start <= this.until);
    const place = seen.indexOf(this.chosen);
    const next = place < 0 ? 0 : Math.max(0, Math.min(seen.length - 1, place + by));
    this.chosen = by === null ? null : seen[next] || null;
    this.element.redraw();
    const box = this.element.getBoundingClientRect(), turn = this.chosen;
    showTip(turn && this.describeTurn(turn), turn && box.left + Math.max(92, this.x(turn.start)), turn && box.top + turn.y);
  }

  open(turn) {
    if (turn && turn.step !== null) location.hash = to("trajectory", {step: turn.step, ordinal: turn.ordinal, index: turn.episode});
  }

  describeTurn(turn) {
    return [`${turn.isEvaluation ? "evaluation, " : ""}prompt ${turn.ordinal}, episode ${turn.episode}, turn ${turn.turn} on ${turn.name}`,
      turn.isLost ? `lost with its replica${turn.movedTo ? `, continued on ${turn.movedTo}` : ""}` : "",
      `${seconds(turn.end - turn.start)}${turn.isLost ? "" : turn.goesOn ? (isOver() ? ", unfinished when the run ended" : " so far") : `, ${turn.tokens} tokens`}`,
      turn.cuts.length ? `sampled by ${turn.cuts.map((cut) => `v${cut[2]}`).join(", ")}` : "no token yet",
      turn.reward === null ? "" : `reward ${short(turn.reward)}`,
      turn.step === null ? "" : `trained in step ${turn.step}: click or Enter opens it`].filter(Boolean).join("\n");
  }

  describe(x, y) {
    const turn = this.under(x, y);
    if (turn) return this.describeTurn(turn);
    const row = this.rows.find((one) => y >= one.y - 6 && y <= one.y + one.height);
    const at = this.time(x), near = 4 * (this.time(x + 1) - at);
    if (row && row.kind === "steps") {
      const found = this.data.steps.find(([, , start, end]) => start <= at && at <= (end === null ? this.data.length : end));
      if (found) return `step ${found[0]}: ${found[1]}, ${found[3] === null ? "under way" : seconds(found[3] - found[2])}`;
    }
    if (row && row.kind === "replica") {
      const pause = row.replica.updates.find((one) => one.frozen !== null && Math.abs(one.frozen - at) < near);
      if (pause) return `${row.name}: v${pause.version}, ${pause.resumed === null ? "still frozen" : `frozen for ${seconds(pause.resumed - pause.frozen)}`}${pause.error ? `\n${pause.error}` : ""}`;
    }
    const update = this.data.borders.find(([, start, end]) => start - near <= at && at <= (end === null ? this.data.length : end) + near);
    return update ? `update to v${update[0]}: ${update[2] === null ? "under way" : seconds(update[2] - update[1])}` : null;
  }

  listen() {
    const {element} = this;
    let dragged = null;
    element.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.time(event.offsetX));
    }, {passive: false});
    element.addEventListener("pointerdown", (event) => {
      dragged = {x: event.offsetX, from: this.from, until: this.until, far: 0};
      element.setPointerCapture(event.pointerId);
    });
    element.addEventListener("pointermove", (event) => {
      if (!dragged) return showTip(this.describe(event.offsetX, event.offsetY), event.clientX, event.clientY);
      const by = ((dragged.x - event.offsetX) / (this.width - 100)) * (dragged.until - dragged.from);
      dragged.far = Math.max(dragged.far, Math.abs(dragged.x - event.offsetX));
      return this.show(dragged.from + by, dragged.until + by);
    });
    element.addEventListener("pointerup", (event) => {
      const turn = dragged && dragged.far < 4 ? this.under(event.offsetX, event.offsetY) : null;
      dragged = null;
      this.open(turn);
    });
    element.addEventListener("pointerleave", () => showTip(null));
    const zoom = (factor) => this.zoom(factor, this.chosen ? this.chosen.start : (this.from + this.until) / 2);
    listenToKeys(element, {choose: (by) => this.choose(by), open: () => this.open(this.chosen), more: {
      ArrowLeft: () => this.move(-0.2), ArrowRight: () => this.move(0.2), "+": () => zoom(0.7), "=": () => zoom(0.7),
      "-": () => zoom(1.4), 0: () => this.show(this.start, this.end)}});
  }
}
