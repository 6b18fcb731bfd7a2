"use strict";
// Lines over steps and bars, drawn on canvas.

const SMOOTHED = 20; // of more points, the mean over a part of so many is drawn over faint ones
const MARGIN = {left: 46, right: 10, top: 8, bottom: 20};

/** Round numbers between two values: ticks(0, 0.94) is [0, 0.2, 0.4, 0.6, 0.8]. */
function ticks(low, high, count = 5) {
  const span = high - low || 1;
  const power = 10 ** Math.floor(Math.log10(span / count));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => span / one <= count) || 10 * power;
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return found;
}

/** Ticks as texts, all with as many digits as their distance needs: 0.0, 0.5, 1.0. */
function tickTexts(values, format) {
  if (![short, percent].includes(format) || values.length < 2) return values.map(format);
  const step = Math.abs(values[1] - values[0]), most = Math.max(...values.map(Math.abs));
  if (format === percent) return values.map((value) => `${(100 * value).toFixed(Math.max(0, Math.ceil(-Math.log10(100 * step) - 1e-9)))}%`);
  if (most >= 1e4 || step >= 1) return values.map(format);
  if (step < 1e-4) return values.map((value) => (value === 0 ? "0" : value.toExponential(most / step >= 10 ? 1 : 0)));
  const digits = Math.min(6, Math.max(0, Math.ceil(-Math.log10(step) - 1e-9)));
  return values.map((value) => value.toFixed(digits));
}

/** Round numbers on a logarithmic axis between two powers of ten: logTicks(-1, 1) is [0.1, 0.2, 0.5, 1, 2, 5, 10]. */
function logTicks(low, high) {
  if (high - low < 1) return ticks(10 ** low, 10 ** high).filter((at) => at > 0);
  const parts = high - low < 3 ? [1, 2, 5] : [1], every = Math.ceil((high - low) / 6);
  const found = [];
  for (let power = Math.floor(low); power <= high + 1e-9; power += every) found.push(...parts.map((part) => part * 10 ** power));
  return found.filter((at) => Math.log10(at) >= low - 1e-9 && Math.log10(at) <= high + 1e-9);
}

/** 0.05, 200, 5e-4: a tick of `logTicks` has one digit. */
const logTickText = (at) => (at < 1e-3 || at >= 1e4 ? at.toExponential(0) : String(Number(at.toPrecision(1))));

/** The exponential moving average: of each value, 1 - `weight` is its own. The first ones are not drawn towards 0. */
function movingAverage(points, weight) {
  let sum = 0, share = 0;
  return points.map(([x, y]) => {
    sum = weight * sum + (1 - weight) * y;
    share = weight * share + 1 - weight;
    return [x, sum / share];
  });
}

/** The pieces of a line, which breaks at the values that a logarithmic axis cannot show. */
function pieces(points, isLog) {
  const found = [[]];
  for (const point of points) {
    if (!isLog || point[1] > 0) found[found.length - 1].push(point); else found.push([]);
  }
  return found.filter((piece) => piece.length);
}

/** The mean of each point and those around it, so many in all. */
function smoothed(points, width) {
  const half = Math.floor(width / 2);
  return points.map(([x], i) => {
    const near = points.slice(Math.max(0, i - half), i + half + 1);
    return [x, near.reduce((sum, point) => sum + point[1], 0) / near.length];
  });
}

function range(values, zero) {
  if (!values.length) return [0, 1];
  let low = zero ? 0 : Infinity, high = zero ? 0 : -Infinity;
  for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
  if (low === high) { low -= zero && low >= 0 ? 0 : 0.5; high += 0.5; }
  return [low, high];
}

const zooms = new Map(); // `run|title` -> [x0, x1], kept while a live page draws its charts anew

/** The points between two places, and the nearest ones beyond them, to which lines lead. */
function between(points, [x0, x1]) {
  const first = points.findIndex((point) => point[0] >= x0);
  const after = points.findIndex((point) => point[0] > x1);
  if (first < 0) return points.slice(-1);
  return points.slice(Math.max(0, first - 1), after < 0 ? undefined : after + 1);
}

/** A card with lines. series: [{name, points: [[x, y]], colour: "--s0", dots, isRaw, key}]; isRaw: never smoothed.
 * options: {zero, format, xName, empty, about, smoothing, isLog, canSave}. Without `smoothing`, the weight of a moving
 * average, long lines have a mean of their own. Dragging zooms in, a double click or 0 shows all. */
