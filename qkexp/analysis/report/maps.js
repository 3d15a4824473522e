// Maps of layers over steps: entropy and the largest logit.

const MAPS = [
  { metric: "entropy_frac", title: "entropy, H/ln n", pick: "low", colours: "viridis" },
  { metric: "max_abs_logit", title: "max |logit|", pick: "high", colours: "magma", log: true },
];

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
