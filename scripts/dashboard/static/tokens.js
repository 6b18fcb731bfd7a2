"use strict";
// The tokens of a trajectory: what may colour them, and what rollout and trainer made of each.

const FATES = [null, "clipped", "rejected"];

/** [text, id, version, rollout logprob, is trained, is of the prompt, trainer logprob, advantage, fate] with names. */
function named(token) {
  const [text, id, version, rollout, isTrained, isPrompt, trainer, advantage, fate] = token;
  const logRatio = rollout === null || trainer === null ? null : trainer - rollout;
  return {text, id, version, rollout, isTrained, isPrompt, trainer, advantage, fate: FATES[fate], logRatio};
}

/** What the colour of a token may say: {name, colour(token, scale), legend(tokens)}. */
const COLOURINGS = {
  version: {
    name: "version that sampled it", colour: (token) => (token.version === null ? "" : tokenColour(token.version)),
    legend: (tokens) => versionLegend([...new Set(tokens.map((one) => one.version))].filter((one) => one !== null).sort((a, b) => a - b)),
  },
  ratio: {
    name: "ratio: trainer / rollout", colour: (token) => diverging(token.logRatio, 0.5),
    legend: () => divergingLegend("the trainer finds it less likely (ratio 0.6)", "equally likely", "more likely (ratio 1.6)"),
  },
  advantage: {
    name: "advantage", colour: (token, most) => diverging(token.isTrained ? token.advantage : null, most || 1),
    legend: (tokens, most) => divergingLegend(`advantage ${short(-most)}`, "0", `${short(most)}`),
  },
  surprise: {
    name: "surprise: -log p in the rollout", colour: (token) => (token.rollout === null ? "" : `hsl(35 90% 50% / ${Math.min(0.75, -token.rollout / 5)})`),
    legend: () => h("div", {class: "legend"}, swatch("hsl(35 90% 50% / 0.05)", "certain"), swatch("hsl(35 90% 50% / 0.75)", "p below 0.02")),
  },
};

/** From red, below 0, to blue, above; nothing at 0. */
function diverging(value, most) {
  if (value === null || value === undefined) return "";
  const share = Math.max(-1, Math.min(1, value / most));
  return `hsl(${share < 0 ? 8 : 212} 85% 52% / ${(0.6 * Math.abs(share)).toFixed(3)})`;
}

const swatch = (background, name) => h("span", null, h("i", {style: {background}}), name);

function divergingLegend(low, middle, high) {
  return h("div", {class: "legend"}, swatch(diverging(-1, 1), low), swatch("transparent", middle), swatch(diverging(1, 1), high));
}

/** The card of tokens: colours to choose, sequences to choose, the branches, and what is known of one token. */
function tokenView(strip, record, step) {
  const branches = strip.branches.map((branch) => ({...branch, tokens: branch.tokens.map(named)}));
  const all = branches.flatMap((branch) => branch.tokens);
  const most = Math.max(...all.map((token) => Math.abs(token.advantage || 0)), 1e-6);
  const detail = h("div", {class: "facts", role: "status"}, h("span", {class: "muted"}, "point at a token, or use the arrow keys in the text"));
  const legend = h("div");
  const spans = []; // [element, token]
  const tree = branchTree(branches, record, (token, i, place) => {
    const span = h("span", {"data-i": i, class: tokenClass(token)}, visible(token.text));
    spans.push([span, token, place]);
    return span;
  });
  const paint = (key) => {
    for (const [span, token] of spans) {
      span.style.backgroundColor = COLOURINGS[key].colour(token, most);
      span.classList.toggle("striped", key === "version" && isStriped(token.version));
    }
    clear(legend, COLOURINGS[key].legend(all, most));
  };
  const usable = Object.entries(COLOURINGS).filter(([key]) => strip.has_trainer || !["ratio", "advantage"].includes(key));
  const select = choice("colour by", usable.map(([value, one]) => [value, one.name]), "version", paint);
  paint("version");
  listenToTokens(tree.element, spans, (token, place) => clear(detail, describeToken(token, place, record, step, strip)));
  return [h("div", {class: "controls"}, h("label", null, "colour by ", select), tree.chooser), legend, marksLegend(all),
    detail, tree.element];
}

