// A chart: Plotly's picture, its numbers as a table, its numbers as a file.

const SHOWN_ROWS = 200;

class Chart {
  /** `name` is that of its CSV. */
  constructor(name, title, height = 230) {
    this.name = name;
    this.height = height;
    this.title = h("h3", {}, title);
    this.plot = h("div", { class: "plot", role: "img" });
    this.numbers = h("div", {});
    this.details = h("details", { ontoggle: () => this.fill() }, h("summary", {}, "Numbers"), this.numbers);
    this.button = h("button", { type: "button", class: "small", onclick: () => download(`${this.name}.csv`, csv(this.columns, this.rows())) }, "CSV");
    this.foot = h("div", { class: "foot" }, this.details, this.button);
    this.element = h("figure", { class: "chart" }, this.title, this.plot, this.foot);
  }

  /**
   * @param traces Plotly's
   * @param layout what differs from the house's
   * @param summary the picture in words
   * @param columns, rows its numbers; `rows` is called when they are asked for
   */
  draw({ traces, layout, summary, columns, rows, title }) {
    Object.assign(this, { columns, rows });
    if (title !== undefined) this.title.textContent = title;
    const named = `${this.title.textContent}: `;
    this.plot.setAttribute("aria-label", named + summary);
    this.details.firstChild.setAttribute("aria-label", `Numbers of ${this.title.textContent}`);
    this.button.setAttribute("aria-label", `CSV of ${this.title.textContent}`);
    const empty = traces.length === 0;
    this.element.classList.toggle("empty", empty);
    const notes = empty ? [{ text: "nothing measured", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5 }] : [];
    const axis = {
      gridcolor: colour("line"), zerolinecolor: colour("line"), linecolor: colour("line"), automargin: true, exponentformat: "power",
      nticks: 6,
    };
    const house = {
      autosize: true, margin: { l: 46, r: 12, t: 8, b: 40 }, paper_bgcolor: colour("paper"), plot_bgcolor: colour("paper"),
      font: { color: colour("text"), size: 11, family: "system-ui, sans-serif" }, showlegend: false, hovermode: "closest",
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
      hoverlabel: { align: "left", namelength: -1 },
    };
    this.plot.style.height = `${this.height}px`; // of the box, not of the drawing: it must survive another width
    Plotly.react(
      this.plot,
      traces,
      {
        ...house, ...layout, xaxis: { ...axis, ...layout.xaxis }, yaxis: { ...axis, ...layout.yaxis },
        annotations: [...notes, ...(layout.annotations || [])],
      },
      { responsive: true, displayModeBar: false, displaylogo: false, doubleClick: "reset" },
    );
    this.fill();
  }

  fill() {
    if (!this.details.open) return;
    const rows = this.rows();
    const cut = rows.length > SHOWN_ROWS ? [h("p", {}, `The first ${SHOWN_ROWS} of ${rows.length} rows; the CSV has all.`)] : [];
    const numeric = this.columns.map((_, i) => i).filter((i) => rows.some((row) => typeof row[i] === "number"));
    this.numbers.replaceChildren(...cut, grid(`Numbers of ${this.title.textContent}`, this.columns, rows.slice(0, SHOWN_ROWS), numeric));
  }
}

/**
 * A curve of stretches as one line: of each the smallest and the largest value, the nearer to the last point first, so
 * that a smooth curve stays a line and a noisy one becomes a band. A stretch without a value is a gap.
 */
function zigzag(series) {
  const x = [];
  const y = [];
  let before = NaN;
  series.first.forEach((first, i) => {
    const middle = (first + series.last[i]) / 2;
    let [a, b] = [series.low[i], series.high[i]];
    if (!Number.isFinite(a) || !Number.isFinite(b)) {
      x.push(middle);
      y.push(Number.isFinite(a) ? a : null);
      before = NaN;
      return;
    }
    const falls = Number.isNaN(before) ? series.high[i + 1] < b : Math.abs(b - before) < Math.abs(a - before);
    if (falls) [a, b] = [b, a];
    x.push(middle);
    y.push(a);
    if (a !== b) {
      x.push(middle);
      y.push(b);
    }
    before = b;
  });
  return { x, y };
}

function lastPoint(line) {
  for (let i = line.y.length - 1; i >= 0; i--) if (line.y[i] !== null) return { x: [line.x[i]], y: [line.y[i]] };
  return null;
}
