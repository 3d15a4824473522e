// Final validation loss against the learning rate: runs as dots, medians as lines, chance and the limit of stable.

const RATE_WORDS =
  "Dots are runs, the line their median over seeds: a filled mark is stable, a hollow one is not, a pale one has too few seeds. " +
  "▽ a run in which a layer collapsed. × at the top: no final loss, because the run ended early; + there: it crashed. Grey: chance, and the limit of stable.";

function drawRate(chart, data, runs) {
  const ended = runs.filter((run) => ["completed", "diverged", "failed"].includes(run.status));
  const known = ended.map((run) => run.val_loss).filter((v) => v !== null && v > 0);
  // a strip of its own above all others: these have no loss; runs higher than medians, so that neither hides the other
  const top = known.length ? Math.max(...known, data.levels.chance || 0) * 1.5 : 1;
  const strip = [1, 1.15, 1.45].map((part) => part * top);
  const height = (v, without) => (v === null || v === undefined ? without : v);
  const traces = [];
  const variants = data.variants.filter(({ name }) => ended.some((run) => run.variant === name));
  variants.forEach(({ name, colour: base, marker, label: text }, place) => {
    const tint = visible(base);
    const shift = 10 ** (0.022 * (place - (variants.length - 1) / 2));
    const rates = new Set(ended.filter((run) => run.variant === name).map((run) => run.lr));
    const medians = data.stability.filter((row) => row.variant === name && rates.has(row.lr));
    const value = (row) => (typeof row.median_val_loss === "number" ? row.median_val_loss : null);
    traces.push({
      x: medians.map((row) => row.lr * shift), y: medians.map((row) => height(value(row), strip[1])), mode: "lines+markers", name: label(text),
      line: { color: tint, width: 2, dash: dashOf(data, name) },
      marker: {
        symbol: SYMBOLS[marker], size: 10, line: { color: tint, width: 2 },
        color: medians.map((row) => (row.stable === null ? faint(tint) : row.stable ? tint : colour("paper"))),
      },
      text: medians.map((row) => label(`${text}, lr ${show(row.lr)}: median ${show(value(row))} of ${row.seeds} seeds; ${row.reason}`)), hoverinfo: "text",
    });
    const own = ended.filter((run) => run.variant === name);
    traces.push({
      x: own.map((run) => run.lr * shift), y: own.map((run) => height(run.val_loss, strip[2])), mode: "markers", name: label(text),
      marker: { color: tint, size: 7, line: { color: tint, width: 1.5 }, symbol: own.map(runSymbol) },
      text: own.map((run) => label(`${run.name}: ${show(run.val_loss)}, ${run.status}`)), hoverinfo: "text",
    });
  });
  const rates = [...new Set(ended.map((run) => run.lr))].sort((a, b) => a - b);
  const level = ([name, value]) => ({
    type: "line", xref: "paper", x0: 0, x1: 1, y0: value, y1: value, line: { color: colour("soft"), width: 1, dash: name === "chance" ? "dashdot" : "dot" },
  });
  const absent = ended.some((run) => run.val_loss === null);
  const band = { type: "rect", xref: "paper", x0: 0, x1: 1, y0: strip[0], y1: strip[2] * 1.2, fillcolor: colour("shade"), line: { width: 0 }, layer: "below" };
  const word = { text: "no final loss", showarrow: false, xref: "paper", x: 0.005, xanchor: "left", y: Math.log10(strip[1] * 1.1), font: { color: colour("soft"), size: 10 } };
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
      shapes: [...Object.entries(data.levels).map(level), ...(absent ? [band] : [])],
      annotations: absent ? [word] : [],
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
