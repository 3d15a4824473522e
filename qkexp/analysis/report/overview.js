// The first page: claims, loss against rate, panels over steps, maps, runs.

const PANELS = [
  { metric: "loss", title: "training loss", unit: "nats" },
  { metric: "grad_norm", title: "gradient norm", unit: "L2 norm", log: true },
  { metric: "param_norm", title: "parameter norm", unit: "L2 norm" },
  { metric: "max_abs_logit", title: "max |logit|", unit: "logit", log: true },
  { metric: "attn_max_mean", title: "attn max", unit: "weight", range: [0, 1.03] },
  { metric: "entropy_frac", title: "attention entropy", unit: "H / ln n", range: [0, 1.03] },
  { metric: "q_in_norm_mean", title: "‖q̂‖, what enters the product", unit: "length", log: true },
  { metric: "k_in_norm_mean", title: "‖k̂‖, what enters the product", unit: "length", log: true },
];
const MAPS = [
  { metric: "entropy_frac", title: "entropy, H / ln n", pick: "low", colours: "viridis" },
  { metric: "max_abs_logit", title: "max |logit|", pick: "high", colours: "magma", log: true },
];
const MOST_LINES = 60;
const SYMBOL_WORDS = "× ended early because not finite · ○ not finished, as far as recorded";

class Overview {
  constructor(app) {
    this.app = app;
    this.claims = h("div", {});
    this.controls = h("div", {});
    this.rate = new Chart("validation_loss", "final validation loss against the learning rate", 360);
    this.panels = panelCharts();
    this.maps = h("div", { class: "charts" });
    this.mapCharts = new Map();
    this.note = h("p", { class: "soft" });
    this.mapNote = h("p", { class: "soft" });
    this.table = new RunTable(app);
    this.element = h(
      "div",
      {},
      section("Claims", this.claims),
      section("Curves", this.controls, this.rate.element, h("p", { class: "soft" }, RATE_WORDS), h("div", { class: "charts" }, this.panels.map((c) => c.element)), this.note),
      section("Layers over steps", this.maps, this.mapNote),
      section("Runs", this.table.element),
    );
  }

  /** New data: everything; the user's choices stay. */
  update() {
    const { data, view } = this.app;
    this.claims.replaceChildren(...claims(data));
    const focus = this.controls.contains(document.activeElement) ? [...this.controls.querySelectorAll("select, input")].indexOf(document.activeElement) : -1;
    this.controls.replaceChildren(controls(data, view, () => this.draw()));
    if (focus >= 0) (this.controls.querySelectorAll("select, input")[focus] || this.controls).focus();
    this.table.update();
    this.draw();
  }

  draw() {
    const { data, view } = this.app;
    drawRate(this.rate, data, view.runs(data, "optim.lr"));
    const chosen = view.runs(data).filter((run) => run.curves);
    const shown = chosen.slice(0, MOST_LINES);
    drawPanels(this.panels, data, view, shown);
    const cut = chosen.length > shown.length ? `Only the first ${MOST_LINES} of ${chosen.length} runs are drawn: choose fewer. ` : "";
    this.note.textContent = `${cut}A line is a run. ${SYMBOL_WORDS}. ${shortened(shown, view)}`;
    this.drawMaps(shown);
  }

  drawMaps(runs) {
    const { data, view } = this.app;
    const first = new Map(runs.filter((run) => run.attention).map((run) => [run.variant, run]).reverse());
    const scale = mapScale(data, view, [...first.values()]);
    const charts = [];
    for (const { name, label: text } of data.variants) {
      if (!first.has(name)) continue;
      for (const map of MAPS) {
        const key = `${name}/${map.metric}`;
        if (!this.mapCharts.has(key)) this.mapCharts.set(key, new Chart(`${map.metric}_${name}`, "", 200));
        const chart = this.mapCharts.get(key);
        charts.push([chart, () => drawMap(chart, data, view, first.get(name), map, scale, `${text}: ${map.title}`)]);
      }
    }
    this.maps.replaceChildren(...charts.map(([chart]) => chart.element));
    charts.forEach(([, draw]) => draw());
    this.mapNote.textContent = `Of each variant the first run that is chosen above. ${mapWords(view)}`;
  }
}

function section(title, ...children) {
  return h("section", { "aria-label": title }, h("h2", {}, title), children);
}