function lines(title, series, options = {}) {
  const format = options.format || short;
  const recorded = series.filter((one) => one.points.length);
  const numLeftOut = options.isLog ? recorded.reduce((sum, one) => sum + one.points.filter((point) => point[1] <= 0).length, 0) : 0;
  const shown = recorded.filter((one) => pieces(one.points, options.isLog).length)
    .map((one) => ({...one, trend: options.smoothing > 0 && !one.dots ? movingAverage(one.points, options.smoothing) : null}));
  const label = `${title}: ${shown.map((one) => `${one.name} ${format(one.points[one.points.length - 1][1])}`).join(", ") || "nothing yet"}`;
  const whole = range(shown.flatMap((one) => one.points.map((point) => point[0])), false);
  const place = `${currentRun()}|${title}`;
  const look = {window: zooms.get(place) || whole, frame: null, hovered: null, dragged: null}; // dragged: [x of its beginning, x now]
  const draw = (context, width, height) => paintLines(context, width, height, shown, look, {...options, format});
  const view = canvas(170, label, draw);
  const valueAt = (event) => {
    const [x0, x1] = look.window;
    return Math.max(x0, Math.min(x1, x0 + ((event.offsetX - MARGIN.left) / (look.frame.right - MARGIN.left)) * (x1 - x0)));
  };
  const zoom = (from, until) => {
    if (until - from < (whole[1] - whole[0]) * 1e-4) return;
    look.window = [Math.max(whole[0], from), Math.min(whole[1], until)];
    if (look.window[0] <= whole[0] && look.window[1] >= whole[1]) zooms.delete(place); else zooms.set(place, look.window);
    view.redraw();
  };
  if (shown.length) zoomByPointerAndKeys(view, {valueAt, zoom, whole, window: () => look.window, mark: (pair) => { look.dragged = pair; view.redraw(); }});
  view.addEventListener("mousemove", (event) => {
    if (!look.frame || !shown.length) return;
    const x = valueAt(event);
    look.hovered = nearest(shown[0].points, x)[0];
    view.redraw();
    showTip([`${options.xName || "step"} ${short(look.hovered)}`, ...shown.map((one) => `${one.name}: ${format(nearest(one.points, x)[1])}`
      + (one.trend ? `, smoothed ${format(nearest(one.trend, x)[1])}` : ""))].join("\n"), event.clientX, event.clientY);
  });
  view.addEventListener("mouseleave", () => { look.hovered = null; view.redraw(); showTip(null); });
  const legend = h("div", {class: "legend"}, shown.map((one) => h("span", null,
    h("i", {style: {background: css(one.colour)}}), `${one.name} ${format(one.points[one.points.length - 1][1])}`)),
  numLeftOut ? h("span", null, `left out: ${countOf(numLeftOut, "value")} at or below 0`) : null,
  options.canSave ? saveButtons(title, shown, view, draw, options) : null);
  const about = [options.about, explain(series.filter((one) => one.key).map((one) => [one.name, one.key]))].filter(Boolean).join("\n");
  const empty = numLeftOut ? "every value is at or below 0, which a logarithmic axis cannot show" : options.empty || "nothing recorded yet";
  return card(about ? [title, " ", explained(about)] : title, shown.length ? [view, legend] : h("p", {class: "muted"}, empty));
}

/** Draw axes and lines into a canvas, or into what answers like one, and keep their frame in `look`. */
function paintLines(context, width, height, shown, look, options) {
  const right = width - MARGIN.right, bottom = height - MARGIN.bottom, [x0, x1] = look.window;
  const seen = shown.map((one) => ({...one, points: between(one.points, look.window), trend: one.trend && between(one.trend, look.window)}));
  const scale = options.isLog ? Math.log10 : (y) => y;
  const values = seen.flatMap((one) => [...one.points, ...(one.trend || [])].map((point) => point[1]));
  const [y0, y1] = range((options.isLog ? values.filter((y) => y > 0) : values).map(scale), options.zero !== false && !options.isLog);
  const px = (x) => MARGIN.left + ((x - x0) / (x1 - x0)) * (right - MARGIN.left);
  const py = (y) => bottom - ((scale(y) - y0) / (y1 - y0)) * (bottom - MARGIN.top);
  look.frame = {right};
  axes(context, {x0, x1, y0, y1, px, py, right, bottom, format: options.format, isLog: options.isLog, xName: options.xName || "step"});
  context.save();
  context.beginPath();
  context.rect(MARGIN.left - 4, 0, right - MARGIN.left + 8, height);
  context.clip();
  const line = (one, points, thick) => pieces(points, options.isLog).forEach((piece) => drawLine(context, {...one, points: piece}, px, py, thick));
  for (const one of seen) {
    const mean = one.dots || one.isRaw || options.smoothing !== undefined ? 1 : Math.floor(one.points.length / SMOOTHED);
    const trend = mean > 1 ? smoothed(one.points, mean) : one.trend;
    if (trend) {
      context.globalAlpha = 0.28;
      line(one, one.points, 1);
      context.globalAlpha = 1;
    }
    line(one, trend || one.points, 1.8);
  }
  context.restore();
  if (look.dragged) {
    context.globalAlpha = 0.15;
    context.fillStyle = css("--accent");
    context.fillRect(px(Math.min(...look.dragged)), MARGIN.top, Math.abs(px(look.dragged[1]) - px(look.dragged[0])), bottom - MARGIN.top);
    context.globalAlpha = 1;
  }
  if (look.hovered === null) return;
  context.strokeStyle = css("--muted");
  context.beginPath();
  context.moveTo(px(look.hovered), MARGIN.top);
  context.lineTo(px(look.hovered), bottom);
  context.stroke();
}

