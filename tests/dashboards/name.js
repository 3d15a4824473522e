// what a reader hears of the element that has the focus
() => {
  const element = document.activeElement;
  const label = element.labels && element.labels[0];
  return (element.getAttribute("aria-label") || (label || element).textContent).trim();
}