function claims(data) {
  const { declared, rows, stale, open } = data.claims;
  if (!rows) return [h("p", {}, declared ? "The claims of this sweep have not been checked: qkexp verify does that." : "This sweep declares no claims.")];
  const failed = rows.filter((row) => row.verdict === "fail").length;
  const passed = rows.filter((row) => row.verdict === "pass").length;
  const words = [`${passed} of ${rows.length} claims hold, ${failed} do not.`];
  if (open) words.push(`Not all runs have ended (${open} have not).`);
  if (stale) words.push("A run has ended since the claims were checked: qkexp verify checks them again.");
  const kinds = { pass: "pass", fail: "fail" };
  const cells = rows.map((row) => [
    row.claim, row.value, row.bound, h("span", { class: `badge ${kinds[row.verdict] || "open"}` }, row.verdict), row.count, row.detail || "",
  ]);
  return [h("p", {}, words.join(" ")), grid("Claims", ["claim", "value", "bound", "verdict", "over", "detail"], cells, [1, 4])];
}

// ---------------------------------------------------------------- loss against rate

const RATE_WORDS =
  "Dots are runs, the line their median over seeds: a filled mark is stable, a hollow one is not, a pale one has too few seeds. " +
  "▽ a run in which a layer collapsed. × at the top: no final loss, because the run ended early; + there: it crashed. Grey: chance, and the limit of stable.";

function drawRate(chart, data, runs) {
  const ended = runs.filter((run) => ["completed", "diverged", "failed"].includes(run.status));
  const known = ended.map((run) => run.val_loss).filter((v) => v !== null && v > 0);
  const top = known.length ? Math.max(...known, data.levels.chance || 0) * 1.5 : 1;
  const height = (v) => (v === null || v === undefined ? top : v);
  const traces = [];
  const variants = data.variants.filter(({ name }) => ended.some((run) => run.variant === name));
  variants.forEach(({ name, colour: base, marker, label: text }, place) => {
    const tint = visible(base);
    const shift = 10 ** (0.022 * (place - (variants.length - 1) / 2));
    const rates = new Set(ended.filter((run) => run.variant === name).map((run) => run.lr));
    const medians = data.stability.filter((row) => row.variant === name && rates.has(row.lr));
    const value = (row) => (typeof row.median_val_loss === "number" ? row.median_val_loss : null);
    traces.push({
      x: medians.map((row) => row.lr * shift), y: medians.map((row) => height(value(row))), mode: "lines+markers", name: label(text),
      line: { color: tint, width: 2, dash: dashOf(data, name) },
      marker: {
        symbol: SYMBOLS[marker], size: 10, line: { color: tint, width: 2 },
        color: medians.map((row) => (row.stable === null ? faint(tint) : row.stable ? tint : colour("paper"))),
      },
      text: medians.map((row) => label(`${text}, lr ${show(row.lr)}: median ${show(value(row))} of ${row.seeds} seeds; ${row.reason}`)), hoverinfo: "text",
    });
    const own = ended.filter((run) => run.variant === name);
    traces.push({
      x: own.map((run) => run.lr * shift), y: own.map((run) => height(run.val_loss)), mode: "markers", name: label(text),
      marker: { color: tint, size: 7, line: { color: tint, width: 1.5 }, symbol: own.map(runSymbol) },
      text: own.map((run) => label(`${run.name}: ${show(run.val_loss)}, ${run.status}`)), hoverinfo: "text",
    });
  });
  const rates = [...new Set(ended.map((run) => run.lr))].sort((a, b) => a - b);
  const level = ([name, value]) => ({
    type: "line", xref: "paper", x0: 0, x1: 1, y0: value, y1: value, line: { color: colour("soft"), width: 1, dash: name === "chance" ? "dashdot" : "dot" },
  });
  const rows = () => [
    ...ended.map((run) => ["run", run.name, run.variant, run.lr, run.seed, run.val_loss, run.status, null]),
    ...data.stability.map((row) => ["median", null, row.variant, row.lr, null, row.median_val_loss, null, row.stable]),
    ...Object.entries(data.levels).map(([name, value]) => [name, null, null, null, null, value, null, null]),
  ];
  chart.draw({
    traces: ended.length ? traces : [],
    layout: {
      xaxis: { type: "log", title: { text: "peak learning rate" }, tickvals: rates, ticktext: rates.map(show), range: logRange(rates, 0.16) },
      yaxis: { type: "log", title: { text: "nats" }, tickformat: "~g", dtick: known.length && Math.max(...known) < 100 * Math.min(...known) ? "D2" : undefined },
      shapes: Object.entries(data.levels).map(level),
    },
    summary: ended.length
      ? variants.map(({ name, label: text }) => `${text}: ${data.stability.filter((r) => r.variant === name).map((r) => `${show(r.median_val_loss)} at ${show(r.lr)}`).join(", ")}`).join("; ")
      : "no run has ended yet",
    columns: ["kind", "run", "variant", "lr", "seed", "val_loss", "status", "stable"],
    rows,
  });
}

function runSymbol(run) {
  if (run.val_loss === null) return run.status === "failed" ? "cross-thin-open" : "x-thin-open";
  return run.collapsed_layers && run.collapsed_layers.length ? "triangle-down-open" : "circle";
}

