// What the user chose to see: variants, values of the keys that vary, seed, layer, head, kind of curve.

const ALL = "all";

class View {
  constructor() {
    this.off = new Set(); // variants that are switched off
    this.axes = {}; // key -> JSON of the value, or ALL
    this.seed = ALL;
    this.layer = 0;
    this.head = ALL; // the layer's value
    this.curve = "mean";
  }

  /** Keep what is still there; the highest rate is what is seen first. */
  fit(data) {
    for (const axis of data.axes) {
      const values = axis.values.map((v) => JSON.stringify(v));
      const first = axis.key === "optim.lr" ? values[values.length - 1] : ALL;
      if (!(axis.key in this.axes) || (this.axes[axis.key] !== ALL && !values.includes(this.axes[axis.key]))) this.axes[axis.key] = first;
    }
    const layers = layersOf(data.runs);
    if (layers.length && !layers.includes(this.layer)) this.layer = layers[0];
    if (this.head !== ALL && this.head >= headsOf(data.runs)) this.head = ALL;
  }

  get headIndex() {
    return this.head === ALL ? null : this.head;
  }

  /** Whether a run is chosen; `but` names a key that does not count. */
  has(data, run, but) {
    if (this.off.has(run.variant) || (this.seed !== ALL && run.seed !== Number(this.seed) && but !== "seed")) return false;
    return data.axes.every(({ key }) => {
      const wanted = this.axes[key];
      return key === but || wanted === ALL || JSON.stringify(data.config(run, key)) === wanted;
    });
  }

  runs(data, but) {
    return data.runs.filter((run) => this.has(data, run, but));
  }
}

function layersOf(runs) {
  return [...new Set(runs.flatMap((run) => (run.attention ? run.attention.layers : [])))].sort((a, b) => a - b);
}

function headsOf(runs) {
  return Math.max(0, ...runs.map((run) => (run.attention && run.attention.each_spans ? run.attention.heads : 0)));
}

/** What stands for a variant: its colour, its line and its marker, as in every chart. */
function swatch(data, variant) {
  const look = data.look(variant);
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 30 14");
  svg.setAttribute("aria-hidden", "true");
  const line = document.createElementNS(svg.namespaceURI, "line");
  const dash = { solid: "", dash: "6 3", dot: "2 2", dashdot: "6 2 2 2", longdash: "9 3", longdashdot: "9 2 2 2" }[dashOf(data, variant)];
  for (const [name, value] of Object.entries({ x1: 0, x2: 30, y1: 7, y2: 7, stroke: visible(look.colour), "stroke-width": 3, "stroke-dasharray": dash }))
    line.setAttribute(name, value);
  svg.append(line);
  return svg;
}

function dashOf(data, variant) {
  return DASHES[data.variants.findIndex((v) => v.name === variant) % DASHES.length];
}

function layerChoice(runs, view, changed) {
  const layers = layersOf(runs);
  const last = layers.length - 1;
  const names = layers.map((layer, i) => [layer, `${layer}${i === 0 ? " (first)" : i === last ? " (last)" : ""}`]);
  return choice("layer", names, view.layer, (value) => changed((view.layer = Number(value))));
}

function headChoice(runs, view, changed) {
  const heads = [...Array(headsOf(runs)).keys()].map((head) => [head, `head ${head}`]);
  const set = (value) => changed((view.head = value === ALL ? ALL : Number(value)));
  return choice("head", [[ALL, "the layer's value"], ...heads], view.head, set);
}

function curveChoice(view, changed) {
  const kinds = [["mean", "means of 20 steps"], ["raw", "every step"]];
  return choice("loss and gradient", kinds, view.curve, (value) => changed((view.curve = value)));
}

/** The bar of choices above the charts. */
function controls(data, view, changed) {
  const boxes = data.variants.map(({ name, label: text }) => {
    const box = h("input", {
      type: "checkbox", checked: !view.off.has(name), onchange: () => {
        if (box.checked) view.off.delete(name);
        else view.off.add(name);
        changed();
      },
    });
    return h("label", { class: "variant" }, box, swatch(data, name), text);
  });
  const axes = data.axes.map(({ key, values }) =>
    choice(key, [[ALL, "all"], ...values.map((v) => [JSON.stringify(v), exact(v)])], view.axes[key], (v) => changed((view.axes[key] = v))),
  );
  const seeds = [...new Set(data.runs.map((run) => run.seed))].sort((a, b) => a - b);
  const seed = choice("seed", [[ALL, "all"], ...seeds.map((s) => [s, s])], view.seed, (v) => changed((view.seed = v)));
  return h(
    "div",
    { class: "controls", role: "group", "aria-label": "What the charts show" },
    h("fieldset", {}, h("legend", {}, "variants"), boxes),
    h("div", { class: "row" }, axes, seed, layerChoice(data.runs, view, changed), headChoice(data.runs, view, changed), curveChoice(view, changed)),
  );
}
