// The table of runs: sorted by any column, filtered by words and status; absent values sort last, whichever way.

class RunTable {
  constructor(app) {
    this.app = app;
    this.sort = { key: null, down: false };
    this.words = "";
    this.status = ALL;
    this.filter = h("input", { type: "search", oninput: () => this.set("words", this.filter.value) });
    this.states = h("div", {});
    this.count = h("p", { role: "status", class: "soft" });
    this.box = scroll("Runs", h("table", { id: "runs" }));
    this.box.addEventListener("keydown", (event) => this.move(event));
    const file = h("button", { type: "button", class: "small", onclick: () => this.save() }, "CSV of runs");
    this.element = h("div", {}, h("div", { class: "row" }, named("filter by words", this.filter), this.states, file), this.count, this.box);
  }

  set(name, value) {
    this[name] = value;
    this.fill();
  }

  columns() {
    const { data } = this.app;
    const axes = data.axes.filter(({ key }) => key !== "optim.lr").map(({ key }) => ({ title: key, of: (run) => (run.config ? data.config(run, key) : null) }));
    const verdict = data.runs.some((run) => run.diagnosis) ? [{ title: "verdict", of: (run) => (run.diagnosis ? run.diagnosis.verdict : null) }] : [];
    return [
      { title: "run", of: (run) => run.name, cell: (run) => (run.config ? h("a", { href: `#run=${encodeURIComponent(run.name)}` }, run.name) : run.name) },
      { title: "variant", of: (run) => run.variant },
      { title: "lr", of: (run) => run.lr },
      { title: "seed", of: (run) => run.seed },
      ...axes,
      { title: "status", of: (run) => run.status, cell: (run) => badge(run.status) },
      ...verdict,
      { title: "steps", of: (run) => run.step },
      { title: "final loss", of: (run) => run.final_loss },
      { title: "val. loss", of: (run) => run.val_loss },
      { title: "val. accuracy", of: (run) => run.val_accuracy },
      { title: "max |logit|", of: (run) => run.max_abs_logit },
      { title: "lowest entropy", of: (run) => run.lowest_entropy },
      { title: "collapsed layers", of: (run) => (run.collapsed_layers ? run.collapsed_layers.length : null) },
      { title: "seconds", of: (run) => run.wall_seconds },
      { title: "reason", of: (run) => run.reason, wide: true },
    ];
  }

  all() {
    return [...this.app.data.runs, ...this.app.data.missing];
  }

  chosen(columns) {
    const wanted = this.words.toLowerCase().split(/\s+/).filter(Boolean);
    const found = this.all().filter((run) => {
      const text = columns.map((c) => show(c.of(run))).join(" ").toLowerCase();
      return (this.status === ALL || run.status === this.status) && wanted.every((word) => text.includes(word));
    });
    const column = columns.find((c) => c.title === this.sort.key);
    return column ? found.sort((a, b) => compareValues(column.of(a), column.of(b), this.sort.down)) : found;
  }

  /** New data: the statuses that there are, and the rows. */
  update() {
    const states = [...new Set(this.all().map((run) => run.status))].sort();
    if (!states.includes(this.status)) this.status = ALL;
    const held = this.states.contains(document.activeElement);
    this.states.replaceChildren(choice("status", [[ALL, "all"], ...states.map((s) => [s, s])], this.status, (v) => this.set("status", v)));
    if (held) this.states.querySelector("select").focus();
    this.fill();
  }

  fill() {
    const columns = this.columns();
    const rows = this.chosen(columns);
    const numeric = columns.map((c) => this.all().some((run) => typeof c.of(run) === "number"));
    const focus = document.activeElement && this.box.contains(document.activeElement) ? document.activeElement.dataset.key || document.activeElement.getAttribute("href") : null;
    const head = columns.map((c, i) => {
      const sorted = this.sort.key === c.title;
      const arrow = sorted ? (this.sort.down ? " ▼" : " ▲") : "";
      const press = () => {
        this.sort = { key: c.title, down: sorted && !this.sort.down };
        this.fill();
      };
      const attributes = { scope: "col", class: numeric[i] ? "number" : null, "aria-sort": sorted ? (this.sort.down ? "descending" : "ascending") : "none" };
      return h("th", attributes, h("button", { type: "button", "data-key": c.title, onclick: press }, c.title + arrow));
    });
    const body = rows.map((run) => h("tr", {}, columns.map((c, i) => h("td", { class: numeric[i] ? "number" : c.wide ? "words" : null }, c.cell ? c.cell(run) : show(c.of(run))))));
    this.box.firstChild.replaceChildren(h("thead", {}, h("tr", {}, head)), h("tbody", {}, body));
    this.count.textContent = `${rows.length} of ${this.all().length} runs`;
    if (focus) {
      const again = [...this.box.querySelectorAll("button, a")].find((e) => (e.dataset.key || e.getAttribute("href")) === focus);
      if (again) again.focus();
    }
  }

  /** Up and down go from run to run. */
  move(event) {
    if (!["ArrowUp", "ArrowDown"].includes(event.key)) return;
    const links = [...this.box.querySelectorAll("tbody a")];
    const at = links.indexOf(document.activeElement);
    if (at < 0) return;
    event.preventDefault();
    (links[at + (event.key === "ArrowDown" ? 1 : -1)] || links[at]).focus();
  }

  save() {
    const columns = this.columns();
    download("runs.csv", csv(columns.map((c) => c.title), this.chosen(columns).map((run) => columns.map((c) => c.of(run)))));
  }
}

function compareValues(a, b, down) {
  const [noA, noB] = [a, b].map((v) => v === null || v === undefined);
  if (noA || noB) return noA - noB; // an unfinished run never comes first
  const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
  return down ? -order : order;
}

function badge(status) {
  return h("span", { class: `badge ${status}` }, status);
}
