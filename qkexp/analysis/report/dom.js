// Elements, numbers and files. Text goes in as text nodes: a name with markup in it stays a name.

const NONE = "–";

/** h("a", {href: "#", class: "x", onclick: f}, "text", child, …); attributes that are null or false are left out. */
function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** Four significant digits; what is absent is a dash, never 0. */
function show(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  if (typeof value === "boolean") return value ? "true" : "false";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return String(value);
  const size = Math.abs(value);
  if (size >= 1e5 || (size < 1e-3 && size > 0)) return value.toExponential(3).replace(/\.?0+e/, "e").replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}

/** A configuration's value, exactly. */
function exact(value) {
  return value === undefined ? NONE : typeof value === "string" ? value : JSON.stringify(value);
}

/** For Plotly's labels, which read a little HTML. */
function label(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

/** A table of rows inside a box that scrolls; `numeric` columns stand to the right. */
function grid(caption, columns, rows, numeric = []) {
  const cell = (value, i) => h("td", { class: numeric.includes(i) ? "number" : null }, value instanceof Node ? value : show(value));
  return scroll(
    caption,
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, columns.map((c, i) => h("th", { scope: "col", class: numeric.includes(i) ? "number" : null }, c)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map(cell)))),
    ),
  );
}

/** What is wider than the page scrolls in its own box, which the keyboard can reach. */
function scroll(name, child) {
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": name }, child);
}

function csv(columns, rows) {
  const cell = (value) => {
    const text = value === null || value === undefined || Number.isNaN(value) ? "" : String(value);
    return /[",\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
  };
  return [columns, ...rows].map((row) => row.map(cell).join(",")).join("\n") + "\n";
}

/** Hand the user a file that the page makes. */
function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  const link = h("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** A control under its name. */
function named(text, control) {
  control.id = control.id || `control-${++named.count}`;
  return h("div", { class: "choice" }, h("label", { for: control.id }, text), control);
}
named.count = 0;

/** A choice of one; `options` are [value, text]. */
function choice(text, options, value, onchange) {
  const select = h("select", { onchange: () => onchange(select.value) }, options.map(([v, t]) => h("option", { value: v }, t)));
  select.value = value;
  return named(text, select);
}
