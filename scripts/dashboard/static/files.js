"use strict";
// The config, the summary and the logs of the run.

screens.files = {
  title: "Config and logs",
  async open(main, params) {
    const data = await get("config", {run: currentRun()});
    const view = h("div");
    const names = data.logs.map(([name]) => name);
    const full = data.logs.find(([, size]) => size > 0);
    const select = choice("log", data.logs.map(([name, size]) => [name, `${name} (${short(size)} bytes)`]),
      params.get("log") || (full ? full[0] : names[0] || ""), () => show(-1));
    const show = async (end) => {
      try {
        const log = await get("log", {run: currentRun(), name: select.value, end});
        clear(view, h("div", {class: "controls"}, h("button", {disabled: log.start === 0, onclick: () => show(log.start)}, "earlier"),
          `bytes ${log.start} to ${log.end} of ${log.size}`, h("button", {disabled: log.end === log.size, onclick: () => show(-1)}, "latest")),
        h("pre", {tabindex: 0}, log.text || "(empty)"));
      } catch (error) {
        clear(view, problem(error));
      }
    };
    clear(main, h("h1", null, "Config and logs"), h("p", {class: "muted"}, data.folder),
      card("Logs", names.length ? [h("div", {class: "controls"}, select), view] : "no logs"),
      data.summary === null ? null : card("summary.json", h("pre", {tabindex: 0}, data.summary)),
      card("config.yaml", data.config === null ? "no config.yaml" : h("pre", {tabindex: 0}, data.config)));
    if (names.length) await show(-1);
    return null;
  },
};