function faint(hex) {
  return `rgba(${channels(hex).join(",")},0.35)`;
}

function logRange(values, margin) {
  return values.length ? [Math.log10(values[0]) - margin, Math.log10(values[values.length - 1]) + margin] : undefined;
}

// ---------------------------------------------------------------- panels over steps

function panelCharts() {
  return PANELS.map((panel) => new Chart(panel.metric, panel.title));
}

/** A panel's series of a run, by the view: a scalar, or an attention metric of the layer and head. */
function seriesOf(data, view, run, metric) {
  if (data.layered.includes(metric)) return data.attention(run, metric, view.layer, view.headIndex);
  const smoothed = view.curve === "mean" && ["loss", "grad_norm"].includes(metric);
  return data.scalar(run, smoothed ? `${metric}_mean` : metric);
}

function place(view, metric, data) {
  if (!data.layered.includes(metric)) return "";
  return view.head === ALL ? `, layer ${view.layer}` : `, layer ${view.layer}, head ${view.head}`;
}

/** Draw all panels of some runs; `bold` is the run that the others are compared with. */
function drawPanels(charts, data, view, runs, bold = null) {
  PANELS.forEach((panel, i) => drawPanel(charts[i], panel, data, view, runs, bold));
}

function drawPanel(chart, panel, data, view, runs, bold) {
  const { metric, unit, log, range } = panel;
  const found = runs.map((run) => [run, seriesOf(data, view, run, metric)]).filter(([, s]) => s && s.high.some(Number.isFinite));
  const traces = [];
  const words = [];
  let largest = -Infinity;
  for (const [run, series] of found) {
    const { colour: base, marker, label: text } = data.look(run.variant);
    const tint = visible(base);
    const line = zigzag(series);
    const width = bold === null ? 1.3 : run === bold ? 2 : 1;
    traces.push({
      ...line, mode: "lines+markers", line: { color: tint, width, dash: dashOf(data, run.variant) },
      marker: { symbol: SYMBOLS[marker], size: 6, maxdisplayed: 6 }, opacity: bold !== null && run !== bold ? 0.7 : 1,
      hovertemplate: `${label(run.name)}<br>step %{x:.0f}: %{y:.4~g}<extra></extra>`,
    });
    const end = lastPoint(line);
    const mark = endMark(run);
    if (end && mark) traces.push({ ...end, mode: "markers", marker: { symbol: mark, size: 10, color: tint, line: { color: tint, width: 2 } }, hoverinfo: "skip" });
    const highs = series.high.filter(Number.isFinite);
    const [low, high] = [Math.min(...series.low.filter(Number.isFinite)), Math.max(...highs)];
    largest = Math.max(largest, high);
    words.push(`${text}, seed ${run.seed}: ${show(low)} to ${show(high)}, at the end ${show(highs[highs.length - 1])}`);
  }
  const chance = metric === "loss" ? data.levels.chance : undefined;
  const far = metric === "loss" && chance && largest > 4 * chance;
  const steps = Math.max(1, ...runs.map((run) => run.steps));
  const title = `${panel.title}${place(view, metric, data)}`;
  chart.draw({
    traces,
    layout: {
      xaxis: { title: { text: "step" }, range: [0, steps] },
      yaxis: { title: { text: unit }, type: log || far ? "log" : "linear", range, tickformat: "~g", rangemode: log || far || range ? "normal" : "tozero", dtick: log || far ? decades(traces) : undefined },
      shapes: chance && traces.length ? [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: chance, y1: chance, line: { color: colour("soft"), width: 1, dash: "dashdot" } }] : [],
    },
    title,
    summary: words.slice(0, 12).join("; ") + (words.length > 12 ? `; and ${words.length - 12} more` : ""),
    columns: ["run", "variant", "lr", "seed", "layer", "head", "first_step", "last_step", "smallest", "largest"],
    rows: () => found.flatMap(([run, series]) => panelRows(data, view, run, metric, series)),
  });
}

/** Ticks of a log axis: a power of ten each, fewer where there are many. */
function decades(traces) {
  const values = traces.flatMap((t) => t.y).filter((v) => v > 0);
  const span = Math.log10(Math.max(...values) / Math.min(...values));
  return span < 2 ? "D2" : Math.ceil(span / 6);
}

function panelRows(data, view, run, metric, series) {
  const layered = data.layered.includes(metric);
  const where = layered ? [view.layer, view.head === ALL ? null : view.head] : [null, null];
  return series.first.map((first, i) => [
    run.name, run.variant, run.lr, run.seed, ...where, first, series.last[i], rounded(series.low[i], layered), rounded(series.high[i], layered),
  ]);
}

/** As many digits as are stored. */
function rounded(value, layered) {
  return Number.isFinite(value) ? Number(value.toPrecision(layered ? 4 : 7)) : value;
}

