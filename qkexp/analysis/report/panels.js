// The panels over steps: ViT-22B's, the entropy, and the lengths that enter the product.

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
const SYMBOL_WORDS = "× ended early because not finite · ○ not finished, as far as recorded";

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
