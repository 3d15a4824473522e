// The page of one run: how it ended, when what broke, its curves, and what differs from another run.

const TIMELINE_WORDS = "◇ an event. A bar is an onset, from the mildest to the severest threshold of its grid; ▷ one that did not reach all of them (qkexp diagnose finds onsets).";

class RunPage {
  constructor(app) {
    this.app = app;
    this.view = new View();
    this.name = null;
    this.other = "";
    this.heading = h("h1", { tabindex: "-1" });
    this.links = h("p", { class: "row" });
    this.facts = h("div", {});
    this.timeline = new Chart("timeline", "what happened when", 260);
    this.events = h("div", {});
    this.key = h("p", { class: "soft" }, TIMELINE_WORDS);
    this.controls = h("div", {});
    this.panels = panelCharts();
    this.maps = MAPS.map((map) => new Chart(`map_${map.metric}`, map.title, 220));
    this.words = h("p", { class: "soft" });
    this.mapNote = h("p", { class: "soft" });
    this.chooser = h("div", {});
    this.difference = h("div", {});
    this.element = h(
      "div",
      {},
      this.links,
      this.heading,
      this.facts,
      section("Timeline", this.timeline.element, this.key, this.events),
      section("Compared with another run", this.chooser, this.difference),
      section("Curves", this.controls, h("div", { class: "charts" }, this.panels.map((c) => c.element)), this.words),
      section("Layers over steps", h("div", { class: "charts" }, this.maps.map((c) => c.element)), this.mapNote),
    );
  }

  open(name) {
    if (name !== this.name) this.other = "";
    this.name = name;
    this.update();
  }

  update() {
    const { data } = this.app;
    const run = data.byName.get(this.name);
    this.heading.textContent = this.name;
    this.links.replaceChildren(...this.around());
    for (const child of [...this.element.children].slice(2)) child.hidden = !run;
    if (!run) {
      this.heading.textContent = `${this.name}: no such run in this sweep`;
      return;
    }
    this.view.fit({ axes: [], runs: [run] });
    this.facts.replaceChildren(...runFacts(data, run));
    drawTimeline(this.timeline, run);
    this.events.replaceChildren(...eventRows(run));
    this.choose(run);
    const focus = this.controls.contains(document.activeElement) ? [...this.controls.querySelectorAll("select")].indexOf(document.activeElement) : -1;
    const changed = () => this.draw();
    this.controls.replaceChildren(
      h("div", { class: "controls" }, h("div", { class: "row" }, layerChoice([run], this.view, changed), headChoice([run], this.view, changed), curveChoice(this.view, changed))),
    );
    if (focus >= 0) this.controls.querySelectorAll("select")[focus].focus();
    this.draw();
  }

  /** Back, and the neighbours in the order of the table. */
  around() {
    const { runs } = this.app.data;
    const at = runs.findIndex((run) => run.name === this.name);
    const link = (run, text) => (run ? [h("a", { href: `#run=${encodeURIComponent(run.name)}`, title: run.name }, text)] : []);
    return [h("a", { href: "#" }, "‹ all runs"), ...(at < 0 ? [] : [...link(runs[at - 1], "previous run"), ...link(runs[at + 1], "next run")])];
  }

  choose(run) {
    const { runs } = this.app.data;
    const others = runs.filter((r) => r !== run).map((r) => [r.name, r.name]);
    if (!others.some(([name]) => name === this.other)) this.other = "";
    const held = this.chooser.contains(document.activeElement);
    this.chooser.replaceChildren(choice("other run", [["", "none"], ...others], this.other, (name) => {
      this.other = name;
      this.differ();
      this.draw();
    }));
    if (held) this.chooser.querySelector("select").focus();
    this.differ();
  }

  differ() {
    const { data } = this.app;
    const [run, other] = [data.byName.get(this.name), data.byName.get(this.other)];
    this.difference.replaceChildren(...(other ? differences(data, run, other) : [h("p", { class: "soft" }, "Choose a run to see what differs, and to draw it beside this one.")]));
  }

