"use strict";
// All runs of the folder, with how each one is.

screens.runs = {
  title: "Runs",
  async open(main) {
    const draw = () => clear(main, h("h1", null, "Runs"), card(null, table(["run", "state", "", "last update", "folder"], runs.map((run) => [
      h("a", {href: `#pulse?${new URLSearchParams({run: run.name})}`}, run.name),
      run.status ? h("b", {class: `state ${run.status.state}`}, run.status.state) : "-", run.status ? clipped(run.status.text) : "",
      h("span", {class: "nowrap"}, clock(run.status ? run.status.updated : run.changed)), run.folder]), "there are no runs")));
    await readRuns();
    draw();
    return embedded ? null : {refresh: draw}; // the list itself is read again every RUNS_EVERY_MS
  },
};
