// what Plotly was given, run names by line
(plot) =>
  plot.data.map((t) => ({ x: t.x, y: t.y, mode: t.mode, name: (t.hovertemplate || "").split("<br>")[0], symbol: t.marker.symbol }))