  draw() {
    const { data } = this.app;
    const [run, other] = [data.byName.get(this.name), data.byName.get(this.other)];
    const shown = [run, other].filter(Boolean);
    drawPanels(this.panels, data, this.view, shown, run);
    this.words.textContent = `${other ? `Paler: ${other.name}. ` : ""}${SYMBOL_WORDS}. ${shortened(shown, this.view)}`;
    const probed = run.attention !== null;
    for (const chart of this.maps) chart.element.hidden = !probed;
    this.mapNote.textContent = probed ? mapWords(this.view) : "Attention was not probed in this run.";
    if (!probed) return;
    const scale = mapScale(data, this.view, [run]);
    MAPS.forEach((map, i) => drawMap(this.maps[i], data, this.view, run, map, scale, map.title));
  }
}

function runFacts(data, run) {
  const rows = [
    ["status", h("span", {}, badge(run.status), run.reason ? `: ${run.reason}` : "")],
    ["variant", h("span", { class: "variant" }, swatch(data, run.variant), data.look(run.variant).label)],
    ["learning rate, seed", `${show(run.lr)}, ${run.seed}`],
    ["steps", `${show(run.step)} of ${run.steps}`],
    ["final loss, lowest", `${show(run.final_loss)}, ${show(run.lowest_loss)}`],
    ["validation loss, accuracy", `${show(run.val_loss)}, ${show(run.val_accuracy)}`],
    ["largest |logit|, lowest entropy of a layer", `${show(run.max_abs_logit)}, ${show(run.lowest_entropy)} of ln n`],
    ["time", run.wall_seconds === null ? NONE : `${show(run.wall_seconds)} s`],
  ];
  const about = run.diagnosis;
  const verdict = about ? [["verdict", about.verdict], ...(about.rule ? [["because", about.rule]] : [])] : [];
  const words = about ? [...about.evidence, ...about.notes] : [];
  return [
    h("dl", {}, [...rows, ...verdict].flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    ...(words.length ? [h("ul", { class: "words" }, words.map((text) => h("li", {}, text)))] : []),
  ];
}

// ---------------------------------------------------------------- timeline

/** Rows: the onsets of a diagnosis where there is one, as intervals; the kinds of events, as marks. */
function drawTimeline(chart, run) {
  const onsets = run.diagnosis ? run.diagnosis.onsets.filter((o) => o.early !== null) : [];
  const kinds = [...new Set(run.events.map(([, kind]) => kind))];
  const names = [...onsets.map((o) => o.what), ...kinds.map((k) => `event: ${k}`)];
  const at = (o) => where(o.layer, o.head);
  const traces = onsets.map((o) => ({
    x: o.late === null ? [o.early] : [o.early, o.late], y: o.late === null ? [label(o.what)] : [label(o.what), label(o.what)],
    mode: "lines+markers", line: { width: 6, color: colour("link") },
    marker: { size: 10, symbol: o.late === null ? "triangle-right-open" : "line-ns-open", color: colour("link"), line: { width: 2, color: colour("link") } },
    hovertemplate: `${label(onsetWords(o))}<extra></extra>`,
  }));
  for (const kind of kinds) {
    const rows = run.events.filter((event) => event[1] === kind);
    traces.push({
      x: rows.map((e) => e[0]), y: rows.map(() => label(`event: ${kind}`)), mode: "markers",
      marker: { size: 9, symbol: "diamond-open", color: colour("bad"), line: { width: 1.5, color: colour("bad") } },
      text: rows.map((e) => label(eventWords(e))), hovertemplate: "%{text}<extra></extra>",
    });
  }
  chart.height = 90 + 26 * Math.max(names.length, 2);
  const said = [...onsets.map(onsetWords), ...kinds.map((k) => {
    const rows = run.events.filter((e) => e[1] === k);
    return `${k}: ${rows.length}, first ${eventWords(rows[0])}`;
  })];
  chart.draw({
    traces,
    layout: {
      xaxis: { title: { text: "step" }, range: [0, run.steps] },
      yaxis: { type: "category", categoryorder: "array", categoryarray: names.map(label).reverse(), tickvals: names.map(label), tickfont: { size: 10 } },
      annotations: traces.length ? [] : [{ text: "no event, no onset", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.3 }],
    },
    summary: said.length ? said.join("; ") : "no event and no onset",
    columns: ["what", "first_step", "last_step", "layer", "head", "value", "threshold"],
    rows: () => [
      ...onsets.map((o) => [o.what, o.early, o.late, o.layer, o.head, null, null]),
      ...run.events.map(([step, kind, layer, head, value, threshold]) => [kind, step, step, layer < 0 ? null : layer, head < 0 ? null : head, value, threshold]),
    ],
  });
}

function where(layer, head) {
  const parts = [layer !== null && layer >= 0 ? `layer ${layer}` : null, head !== null && head >= 0 ? `head ${head}` : null];
  return parts.filter(Boolean).join(", ");
}

function onsetWords(o) {
  const steps = o.late === null ? `from step ${o.early} on, not at every threshold` : o.early === o.late ? `step ${o.early}` : `steps ${o.early} to ${o.late}`;
  return [`${o.what}: ${steps}`, where(o.layer, o.head)].filter(Boolean).join(", ");
}

function eventWords([step, , layer, head, value, threshold]) {
  const sizes = value === null ? "" : `: ${show(value)}${threshold === null ? "" : ` (threshold ${show(threshold)})`}`;
  return [`step ${step}`, where(layer, head)].filter(Boolean).join(", ") + sizes;
}

function eventRows(run) {
  const cut = run.events_in_all > run.events.length ? [h("p", {}, `The first ${run.events.length} of ${run.events_in_all} events.`)] : [];
  if (!run.events.length) return [h("p", { class: "soft" }, "No event.")];
  const rows = run.events.map(([step, kind, layer, head, value, threshold]) => [step, kind, layer < 0 ? null : layer, head < 0 ? null : head, value, threshold]);
  const table = grid("Events", ["step", "kind", "layer", "head", "value", "threshold"], rows, [0, 2, 3, 4, 5]);
  return [...cut, h("details", {}, h("summary", {}, `Events (${run.events.length})`), table)];
}

// ---------------------------------------------------------------- two runs

function differences(data, run, other) {
  const identity = new Set(data.identity);
  const [keys, facts] = ["config", "provenance"].map((group) => {
    const names = [...new Set([...Object.keys(run[group]), ...Object.keys(other[group])])];
    return names.filter((name) => exact(run[group][name]) !== exact(other[group][name])).map((name) => [name, exact(run[group][name]), exact(other[group][name])]);
  });
  const outcome = [
    ["status", run.status, other.status], ["reason", run.reason, other.reason], ["steps done", run.step, other.step], ["final loss", run.final_loss, other.final_loss],
    ["lowest loss", run.lowest_loss, other.lowest_loss], ["final validation loss", run.val_loss, other.val_loss], ["final validation accuracy", run.val_accuracy, other.val_accuracy],
    ["largest |logit|", run.max_abs_logit, other.max_abs_logit], ["lowest entropy of a layer", run.lowest_entropy, other.lowest_entropy],
  ];
  const titles = ["", run.name, other.name];
  const part = (name, rows) => [h("h3", {}, name), rows.length ? grid(name, titles, rows) : h("p", { class: "soft" }, "No difference.")];
  const unequal = run.step !== other.step ? [h("p", {}, "They differ in length: final figures are not those of the same step. qkexp compare shows both at the last step that both have.")] : [];
  return [
    ...part("Configuration: keys of the run's identity", keys.filter(([name]) => identity.has(name))),
    ...part("Configuration: other keys", keys.filter(([name]) => !identity.has(name))),
    ...part("Provenance", facts),
    ...part("Outcome", outcome),
    ...unequal,
  ];
}
