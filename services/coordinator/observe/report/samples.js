// The table of samples: one step or held-out set at a time, sorted, searched, paged.

const PAGE_SIZE = 25;
const SHORT_ANSWER = 40; // characters, which three lines of the narrow column have room for

function marked(text, sought) {
  if (!sought) return [text];
  const parts = [];
  const lower = text.toLowerCase();
  let begin = 0;
  for (let at = lower.indexOf(sought); at >= 0; at = lower.indexOf(sought, begin)) {
    parts.push(text.slice(begin, at), el("mark", {}, text.slice(at, at + sought.length)));
    begin = at + sought.length;
  }
  return [...parts, text.slice(begin)];
}

function rowsOf(columns) {
  const names = Object.keys(columns);
  return columns.group.map((_, index) => Object.fromEntries(names.map((name) => [name, columns[name][index]])));
}

class Samples {
  constructor(all, histogram) {
    this.all = all;
    this.histogram = histogram;
    this.view = { sort: null, descending: true, sought: "", stop: null, page: 0 };
    byId("source").append(...all.map((source, index) => el("option", { value: index }, source.label)));
    byId("source").addEventListener("change", (event) => this.open(Number(event.target.value)));
    byId("previous").addEventListener("click", () => this.open(this.index - 1));
    byId("next").addEventListener("click", () => this.open(this.index + 1));
    byId("back").addEventListener("click", () => this.update({ page: this.view.page - 1 }));
    byId("forth").addEventListener("click", () => this.update({ page: this.view.page + 1 }));
    byId("search").addEventListener("input", (event) => this.update({ sought: event.target.value.toLowerCase(), page: 0 }));
    byId("rows").tBodies[0].addEventListener("click", (event) => this.toggle(event));
    const newest = all.findLastIndex((source) => !source.heldOut);
    this.open(newest < 0 ? all.length - 1 : newest);
  }

  // Opens the batch of the step, or the nearest one in the page.
  openStep(step) {
    const batches = this.all.filter((source) => !source.heldOut);
    if (!batches.length) return;
    const source = batches[nearest(batches.map((batch) => batch.step), step)];
    this.open(this.all.indexOf(source));
  }

  open(index) {
    this.index = index;
    const source = (this.source = { ...this.all[index], rows: rowsOf(this.all[index].columns) });
    byId("source").value = String(index);
    byId("previous").disabled = index === 0;
    byId("next").disabled = index === this.all.length - 1;
    drawHistogram(byId("histogram"), this.histogram.labels, source.heldOut ? null : this.histogram.counts[source.step]);
    const stamps = source.stamps.map(([version, digest]) => `version ${version}, ${digest || "unpublished"}`);
    const embedded = source.rows.length < source.total ? `This page has ${source.rows.length} of ${source.total} samples. ` : "";
    byId("provenance").textContent = `${embedded}Sampled from weights of ${stamps.join("; ")}. Scored by ${source.scorer}.`;
    const stops = [...new Set(source.rows.map((row) => row.stop))];
    if (!stops.includes(this.view.stop)) this.view.stop = null;
    byId("stops").replaceChildren(...(stops.length > 1 ? stops.map((stop) => this.stopButton(stop)) : []));
    this.update({ page: 0 });
    steps.choose(source.step);
  }

  stopButton(stop) {
    const button = el("button", { type: "button" }, `${stop} ${this.source.rows.filter((row) => row.stop === stop).length}`);
    button.addEventListener("click", () => this.update({ stop: this.view.stop === stop ? null : stop, page: 0 }));
    button.dataset.stop = stop;
    return button;
  }

  update(changes) {
    Object.assign(this.view, changes);
    for (const button of byId("stops").children) button.setAttribute("aria-pressed", button.dataset.stop === this.view.stop);
    const found = this.found();
    const pages = Math.max(1, Math.ceil(found.length / PAGE_SIZE));
    const page = (this.view.page = clamp(this.view.page, 0, pages - 1));
    byId("back").disabled = page === 0;
    byId("forth").disabled = page === pages - 1;
    byId("page").textContent = `${page + 1} of ${pages}`;
    byId("shown").textContent = `${found.length} ${found.length === 1 ? "sample" : "samples"}`;
    const columns = this.columns();
    byId("rows").tHead.replaceChildren(el("tr", {}, el("th"), ...columns.map((column) => this.heading(column))));
    const rows = found.slice(page * PAGE_SIZE, (page + 1) * PAGE_SIZE).map((row) => this.row(row, columns));
    const none = el("tr", {}, el("td", { class: "quiet", colspan: columns.length + 1 }, "no sample"));
    byId("rows").tBodies[0].replaceChildren(...(rows.length ? rows : [none]));
  }

