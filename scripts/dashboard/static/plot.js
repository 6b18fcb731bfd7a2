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
  if (format !== short || values.length < 2) return values.map(format);
  const step = Math.abs(values[1] - values[0]), most = Math.max(...values.map(Math.abs));
  if (most >= 1e4 || step >= 1) return values.map(format);
  const digits = Math.min(6, Math.max(0, Math.ceil(-Math.log10(step) - 1e-9)));
  return values.map((value) => value.toFixed(digits));
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

/** A card with lines. series: [{name, points: [[x, y]], colour: "--s0", dots}]; options: {zero, format, xName}. */
function lines(title, series, options = {}) {
  const format = options.format || short;
  const shown = series.filter((one) => one.points.length);
  const label = `${title}: ${shown.map((one) => `${one.name} ${format(one.points[one.points.length - 1][1])}`).join(", ") || "nothing yet"}`;
  const [x0, x1] = range(shown.flatMap((one) => one.points.map((point) => point[0])), false);
  const [y0, y1] = range(shown.flatMap((one) => one.points.map((point) => point[1])), options.zero !== false);
  let hovered = null;
  let frame = null;
  const view = canvas(170, label, (context, width, height) => {
    const right = width - MARGIN.right, bottom = height - MARGIN.bottom;
    const px = (x) => MARGIN.left + ((x - x0) / (x1 - x0)) * (right - MARGIN.left);
    const py = (y) => bottom - ((y - y0) / (y1 - y0)) * (bottom - MARGIN.top);
    frame = {px, right};
    axes(context, {x0, x1, y0, y1, px, py, right, bottom, format, xName: options.xName || "step"});
    for (const one of shown) {
      const mean = one.dots ? 1 : Math.floor(one.points.length / SMOOTHED);
      if (mean > 1) {
        context.globalAlpha = 0.28;
        drawLine(context, one, px, py, 1);
        context.globalAlpha = 1;
      }
      drawLine(context, mean > 1 ? {...one, points: smoothed(one.points, mean)} : one, px, py, 1.8);
    }
    if (hovered !== null) {
      context.strokeStyle = css("--muted");
      context.beginPath();
      context.moveTo(px(hovered), MARGIN.top);
      context.lineTo(px(hovered), bottom);
      context.stroke();
    }
  });
  view.addEventListener("mousemove", (event) => {
    if (!frame || !shown.length) return;
    const x = x0 + ((event.offsetX - MARGIN.left) / (frame.right - MARGIN.left)) * (x1 - x0);
    const near = shown.map((one) => ({name: one.name, point: nearest(one.points, x)}));
    hovered = near[0].point[0];
    view.redraw();
    showTip([`${options.xName || "step"} ${short(hovered)}`, ...near.map((one) => `${one.name}: ${format(one.point[1])}`)].join("\n"),
      event.clientX, event.clientY);
  });
  view.addEventListener("mouseleave", () => { hovered = null; view.redraw(); showTip(null); });
  const legend = h("div", {class: "legend"}, shown.map((one) => h("span", null,
    h("i", {style: {background: css(one.colour)}}), `${one.name} ${format(one.points[one.points.length - 1][1])}`)));
  return card(title, shown.length ? [view, legend] : h("p", {class: "muted"}, "nothing recorded yet"));
}

function axes(context, {x0, x1, y0, y1, px, py, right, bottom, format, xName}) {
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = css("--muted");
  context.strokeStyle = css("--line");
  context.lineWidth = 1;
  const heights = ticks(y0, y1), texts = tickTexts(heights, format);
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
function bars(title, rows, note) {
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
  return card(title, rows.length ? view : h("p", {class: "muted"}, "nothing recorded yet"));
}
