// Curves, the timeline of phases and the histogram. All share the step under the pointer and the selected step.

const HEIGHT = 118;
const PHASE_COLORS = { "generating and scoring": 0, training: 1, publishing: 2, evaluating: 3, checkpointing: 4, other: 5 };
const MARGIN = { left: 44, right: 14, top: 6, bottom: 17 };

const steps = {
  listeners: [],
  hovered: null,
  chosen: null,
  hover(step) {
    if (step === this.hovered) return;
    this.hovered = step;
    for (const listener of this.listeners) listener();
  },
  choose(step) {
    this.chosen = step;
    for (const listener of this.listeners) listener();
  },
};

function followPointer(node, stepAt, onChoose) {
  const at = (event) => stepAt(event.clientX - node.getBoundingClientRect().left);
  node.addEventListener("pointermove", (event) => steps.hover(at(event)));
  node.addEventListener("pointerleave", () => steps.hover(null));
  node.addEventListener("click", (event) => onChoose(at(event)));
}

function verticalLine(x, kind) {
  return svg("line", { class: kind, x1: x, x2: x, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom });
}

function drawAxes(node, width, xScale, xTicks, yTicks, yScale, yLabel) {
  for (const value of yTicks) {
    const y = yScale(value);
    node.append(svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y }));
    const label = svg("text", { x: MARGIN.left - 6, y: y + 3.5, "text-anchor": "end" }, yLabel(value));
    node.append(label);
  }
  for (const value of xTicks) {
    node.append(svg("text", { x: xScale(value), y: HEIGHT - 4, "text-anchor": "middle" }, String(value)));
  }
}

function wholeTicks(low, high, width) {
  const rough = Math.max(1, (high - low) / clamp(Math.floor(width / 70), 2, 20));
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((part) => part * power).find((size) => size >= rough);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high; value += step) found.push(value);
  return found.length ? found : [low];
}

// One panel of curves. Series of held-out sets have few points, so their points are drawn too.
class Plot {
  constructor(panel, onChoose) {
    this.panel = panel;
    this.legend = panel.series.map((one, index) => legendItem(one.name, `key f${index % 6}`));
    this.node = svg("svg", { height: HEIGHT, role: "img", "aria-label": panel.title });
    this.box = el(
      "figure",
      { class: "plot" },
      el("h3", {}, panel.title),
      el("div", { class: "legend" }, ...this.legend.map((item) => item.node)),
      this.node,
    );
    this.marks = svg("g");
    const all = panel.series.flatMap((one) => one.x);
    this.xs = [...new Set(all)].sort((a, b) => a - b);
    this.xRange = range(all);
    const usable = (y) => typeof y === "number" && (!panel.log || y > 0);
    this.toY = (y) => (usable(y) ? (panel.log ? Math.log10(y) : y) : null);
    this.yRange = range(panel.series.flatMap((one) => one.y.map(this.toY)).filter((y) => y !== null));
    followPointer(this.node, (x) => this.xs[nearest(this.xs, this.stepAt(x))], onChoose);
    steps.listeners.push(() => this.mark());
  }

  start() {
    whenSized(this.node, (width) => this.draw(width));
  }

  stepAt(x) {
    const share = (x - MARGIN.left) / (this.width - MARGIN.left - MARGIN.right);
    return this.xRange[0] + share * (this.xRange[1] - this.xRange[0]);
  }

  draw(width) {
    this.width = width;
    const [x0, x1] = this.xRange;
    const [y0, y1] = this.yRange;
    const pad = (y1 - y0) * 0.06;
    this.xScale = (x) => MARGIN.left + ((x - x0) / (x1 - x0)) * (width - MARGIN.left - MARGIN.right);
    this.yScale = (y) =>
      HEIGHT - MARGIN.bottom - ((y - y0 + pad) / (y1 - y0 + 2 * pad)) * (HEIGHT - MARGIN.top - MARGIN.bottom);
    this.node.replaceChildren();
    const yTicks = this.panel.log && y1 - y0 >= 1 ? decades(y0, y1, 4) : ticks(y0, y1, 3);
    const label = (y) => showTick(this.panel.log ? 10 ** y : Number(y.toPrecision(6)));
    drawAxes(this.node, width, this.xScale, wholeTicks(x0, x1, width), yTicks, this.yScale, label);
    this.panel.series.forEach((one, index) => this.drawSeries(one, index % 6));
    this.node.append(this.marks);
    this.mark();
  }

  drawSeries(one, color) {
    const runs = [[]]; // a value that is not a number leaves a gap
    one.x.forEach((x, index) => {
      const y = this.toY(one.y[index]);
      if (y === null) runs.push([]);
      else runs.at(-1).push([this.xScale(x).toFixed(1), this.yScale(y).toFixed(1)]);
    });
    const isSparse = one.x.length <= 30;
    for (const run of runs) {
      this.node.append(svg("polyline", { class: `series s${color}`, points: run.map((point) => point.join()).join(" ") }));
      if (!isSparse && run.length > 1) continue;
      for (const [cx, cy] of run) this.node.append(svg("circle", { class: `f${color}`, cx, cy, r: 2 }));
    }
  }