  found() {
    const { sort, descending, sought, stop } = this.view;
    const { prompts, rows } = this.source;
    const wanted = (row) =>
      (stop === null || row.stop === stop) &&
      (!sought || `${prompts[row.group].slice(1).join("\n")}\n${row.completion}`.toLowerCase().includes(sought));
    const key = this.columns().find((column) => column.name === sort)?.key;
    const sign = descending ? -1 : 1;
    const number = (row) => (typeof key(row) === "number" ? key(row) : -Infinity);
    return key ? rows.filter(wanted).sort((a, b) => sign * (number(a) - number(b) || 0)) : rows.filter(wanted);
  }

  columns() {
    const { components, prompts, rows, stamps } = this.source;
    const isSame = components.length === 1 && rows.every((row) => row.components[0] === row.reward);
    const each = isSame ? [] : components.map((name, index) => ({ name, key: (row) => row.components[index] }));
    const advantage = rows.some((row) => row.advantage !== null) ? [{ name: "advantage", key: (row) => row.advantage }] : [];
    const answers = Object.values(prompts).map((prompt) => prompt[2]).filter((answer) => answer !== null);
    const size = answers.some((answer) => answer.length > SHORT_ANSWER) ? "long answer" : "answer";
    const answer = answers.length ? [{ name: "answer", size, text: (row) => prompts[row.group][2] ?? "" }] : [];
    const stamp = (row) => `${stamps[row.stamp][0]} · ${stamps[row.stamp][1].slice(0, 8)}`;
    return [
      { name: "reward", key: (row) => row.reward },
      ...each,
      ...advantage,
      { name: "tokens", key: (row) => row.tokens },
      { name: "stop", quiet: (row) => row.stop },
      { name: "prompt", text: (row) => prompts[row.group][1], title: (row) => prompts[row.group][0] },
      { name: "completion", text: (row) => row.completion, parts: (row) => row.turns },
      ...answer,
      { name: "policy", quiet: stamp, title: (row) => stamps[row.stamp][1] },
      { name: "sample", quiet: (row) => `${row.group}.${row.sample}`, title: (row) => prompts[row.group][0] },
    ];
  }

  heading(column) {
    if (!column.key) return el("th", {}, column.name);
    const { sort, descending } = this.view;
    const isSorted = sort === column.name;
    const button = el("button", { type: "button" }, column.name + (isSorted ? (descending ? " ↓" : " ↑") : ""));
    // Cycles through largest first, smallest first and the original order.
    const next = !isSorted ? { sort: column.name, descending: true } : descending ? { descending: false } : { sort: null };
    button.addEventListener("click", () => this.update({ ...next, page: 0 }));
    return el("th", { class: "number", ...(isSorted && { "aria-sort": descending ? "descending" : "ascending" }) }, button);
  }

  row(row, columns) {
    const cells = columns.map((column) => {
      if (column.key) return el("td", { class: "number" }, show(column.key(row)));
      if (column.parts?.(row)) return el("td", { class: "text" }, el("div", {}, ...this.conversation(column.parts(row))));
      if (column.text) return el("td", { class: `text ${column.size ?? column.name}` }, el("div", {}, ...marked(column.text(row), this.view.sought)));
      return el("td", { class: "quiet", ...(column.title && { title: column.title(row) }) }, column.quiet(row));
    });
    const expand = el("button", { type: "button", class: "expand", "aria-label": "whole text", "aria-expanded": "false" }, "›");
    return el("tr", {}, el("td", {}, expand), ...cells);
  }

  // The turns of an episode: the policy's with their rewards, and the environment's. Calls of agents have labels.
  conversation(parts) {
    return parts.map(([text, reward, called, depth]) => {
      const isPolicy = reward !== null;
      const label = called ?? (isPolicy ? `policy${reward === 0 ? "" : ` · reward ${show(reward)}`}` : "environment");
      const body = el("span", {}, ...marked(text, this.view.sought));
      const turn = el("div", { class: isPolicy ? "turn policy" : "turn environment" }, el("span", { class: "quiet" }, label), body);
      if (depth) turn.style.marginLeft = `${2 * depth}em`;
      return turn;
    });
  }

  // A click on a row toggles its whole text, unless text is being selected.
  toggle(event) {
    const row = event.target.closest("tr");
    const button = row?.querySelector(".expand");
    if (!button || !window.getSelection().isCollapsed) return;
    button.setAttribute("aria-expanded", row.classList.toggle("open"));
  }
}
