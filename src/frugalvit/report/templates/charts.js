"use strict";
// Show the value of every line at the pointer, or at the cursor that the arrow keys move.
(() => {
  const number = value => {
    const size = Math.abs(value);
    return size && (size < 1e-3 || size >= 1e5) ? value.toExponential(2) : String(+value.toPrecision(4));
  };
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle; else high = middle;
    }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  };

  for (const figure of document.querySelectorAll("figure.chart")) {
    const svg = figure.querySelector(":scope > svg"), readout = figure.querySelector(".readout");
    const data = JSON.parse(figure.querySelector("script").textContent);
    const [left, right, top, bottom] = svg.dataset.frame.split(" ").map(Number);
    const [x0, x1] = data.x;
    const positions = [...new Set(data.series.flatMap(series => series.x))].sort((a, b) => a - b);
    const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
    cursor.setAttribute("class", "cursor");
    cursor.setAttribute("y1", top);
    cursor.setAttribute("y2", bottom);
    let at = positions.length - 1;

    const show = index => {
      at = Math.max(0, Math.min(positions.length - 1, index));
      const x = positions[at], across = left + (x - x0) / (x1 - x0) * (right - left);
      cursor.setAttribute("x1", across);
      cursor.setAttribute("x2", across);
      svg.append(cursor);
      readout.replaceChildren(`${data.label} ${number(x)}`);
      for (const series of data.series) {
        const swatch = document.createElement("i"), value = document.createElement("b");
        swatch.style.setProperty("--line", `var(--series-${series.style})`);
        // A run that ended before or started after x has no value.
        const known = series.x[0] <= x && x <= series.x[series.x.length - 1];
        value.textContent = known ? number(series.y[nearest(series.x, x)]) : "–";
        readout.append(swatch, data.series.length > 1 ? `${series.label} ` : "", value);
      }
    };
    const point = event => {
      const box = svg.getBoundingClientRect();
      const across = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
      show(nearest(positions, x0 + (across - left) / (right - left) * (x1 - x0)));
    };
    svg.addEventListener("pointermove", point);
    svg.addEventListener("pointerdown", point);
    svg.addEventListener("keydown", event => {
      const step = {ArrowLeft: -1, ArrowRight: 1}[event.key];
      if (!step) return;
      event.preventDefault();
      show(at + step);
    });
    svg.addEventListener("focus", () => { if (svg.matches(":focus-visible")) show(at); });
    const leave = () => { cursor.remove(); readout.replaceChildren(); };
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("blur", leave);
  }
})();
