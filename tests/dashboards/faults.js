// what sticks out of the window, which visible blocks cover each other, which charts have words that are cut,
// or a drawing of another size than their box
() => {
  const shown = (e) => e.checkVisibility({ contentVisibilityAuto: true, visibilityProperty: true }) && !e.matches(".skip");
  const inside = (e) => e.closest(".scroll") && !e.matches(".scroll"); // there it may be wider, and scrolls
  const outside = [...document.querySelectorAll("body *")]
    .filter((e) => shown(e) && !inside(e) && !e.closest("svg"))
    .filter((e) => e.getBoundingClientRect().right > innerWidth + 0.5 || e.getBoundingClientRect().left < -0.5)
    .map((e) => `${e.tagName}.${e.className}`);
  const kinds = "h1, h2, h3, p, button, select, input, summary, .plot, .scroll, legend, dt, dd, label.variant";
  const blocks = [...document.querySelectorAll(kinds)].filter((e) => shown(e) && !inside(e));
  const boxes = blocks.map((e) => [e, e.getBoundingClientRect()]).filter(([, b]) => b.width && b.height);
  const covered = [];
  boxes.forEach(([a, p], i) =>
    boxes.slice(i + 1).forEach(([b, q]) => {
      if (a.contains(b) || b.contains(a)) return;
      const width = Math.min(p.right, q.right) - Math.max(p.left, q.left);
      const height = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
      if (width > 1 && height > 1) covered.push(`${a.textContent.slice(0, 30)} | ${b.textContent.slice(0, 30)}`);
    }),
  );
  const within = (t, box) => !t.width || (t.right < box.right + 1 && t.left > box.left - 1 && t.bottom < box.bottom + 1 && t.top > box.top - 1);
  const cut = [...document.querySelectorAll(".plot")]
    .filter(shown)
    .filter((e) => [...e.querySelectorAll("svg.main-svg text")].some((t) => !within(t.getBoundingClientRect(), e.getBoundingClientRect())))
    .map((e) => e.getAttribute("aria-label").slice(0, 60));
  const loose = [...document.querySelectorAll(".plot")]
    .filter(shown)
    .filter((e) => ["width", "height"].some((side) => Math.abs(e.getBoundingClientRect()[side] - e.querySelector("svg.main-svg").getBoundingClientRect()[side]) > 1))
    .map((e) => e.getAttribute("aria-label").slice(0, 60));
  return { outside, covered, cut, loose, wide: document.documentElement.scrollWidth > innerWidth };
}