/** Dragging chooses what is seen; a double click and 0 show all; + - and the arrows zoom and move. */
function zoomByPointerAndKeys(view, {valueAt, zoom, whole, window: seen, mark}) {
  let from = null;
  view.classList.add("zoomed-by-drag");
  view.tabIndex = 0;
  view.addEventListener("pointerdown", (event) => { from = valueAt(event); view.setPointerCapture(event.pointerId); });
  view.addEventListener("pointermove", (event) => { if (from !== null) mark([from, valueAt(event)]); });
  view.addEventListener("pointerup", (event) => {
    const [low, high] = [from, valueAt(event)].sort((a, b) => a - b);
    const [x0, x1] = seen();
    from = null;
    mark(null);
    if (high - low > (x1 - x0) * 0.02) zoom(low, high);
  });
  view.addEventListener("pointercancel", () => { from = null; mark(null); });
  view.addEventListener("dblclick", () => zoom(...whole));
  view.addEventListener("keydown", (event) => {
    const [x0, x1] = seen(), by = (x1 - x0) * 0.2;
    const act = {"+": () => zoom(x0 + by, x1 - by), "-": () => zoom(x0 - by, x1 + by), 0: () => zoom(...whole),
      ArrowLeft: () => { const left = Math.min(by, x0 - whole[0]); zoom(x0 - left, x1 - left); },
      ArrowRight: () => { const left = Math.min(by, whole[1] - x1); zoom(x0 + left, x1 + left); }}[event.key];
    if (act) { event.preventDefault(); event.stopPropagation(); act(); }
  });
}

function axes(context, {x0, x1, y0, y1, px, py, right, bottom, format, isLog, xName}) {
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = css("--muted");
  context.strokeStyle = css("--line");
  context.lineWidth = 1;
  const heights = isLog ? logTicks(y0, y1) : ticks(y0, y1), texts = isLog && y1 - y0 >= 1 ? heights.map(logTickText) : tickTexts(heights, format);
  heights.forEach((y, i) => {
    context.beginPath();
    context.moveTo(MARGIN.left, Math.round(py(y)) + 0.5);
    context.lineTo(right, Math.round(py(y)) + 0.5);
    context.stroke();
    context.textAlign = "right";
    context.fillText(texts[i], MARGIN.left - 6, py(y) + 4);
  });
  context.fillText(xName, MARGIN.left - 12, bottom + 14);
  context.textAlign = "center";
  const across = ticks(x0, x1, 6), names = tickTexts(across, short);
  across.forEach((x, i) => context.fillText(names[i], px(x), bottom + 14));
}

function drawLine(context, one, px, py, thick) {
  context.strokeStyle = context.fillStyle = css(one.colour);
  context.lineWidth = thick;
  context.lineJoin = "round";
  context.beginPath();
  one.points.forEach(([x, y], i) => (i ? context.lineTo(px(x), py(y)) : context.moveTo(px(x), py(y))));
  context.stroke();
  if (!one.dots && one.points.length > 1) return;
  for (const [x, y] of one.points) {
    context.beginPath();
    context.arc(px(x), py(y), 3, 0, 7);
    context.fill();
  }
}

function nearest(points, x) {
  let low = 0, high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle; else high = middle;
  }
  return Math.abs(points[low][0] - x) <= Math.abs(points[high][0] - x) ? points[low] : points[high];
}

/** A card with bars: [[name, value]]. */
function bars(title, rows, note, {about, empty} = {}) {
  const most = Math.max(...rows.map((row) => row[1]), 1e-9);
  const total = rows.reduce((sum, row) => sum + row[1], 0) || 1;
  const label = `${title}: ${rows.map(([name, value]) => `${name}: ${percent(value / total)}`).join(", ") || "nothing yet"}`;
  const view = canvas(170, label, (context, width, height) => {
    const each = (width - 20) / Math.max(rows.length, 1), bottom = height - 34;
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "center";
    rows.forEach(([name, value], i) => {
      const tall = (value / most) * (bottom - 18), x = 10 + i * each;
      context.fillStyle = css("--s2");
      context.fillRect(x + each * 0.15, bottom - tall, Math.max(1, each * 0.7), tall);
      context.fillStyle = css("--muted");
      if (each > 24 || i % Math.ceil(24 / each) === 0) {
        context.fillText(percent(value / total), x + each / 2, bottom - tall - 5);
        context.fillText(name, x + each / 2, bottom + 14);
      }
    });
    context.fillText(note || "", width / 2, height - 4);
  });
  return card(about ? [title, " ", explained(about)] : title, rows.length ? view : h("p", {class: "muted"}, empty || "nothing recorded yet"));
}
