// Draws when each side of the run was busy in one step: the step under the pointer, the selected one, or the last.
// The bar of a lane goes from its first call to its last. It is filled to the share in which at least one was in progress.

// As in the plot of phases.
const LANE_COLORS = { generate: 0, train: 1, publish: 2, score: 5 };

class Lanes {
  constructor(all) {
    this.all = all;
    this.numbers = all.map((one) => one.step);
    this.when = el("span");
    this.node = svg("svg", { height: HEIGHT, role: "img", "aria-label": "when each side was busy in the step" });
    this.box = el("div", { class: "plot" }, el("div", { class: "legend" }, this.when), this.node);
    steps.listeners.push(() => this.draw());
  }

  start() {
    whenSized(this.node, (width) => {
      this.width = width;
      this.draw();
    });
  }

  draw() {
    if (!this.width) return;
    const wanted = steps.hovered ?? steps.chosen ?? this.numbers.at(-1);
    const one = this.all[nearest(this.numbers, wanted)];
    this.when.textContent = `step ${one.step}, ${showSeconds(one.seconds)}`;
    const [left, right] = [64, 150];
    const scale = (seconds) => left + (seconds / one.seconds) * (this.width - left - right);
    this.node.replaceChildren();
    for (const value of ticks(0, one.seconds, 6)) {
      const x = scale(value);
      this.node.append(svg("line", { class: "grid", x1: x, x2: x, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }));
      this.node.append(svg("text", { x, y: HEIGHT - 4, "text-anchor": "middle" }, showTick(value)));
    }
    const tall = (HEIGHT - MARGIN.top - MARGIN.bottom) / one.lanes.length;
    one.lanes.forEach(([name, begin, end, busy], index) => {
      const y = MARGIN.top + index * tall;
      const bar = { x: scale(begin), width: Math.max(1, scale(end) - scale(begin)) };
      const height = tall - 6;
      const filled = height * (end > begin ? Math.min(1, busy / (end - begin)) : 1);
      this.node.append(svg("text", { x: left - 6, y: y + tall / 2 + 3.5, "text-anchor": "end" }, name));
      if (busy > 0) {
        this.node.append(svg("rect", { class: `f${LANE_COLORS[name]} faded`, ...bar, y: y + 3, height }));
        this.node.append(svg("rect", { class: `f${LANE_COLORS[name]}`, ...bar, y: y + 3 + height - filled, height: filled }));
      }
      const idle = `busy ${showSeconds(busy)}, idle ${showSeconds(Math.max(0, one.seconds - busy))}`;
      this.node.append(svg("text", { x: this.width - right + 8, y: y + tall / 2 + 3.5 }, idle));
    });
  }
}

function showSeconds(value) {
  return `${value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0)} s`;
}
