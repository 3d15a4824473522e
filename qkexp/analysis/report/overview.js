// The first page: claims, loss against rate, panels over steps, maps, runs.

const MOST_LINES = 60;

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
  const rest = rows.length - passed - failed;
  const others = rest ? `; ${rest} could not be judged, or are declared as not shown at this size` : "";
  const words = [`${passed} of ${rows.length} claims hold, ${failed} do not${others}.`];
  if (open) words.push(`Not all runs have ended (${open} have not).`);
  if (stale) words.push("A run has ended since the claims were checked: qkexp verify checks them again.");
  const kinds = { pass: "pass", fail: "fail" };
  const cells = rows.map((row) => [
    row.claim, row.value, row.bound, h("span", { class: `badge ${kinds[row.verdict] || "open"}` }, row.verdict), row.count, row.detail || "",
  ]);
  return [h("p", {}, words.join(" ")), grid("Claims", ["claim", "value", "bound", "verdict", "over", "detail"], cells, [1, 4])];
}
