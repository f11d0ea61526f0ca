// Elements, numbers and axes. Text from the run only ever becomes text nodes: nothing here parses HTML.

const NS = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(NS, name), attributes, children);
}

function byId(id) {
  return document.getElementById(id);
}

function show(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return value; // NaN and infinity come as text
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size < 1e-3 || size >= 1e6) return value.toExponential(2).replace(/\.?0+e/, "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(size >= 100 ? 4 : 3)));
}

// Formats a number to fit the margin of an axis: 10k, 125k, 1.25M.
function showTick(value) {
  if (typeof value !== "number" || Math.abs(value) < 10_000) return show(value);
  return value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 4 }).replace("K", "k");
}

function clamp(value, low, high) {
  return Math.max(low, Math.min(high, value));
}

// Returns round numbers that divide [low, high] into about `wanted` parts.
function ticks(low, high, wanted) {
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((part) => part * power).find((size) => size >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) found.push(i * step);
  return found;
}

function decades(low, high, wanted) {
  const every = Math.max(1, Math.ceil((high - low) / wanted));
  const found = [];
  for (let i = Math.ceil(low); i <= high; i += every) found.push(i);
  return found;
}

function range(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low === Infinity) return [0, 1];
  if (low === high) return [low - (Math.abs(low) / 2 || 0.5), high + (Math.abs(high) / 2 || 0.5)];
  return [low, high];
}

// Returns the index of the element of ascending `values` that is nearest to `wanted`.
function nearest(values, wanted) {
  let low = 0;
  let high = values.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle;
    else high = middle;
  }
  return wanted - values[low] <= values[high] - wanted ? low : high;
}

// Returns the index of the last element of ascending `values` that is not above `wanted`; -1 if there is none.
function lastUpTo(values, wanted) {
  if (!values.length || values[0] > wanted) return -1;
  const index = nearest(values, wanted);
  return values[index] > wanted ? index - 1 : index;
}

function legendItem(name, kind) {
  const value = el("b");
  return { value, node: el("span", {}, el("span", { class: kind }), `${name} `, value) };
}

// Calls `draw` with the width of `box`, now and whenever it changes.
function whenSized(box, draw) {
  let last = 0;
  const update = () => {
    const width = Math.floor(box.clientWidth);
    if (width > 0 && width !== last) draw((last = width));
  };
  new ResizeObserver(update).observe(box);
  update();
}
