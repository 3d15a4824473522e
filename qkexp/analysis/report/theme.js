// Light and dark: the system's, or the user's choice; and colours that can be seen on both.

const THEMES = [["system", "system"], ["light", "light"], ["dark", "dark"]];
const SYMBOLS = {
  o: "circle", s: "square", D: "diamond", "^": "triangle-up", P: "cross", p: "pentagon", h: "hexagon", "<": "triangle-left",
  X: "x", v: "triangle-down", "*": "star", ">": "triangle-right", d: "diamond-tall", H: "hexagon2", 8: "octagon",
};
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];

function savedTheme() {
  try {
    return localStorage.getItem("qkexp-theme") || "system";
  } catch {
    return "system"; // a browser that keeps nothing for files
  }
}

function setTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("qkexp-theme", theme);
  } catch {
    // not kept: it holds until the page is left
  }
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function channels(hex) {
  return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

function luminance(hex) {
  const [r, g, b] = channels(hex).map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

/** A variant's colour; moved away from the background only as far as it takes to be seen (contrast 3). */
function visible(hex) {
  const paper = colour("paper");
  const [back, to] = [luminance(paper), luminance(paper) > 0.5 ? 0 : 255];
  let seen = hex;
  for (let share = 0.1; share <= 1 && contrast(luminance(seen), back) < (to ? 3 : 1.9); share += 0.1) {
    seen = "#" + channels(hex).map((c) => Math.round(c + (to - c) * share).toString(16).padStart(2, "0")).join("");
  }
  return seen;
}

function contrast(a, b) {
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}
