// Puts the data of the run into the page.

const data = JSON.parse(byId("data").textContent);

function showHead() {
  byId("name").textContent = data.name;
  byId("state").textContent = data.state;
  byId("state").className = data.state;
  const isCode = (label) => label.endsWith("digest") || label === "run" || label === "model";
  byId("facts").append(
    ...data.facts.map(([label, value]) => {
      const shown = label.endsWith("digest") ? value.slice(0, 16) : value;
      const cell = el("dd", { title: value, class: isCode(label) ? "code" : "" }, shown);
      return el("div", {}, el("dt", {}, label), cell);
    }),
  );
  byId("config").textContent = data.config;
  byId("notes").append(...data.notes.map((note) => el("p", {}, note)));
}

function showFailures() {
  const columns = ["count", "what", "reason", "last", "message"];
  byId("failures").tHead.append(el("tr", {}, ...columns.map((name) => el("th", {}, name))));
  const rows = data.failures.map((one) =>
    el(
      "tr",
      {},
      el("td", { class: "number" }, String(one.count)),
      el("td", {}, one.what),
      el("td", { class: "code" }, one.reason),
      el("td", { class: "quiet" }, one.last),
      el("td", { class: "code" }, one.text),
    ),
  );
  byId("failures").tBodies[0].append(...rows);
  if (rows.length) return;
  byId("failures").replaceWith(el("p", { class: "quiet" }, "None: no call was refused and every sample has a score."));
}

// The calls of agents that failed, each sample as one line that opens.
function showFailedEpisodes() {
  const boxes = data.failedEpisodes.map((one) => {
    const turns = one.messages.map(([label, text, isPolicy]) =>
      el("div", { class: isPolicy ? "turn policy" : "turn" }, el("span", { class: "quiet" }, label), el("span", {}, text)),
    );
    const line = el("summary", {}, el("span", { class: "code" }, one.failure.toUpperCase()), ` prompt ${one.prompt} sample ${one.sample}`);
    return el("details", {}, line, el("p", {}, one.detail), ...turns);
  });
  if (boxes.length) byId("failed-episodes").append(el("h3", {}, "Calls of agents that failed, newest first"), ...boxes);
}

function drawAll() {
  const samples = data.samples.length ? new Samples(data.samples, data.histogram) : null;
  const choose = (step) => samples?.openStep(step);
  const plots = data.panels.map((panel) => new Plot(panel, choose));
  byId("curves").append(...plots.map((plot) => plot.box));
  if (!plots.length) byId("curves-section").remove();
  if (!samples) byId("samples-section").replaceChildren(el("h2", {}, "Samples"), el("p", {}, "The run has no samples."));
  for (const plot of plots) plot.start();
  if (data.timeline.steps.length) {
    const timeline = new Timeline(data.timeline, choose);
    byId("timeline").append(timeline.box);
    timeline.start();
  } else byId("timeline-section").remove();
  if (data.lanes.length) {
    const lanes = new Lanes(data.lanes);
    byId("lanes").append(lanes.box);
    lanes.start();
  } else byId("lanes-section").remove();
}

showHead();
showFailures();
showFailedEpisodes();
drawAll();