function endMark(run) {
  if (["running", "interrupted", "failed"].includes(run.status)) return "circle-open";
  return run.status === "diverged" && run.val_loss === null ? "x-thin-open" : null;
}

/** How much the curves were shortened, in words. */
function shortened(runs, view) {
  const spans = runs.flatMap((run) => [
    run.curves && run.curves.spans, run.attention && (view.head === ALL ? run.attention.layers_spans : run.attention.each_spans),
  ]);
  const width = Math.max(1, ...spans.filter((s) => s && s.first.length).map((s) => Data.width(s)));
  const kept = width === 1 ? "Every recorded step is drawn." : `Curves are shortened: of each stretch of up to ${width} steps the smallest and the largest value are kept, so no extreme is lost.`;
  const heads = runs.some((run) => run.attention && !run.attention.each_spans) ? " Heads are not in this file, because the sweep is too large: a report of fewer runs has them." : "";
  return `${kept}${heads} Attention is rounded to 0.07 %; the run directories hold every number.`;
}

// ---------------------------------------------------------------- maps of layers over steps

function mapScale(data, view, runs) {
  const scale = {};
  for (const { metric, pick, log } of MAPS) {
    if (!log) {
      scale[metric] = [0, 1];
      continue;
    }
    const values = runs.flatMap((run) => run.attention.layers.flatMap((layer) => (data.attention(run, metric, layer, view.headIndex) || { [pick]: [] })[pick])).filter((v) => v > 0 && Number.isFinite(v));
    const [low, high] = values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
    scale[metric] = values.length ? [Math.log10(low), Math.max(Math.log10(high), Math.log10(low) + 1e-3)] : [0, 1];
  }
  return scale;
}

function drawMap(chart, data, view, run, map, scale, title) {
  const { metric, pick, log, colours } = map;
  const layers = run.attention.layers;
  const rows = layers.map((layer) => data.attention(run, metric, layer, view.headIndex));
  const some = rows.find((series) => series && series.first.length);
  const z = rows.map((series) => (series ? series[pick].map((v) => (Number.isFinite(v) ? (log ? Math.log10(v) : v) : null)) : []));
  const known = z.flat().filter((v) => v !== null);
  const [low, high] = scale[metric];
  const ticks = log ? logTicks(low, high) : { tickvals: [0, 0.5, 1] };
  const head = view.head === ALL ? "" : `, head ${view.head}`;
  const ends = known.length ? known.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]).map((v) => (log ? 10 ** v : v)) : [];
  chart.draw({
    traces: known.length
      ? [{
          type: "heatmap", z, x: [...some.first, some.last[some.last.length - 1] + 1], y: layers, zmin: low, zmax: high,
          colorscale: data.colours[colours].map((c, i, list) => [i / (list.length - 1), c]), hoverongaps: false,
          text: z.map((row) => row.map((v) => (v === null ? "" : show(log ? 10 ** v : v)))), hovertemplate: "layer %{y}, step %{x:.0f}: %{text}<extra></extra>",
          colorbar: { thickness: 10, outlinewidth: 0, len: 1, xpad: 4, ...ticks },
        }]
      : [],
    layout: {
      xaxis: { title: { text: "step" }, range: [0, run.steps] },
      yaxis: { title: { text: "layer" }, dtick: Math.ceil(layers.length / 6), tick0: 0 },
      margin: { l: 46, r: 4, t: 8, b: 40 },
    },
    title: `${title}${head}`,
    summary: known.length ? `layers ${layers[0]} to ${layers[layers.length - 1]} of ${run.name} over steps: from ${show(ends[0])} to ${show(ends[1])}` : "nothing measured",
    columns: ["run", "layer", "head", "first_step", "last_step", "smallest", "largest"],
    rows: () => rows.flatMap((series, i) => (series ? series.first.map((first, j) => [
      run.name, layers[i], view.headIndex, first, series.last[j], rounded(series.low[j], true), rounded(series.high[j], true),
    ]) : [])),
  });
}

function logTicks(low, high) {
  const powers = [];
  const step = Math.max(1, Math.ceil((high - low) / 5));
  for (let p = Math.ceil(low); p <= high; p += step) powers.push(p);
  const tickvals = powers.length > 1 ? powers : [low, high];
  return { tickvals, ticktext: tickvals.map((p) => show(10 ** p)) };
}

function mapWords(view) {
  const what = view.head === ALL ? "A layer's value: of its heads the mean of the entropy and the maximum of the logit" : `Head ${view.head} of each layer`;
  return `${what}; of each stretch of steps the smallest entropy and the largest logit. Layer 0 is nearest to the input. Blank: no value. Low entropy alone is no fault: read it next to the loss.`;
}
