"use strict";
// The sequences of a trajectory as a tree of branches, each as the messages of both sides.

const ROLE = /^\s*(?:<\|im_start\|>|<\|start_header_id\|>)([^<\n]{1,24})/;
const ROLE_STARTS = ["<|im_start|>", "<|start_header_id|>"];
const HEADER_TOKENS = 8; // a role's header has at most so many

/** A branch as messages: where the chat template marks them, and where sampling begins and ends. */
function messages(branch) {
  const found = [];
  branch.tokens.forEach((token, i) => {
    const last = found[found.length - 1];
    const side = token.version === null ? "given" : "policy";
    const isBlank = last && last.side === "given" && last.text.trim() === "";
    const begins = ROLE_STARTS.includes(token.text.trim()) && !isBlank;
    const isHeader = last && last.side === "given" && ROLE.test(last.text) && last.tokens.length <= HEADER_TOKENS;
    if (!last || begins || (last.side !== side && !(side === "policy" && (isHeader || isBlank)))) {
      found.push({side, text: token.text, tokens: [[token, i]]});
    } else {
      last.side = side;
      last.text += token.text;
      last.tokens.push([token, i]);
    }
  });
  return found;
}

function branchTree(branches, record, makeSpan) {
  const count = record.sequences.length;
  const ends = []; // {turn, side}: how many turns there are up to the end of each branch, and whose message is there
  const sections = branches.map((branch, number) => {
    let {turn, side} = branch.parent === null ? {turn: 0, side: "given"} : ends[branch.parent];
    const blocks = messages(branch).map((message, i) => {
      const goesOn = message.side === "policy" && side === "policy"; // what is sampled in one turn may part
      if (message.side === "policy" && !goesOn) turn += 1;
      side = message.side;
      return messageBlock(message, {turn, goesOn, isFirst: branch.parent === null && i === 0, branch, record, makeSpan});
    });
    ends.push({turn, side});
    const title = count === 1 ? null : h("h3", null, branchName(branch, number, branches), " ",
      h("span", {class: "muted"}, `tokens ${branch.start} to ${branch.start + branch.size}`));
    return h("div", {class: branch.parent === null ? "branch" : "branch below", id: `branch-${number}`}, title, blocks);
  });
  branches.forEach((branch, number) => { if (branch.parent !== null) sections[branch.parent].append(sections[number]); });
  const element = h("div", {class: "tree"}, count > 1 ? branchMap(branches, record, sections) : null,
    sections.filter((_, number) => branches[number].parent === null));
  return {element, chooser: count > 1 ? sequenceChooser(count, branches, sections) : null};
}

function branchName(branch, number, branches) {
  const names = branch.sequences.map((one) => one + 1).join(", ");
  const isEnd = !branches.some((other) => other.parent === number);
  if (branch.sequences.length === 1) return `sequence ${names}${branch.parent === null ? "" : isEnd ? ", alone from here on" : ""}`;
  return `shared by sequences ${names}`;
}

function messageBlock(message, {turn, goesOn, isFirst, branch, record, makeSpan}) {
  const role = ROLE.exec(message.text);
  const versions = [...new Set(message.tokens.map(([token]) => token.version))].filter((one) => one !== null);
  const end = branch.start + message.tokens[message.tokens.length - 1][1] + 1;
  const reward = turnReward(record, branch, end);
  const who = role ? role[1].trim() : message.side === "policy" ? "policy" : isFirst ? "prompt" : "given";
  const about = [message.side === "policy" ? `turn ${turn}${goesOn ? " (continued)" : ""}, sampled by ${versions.map((one) => `v${one}`).join(", ")}` : "given",
    countOf(message.tokens.length, "token"), reward === null ? null : `reward ${short(reward)}`].filter(Boolean).join(" · ");
  return h("div", {class: `message ${message.side}`}, h("div", {class: "who"}, h("b", null, who), " ", h("span", {class: "muted"}, about)),
    h("div", {class: "tokens", tabindex: 0, role: "group", "aria-label": `${who}, tokens; arrow keys move`},
      message.tokens.map(([token, i]) => makeSpan(token, i, branch.start + i))));
}

/** The reward of the turn that ends there, of an episode that is rewarded by turns. */
function turnReward(record, branch, end) {
  for (const number of branch.sequences) {
    const {turn_rewards: rewards, prompt_tokens: prompt} = record.sequences[number];
    const found = (rewards || []).find((one) => prompt + one[0] === end);
    if (found) return found[1];
  }
  return null;
}

function sequenceChooser(count, branches, sections) {
  const buttons = ["all sequences", ...Array.from({length: count}, (_, i) => `${i + 1}`)].map((name, i) => h("button", {
    "aria-pressed": i === 0 ? "true" : "false", onclick: () => choose(i - 1)}, name));
  const choose = (number) => {
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", i - 1 === number ? "true" : "false"));
    branches.forEach((branch, i) => { sections[i].hidden = number >= 0 && !branch.sequences.includes(number); });
  };
  return h("span", {class: "choices", role: "group", "aria-label": "sequences that are shown"}, buttons);
}

/** Where the branches begin and how long they are, a line each, coloured by versions. */
function branchMap(branches, record, sections) {
  const total = Math.max(...branches.map((branch) => branch.start + branch.size), 1), tone = css("--bar");
  const share = (tokens) => `${(100 * tokens) / total}%`;
  return h("div", {class: "branch-map", role: "group", "aria-label": "branches by their tokens"}, branches.map((branch, number) => {
    const runs = [];
    for (const token of branch.tokens) {
      if (runs.length && runs[runs.length - 1][0] === token.version) runs[runs.length - 1][1] += 1; else runs.push([token.version, 1]);
    }
    const bar = h("span", {class: "bar", style: {marginLeft: share(branch.start), width: share(branch.size)}}, runs.map(([version, size]) =>
      h("i", {class: stripesOf(version), style: {width: `${(100 * size) / Math.max(branch.tokens.length, 1)}%`, backgroundColor: version === null ? "var(--line)" : barColour(version, tone)}})));
    return h("button", {onclick: () => sections[number].scrollIntoView({block: "start"}), title: countOf(branch.size, "token")},
      h("span", {class: "name"}, branch.sequences.length === 1 ? `sequence ${branch.sequences[0] + 1}` : `shared by ${branch.sequences.length}`), h("span", {class: "lane"}, bar));
  }));
}
