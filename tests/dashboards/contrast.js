// texts whose colour stands out from what is behind them by less than 4.5 (WCAG 2, AA)
() => {
  const channels = (text) => text.match(/[\d.]+/g).map(Number);
  const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const light = (text) => channels(text).slice(0, 3).reduce((sum, c, i) => sum + linear(c / 255) * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      if (channels(colour)[3] !== 0) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const bad = [];
  for (const e of document.querySelectorAll("h1, h2, h3, p, a, button, summary, td, th, dt, dd, span.badge, label")) {
    if (!e.getClientRects().length || !e.textContent.trim()) continue;
    const [a, b] = [light(getComputedStyle(e).color), light(behind(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) bad.push(`${e.tagName} ${e.className} ${ratio.toFixed(2)} ${e.textContent.slice(0, 20)}`);
  }
  return [...new Set(bad)];
}
