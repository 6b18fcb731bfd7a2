"use strict";
// A chart as a file: its numbers as CSV, its picture as SVG.

const TITLE_HEIGHT = 24;
// The name of SVG's elements is an address, and no file of the page has one: the browser is asked for it.
const SVG = new DOMParser().parseFromString("<svg></svg>", "text/html").querySelector("svg").namespaceURI;

function saveButtons(title, shown, view, draw, options) {
  const file = `${currentRun()}-${title}`.replace(/[^\w.-]+/g, "_");
  return h("span", null, "save ", h("button", {class: "save", "aria-label": `save ${title} as CSV`, onclick: () => save(`${file}.csv`, "text/csv", csvOf(shown, options))}, "CSV"),
    " ", h("button", {class: "save", "aria-label": `save ${title} as SVG`, onclick: () => save(`${file}.svg`, "image/svg+xml", svgOf(title, view, draw))}, "SVG"));
}

function save(name, type, text) {
  const link = h("a", {href: URL.createObjectURL(new Blob([text], {type})), download: name});
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

/** A name as a cell: quoted where it must be, and no formula to the program that opens the file. */
function csvCell(name) {
  const text = /^[=+\-@\t\r]/.test(name) ? `'${name}` : name;
  return /[",\r\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
}

/** All recorded values, whatever is seen of them, with all their digits; smoothed ones in columns of their own. */
function csvOf(shown, {xName, smoothing}) {
  const columns = shown.flatMap((one) => [[one.name, one.points], ...(one.trend ? [[`${one.name} (smoothed ${smoothing})`, one.trend]] : [])]);
  const rows = new Map();
  columns.forEach(([, points], i) => points.forEach(([x, y]) => {
    if (!rows.has(x)) rows.set(x, columns.map(() => ""));
    rows.get(x)[i] = y;
  }));
  const sorted = [...rows].sort((a, b) => a[0] - b[0]);
  return `${[[xName || "step", ...columns.map(([name]) => csvCell(name))], ...sorted.map(([x, values]) => [x, ...values])].map((row) => row.join(",")).join("\r\n")}\r\n`;
}

/** What is seen of a chart, below its title. */
function svgOf(title, view, draw) {
  const width = view.clientWidth, height = view.clientHeight, picture = new SvgContext(width, height + TITLE_HEIGHT);
  picture.fillStyle = css("--card");
  picture.fillRect(0, 0, width, height + TITLE_HEIGHT);
  picture.fillStyle = css("--ink");
  picture.fillText(`${title} \u00b7 ${currentRun()}`, MARGIN.left, 16);
  picture.into = picture.add("g", {transform: `translate(0 ${TITLE_HEIGHT})`});
  draw(picture, width, height);
  return new XMLSerializer().serializeToString(picture.root);
}

/** Answers like the context of a canvas, as far as `lines` needs it, and makes elements of SVG. */
class SvgContext {
  constructor(width, height) {
    Object.assign(this, {globalAlpha: 1, textAlign: "start", lineWidth: 1, path: ""});
    this.root = this.into = document.createElementNS(SVG, "svg");
    for (const [name, value] of Object.entries({width, height, viewBox: `0 0 ${width} ${height}`})) this.root.setAttribute(name, value);
  }

  add(tag, attributes, text = "") {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, typeof value === "number" ? Number(value.toFixed(2)) : value);
    element.textContent = text.replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g, "\ufffd"); // no XML may have these
    this.into.append(element);
    return element;
  }

  beginPath() { this.path = ""; }
  moveTo(x, y) { this.path += `M${x.toFixed(2)} ${y.toFixed(2)}`; }
  lineTo(x, y) { this.path += `L${x.toFixed(2)} ${y.toFixed(2)}`; }
  rect(x, y, width, height) { this.path += `M${x} ${y}h${width}v${height}h${-width}z`; }
  arc(x, y, radius) { this.moveTo(x - radius, y); this.path += `a${radius} ${radius} 0 1 0 ${2 * radius} 0a${radius} ${radius} 0 1 0 ${-2 * radius} 0`; }
  stroke() { this.add("path", {d: this.path, fill: "none", stroke: this.strokeStyle, "stroke-width": this.lineWidth, "stroke-linejoin": "round", opacity: this.globalAlpha}); }
  fill() { this.add("path", {d: this.path, fill: this.fillStyle, opacity: this.globalAlpha}); }
  fillRect(x, y, width, height) { this.add("rect", {x, y, width, height, fill: this.fillStyle, opacity: this.globalAlpha}); }
  fillText(text, x, y) {
    this.add("text", {x, y, fill: this.fillStyle, "font-size": 11, "font-family": "system-ui, sans-serif",
      "text-anchor": {right: "end", center: "middle"}[this.textAlign] || "start"}, String(text));
  }

  save() { this.outside = this.into; }
  restore() { this.into = this.outside; }
  clip() {
    const shape = this.add("clipPath", {id: "frame"}), group = this.add("g", {"clip-path": "url(#frame)"});
    this.into = shape;
    this.fill();
    this.into = group;
  }
}