  mark() {
    if (!this.width) return;
    this.marks.replaceChildren();
    const [low, high] = this.xRange;
    const { chosen, hovered } = steps;
    if (chosen !== null && chosen >= low && chosen <= high) this.marks.append(verticalLine(this.xScale(chosen), "chosen"));
    if (hovered !== null && hovered >= low && hovered <= high) this.marks.append(verticalLine(this.xScale(hovered), "cursor"));
    this.panel.series.forEach((one, index) => {
      const at = hovered === null ? one.x.length - 1 : lastUpTo(one.x, hovered);
      this.legend[index].value.textContent = show(one.y[at]);
      const y = hovered === null || at < 0 ? null : this.toY(one.y[at]);
      if (y === null || y === undefined) return;
      this.marks.append(svg("circle", { class: `f${index % 6}`, cx: this.xScale(one.x[at]), cy: this.yScale(y), r: 3 }));
    });
  }
}

// Draws a bar for every step, or for several neighboring steps if they are less than a pixel or two; its height is
// their mean number of seconds.
class Timeline {
  constructor(timeline, onChoose) {
    this.timeline = timeline;
    this.legend = timeline.phases.map((phase, index) => legendItem(phase.name, `key block f${this.color(index)}`));
    this.when = el("span");
    this.node = svg("svg", { height: HEIGHT, role: "img", "aria-label": "seconds of each phase by step" });
    this.box = el("div", { class: "plot" }, el("div", { class: "legend" }, this.when, ...this.legend.map((i) => i.node)), this.node);
    followPointer(this.node, (x) => timeline.steps[clamp(Math.floor((x - MARGIN.left) / this.perStep), 0, timeline.steps.length - 1)], onChoose);
    steps.listeners.push(() => this.mark());
  }

  color(phase) {
    return PHASE_COLORS[this.timeline.phases[phase].name];
  }

  start() {
    whenSized(this.node, (width) => this.draw(width));
  }

  draw(width) {
    const { steps: all, phases } = this.timeline;
    const inner = width - MARGIN.left - MARGIN.right;
    this.perStep = Math.min(inner / all.length, 120);
    const together = Math.ceil(2 / this.perStep);
    const bins = Array.from({ length: Math.ceil(all.length / together) }, (_, bin) =>
      phases.map(({ seconds }) => mean(seconds.slice(bin * together, (bin + 1) * together))),
    );
    const top = Math.max(...bins.map((bin) => bin.reduce((a, b) => a + b, 0)));
    const yScale = (y) => HEIGHT - MARGIN.bottom - (y / top) * (HEIGHT - MARGIN.top - MARGIN.bottom);
    this.xScale = (step) => MARGIN.left + (nearest(all, step) + 0.5) * this.perStep;
    this.node.replaceChildren();
    const labelled = wholeTicks(all[0], all.at(-1), all.length * this.perStep);
    drawAxes(this.node, width, this.xScale, labelled, ticks(0, top, 3), yScale, showTick);
    const gap = this.perStep * together > 6 ? Math.max(1.5, this.perStep / 8) : 0;
    bins.forEach((bin, index) => {
      let below = 0;
      bin.forEach((seconds, phase) => {
        const box = { x: MARGIN.left + index * together * this.perStep + gap / 2, y: yScale(below + seconds) };
        const size = { width: Math.max(0.5, this.perStep * together - gap), height: yScale(below) - yScale(below + seconds) };
        this.node.append(svg("rect", { class: `f${this.color(phase)}`, ...box, ...size }));
        below += seconds;
      });
    });
    this.marks = svg("g");
    this.node.append(this.marks);
    this.mark();
  }

  mark() {
    if (!this.marks) return;
    const { hovered, chosen } = steps;
    const index = hovered === null ? -1 : nearest(this.timeline.steps, hovered);
    this.when.textContent = index < 0 ? "mean of all steps" : `step ${this.timeline.steps[index]}`;
    this.timeline.phases.forEach(({ seconds }, phase) => {
      this.legend[phase].value.textContent = show(index < 0 ? mean(seconds) : seconds[index]);
    });
    this.marks.replaceChildren();
    if (chosen !== null) this.marks.append(verticalLine(this.xScale(chosen), "chosen"));
    if (hovered !== null) this.marks.append(verticalLine(this.xScale(hovered), "cursor"));
  }
}

function mean(values) {
  return values.reduce((a, b) => a + b, 0) / values.length;
}

// Draws how often each reward, or range of rewards, occurs in a step, including samples that are not in the page.
function drawHistogram(box, labels, counts) {
  box.replaceChildren();
  if (!counts) return;
  const [width, height, left, foot] = [420, 92, 14, 17];
  const total = counts.reduce((a, b) => a + b, 0);
  const top = Math.max(...counts);
  const each = Math.min((width - 2 * left) / labels.length, 84);
  const node = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "histogram of the step's rewards" });
  const every = Math.ceil(labels.length / 6);
  labels.forEach((label, index) => {
    const tall = (counts[index] / top) * (height - foot - 15);
    const x = left + index * each;
    const bar = svg("rect", { class: "f0", x: x + 1, y: height - foot - tall, width: each - 2, height: tall });
    bar.append(svg("title", {}, `${label}: ${counts[index]} of ${total}`));
    node.append(bar);
    const middle = { x: x + each / 2, "text-anchor": "middle" };
    if (counts[index] && each > 26) node.append(svg("text", { ...middle, y: height - foot - tall - 4 }, String(counts[index])));
    if (index % every === 0) node.append(svg("text", { ...middle, y: height - 4 }, label.split(" ")[0]));
  });
  node.append(svg("line", { class: "grid", x1: left, x2: left + labels.length * each, y1: height - foot, y2: height - foot }));
  box.append(el("figcaption", { class: "legend" }, `rewards of all ${total} samples of this step`), node);
}