function tokenClass(token) {
  if (token.version === null) return "prompt";
  return token.fate || (token.isTrained ? null : "masked");
}

/** A line's end is shown before it breaks the line, so that it can be pointed at. */
const visible = (text) => text.replace(/\n/g, "\u21b5\n");

function marksLegend(tokens) {
  const marks = [["masked", "not trained"], ["clipped", "clipped"], ["rejected", "rejected"]];
  const shown = marks.filter(([name]) => tokens.some((token) => tokenClass(token) === name));
  return h("div", {class: "legend tokens-legend"}, h("span", {class: "prompt"}, "grey: given, not sampled"),
    shown.map(([name, words]) => h("span", null, h("u", {class: name}, words))));
}

// -- one token --

function listenToTokens(element, spans, show) {
  const places = new Map(spans.map(([span], i) => [span, i]));
  let chosen = null;
  const choose = (i) => {
    if (i < 0 || i >= spans.length) return;
    if (chosen !== null) spans[chosen][0].classList.remove("chosen");
    chosen = i;
    spans[i][0].classList.add("chosen");
    show(spans[i][1], spans[i][2]);
  };
  element.addEventListener("mouseover", (event) => { if (places.has(event.target)) choose(places.get(event.target)); });
  element.addEventListener("click", (event) => { if (places.has(event.target)) choose(places.get(event.target)); });
  element.addEventListener("keydown", (event) => {
    const by = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (by === undefined || !event.target.classList.contains("tokens")) return;
    event.preventDefault();
    event.stopPropagation();
    const within = chosen !== null && event.target.contains(spans[chosen][0]);
    choose(within ? chosen + by : places.get(event.target.firstChild));
  });
}

const logprob = (value) => (value === null ? "-" : `${value.toFixed(4)} (p ${Math.exp(value).toFixed(4)})`);

/** A token's facts as pairs of a name and a value. */
function describeToken(token, place, record, step, strip) {
  const facts = [[`token ${place}`, `${JSON.stringify(token.text)} (id ${token.id})`]];
  if (token.version === null) {
    facts.push(["given", token.isPrompt ? "as part of the prompt" : "by the environment; not sampled, never trained"]);
  } else {
    facts.push(["sampled by", `v${token.version}, ${countOf(step - 1 - token.version, "version")} old when trained`],
      ["rollout logprob", logprob(token.rollout)]);
    if (strip.has_trainer) {
      facts.push(["trainer logprob", token.trainer === null ? "not computed: nothing to learn" : logprob(token.trainer)],
        ["ratio", token.logRatio === null ? "-" : Math.exp(token.logRatio).toFixed(4)]);
    }
    facts.push(["trained", !token.isTrained ? "no: masked" : token.fate || (strip.has_trainer && token.trainer === null ? "no: its advantage is 0" : "yes")]);
    if (token.isTrained) facts.push(["advantage", short(token.advantage === null ? record.advantage : token.advantage)]);
  }
  return facts.map(([name, value]) => h("span", null, h("b", null, `${name} `), value));
}

/** Where tokens were not recorded: the share of each version in the response, and its turns. */
function spanStrip(sequence) {
  const total = Math.max(sequence.response_tokens, 1), tone = css("--bar");
  const strip = h("div", {class: "strip", role: "img", "aria-label": sequence.versions.map(([a, b, v]) => `tokens ${a} to ${b}: v${v}`).join("; ")});
  let at = 0;
  const part = (length, colour, title, stripes) => strip.append(h("div", {title, class: stripes, style: {width: `${(100 * length) / total}%`, backgroundColor: colour}}));
  for (const [start, end, version] of sequence.versions) {
    if (start > at) part(start - at, "transparent", "not sampled");
    part(end - start, barColour(version, tone), `tokens ${start} to ${end}: v${version}`, stripesOf(version));
    at = end;
  }
  return [strip, h("p", {class: "muted"}, `turns: ${(sequence.turns || []).map(([a, b]) => `tokens ${a} to ${b}`).join("; ") || "none"}`)];
}
