"use strict";
// Charts: axes, lines and bars as SVG from their values, which the pointer and the arrow keys read off.
(function (TW) {
  const WIDTH = 460,
    TOP = 12,
    FLOOR = 190;
  const CHARACTER = 9.2; // pixels of one in a label, at the font of narrow screens

  // A number in at most about six characters.
  function short(value) {
    const size = Math.abs(value);
    const units = [[1e12, 1e12, "T"], [1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]];
    for (const [limit, unit, letter] of units) if (size >= limit) return plain(value / unit, 3) + letter;
    return size >= 100 || Number.isInteger(value) ? TW.format(value) : plain(value, 3);
  }

  const plain = (value, digits) => Number(value.toPrecision(digits)).toString();

  // Labels of ticks, no two of which are the same.
  function labels(ticks) {
    let texts = ticks.map(short);
    for (let digits = 4; new Set(texts).size < texts.length && digits < 16; digits++) {
      texts = ticks.map((tick) => plain(tick, digits));
    }
    return texts;
  }

  // Round numbers (1, 2 or 5 times a power of ten) in a range; `outside` adds one at or beyond each end.
  function roundTicks(low, high, outside) {
    const rough = (high - low) / 4;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough * 0.999);
    const [down, up, slack] = outside ? [Math.floor, Math.ceil, 1e-9] : [Math.ceil, Math.floor, -1e-9];
    const ticks = [];
    for (let i = down(low / step + slack); i <= up(high / step - slack); i++) ticks.push(Number((i * step).toPrecision(12)));
    return ticks;
  }

  function logTicks(low, high) {
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
      for (const factor of [1, 2, 5]) ticks.push(factor * 10 ** power);
    }
    const inside = ticks.filter((tick) => low * 0.999 <= tick && tick <= high * 1.001);
    return inside.filter((_, i) => i % Math.max(1, Math.ceil(inside.length / 7)) === 0);
  }

  function scale(low, high, first, last, isLogarithmic) {
    const own = isLogarithmic ? Math.log : (value) => value;
    return (value) => first + ((own(value) - own(low)) / (own(high) - own(low))) * (last - first);
  }

  function add(parent, tag, attributes, text) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== undefined) made.textContent = text;
    return parent.appendChild(made);
  }

  function linePath(line, toX, toY, isStepped) {
    const points = line.xs.map((x, i) => [toX(x), toY(line.ys[i])]);
    let path = `M${points[0].join(" ")}`;
    for (const [x, y] of points.slice(1)) path += isStepped ? `H${x}V${y}` : `L${x} ${y}`;
    if (isStepped) return `${path}V${toY(0)}H${points[0][0]}Z`;
    return points.length > 1 ? path : `${path}m-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0`; // a circle around a single one
  }

  // Whether one line lies on another, within a pixel of a chart, at any of its points.
  function covers(later, line, toY) {
    return line.xs.some((x, i) => {
      const at = later.xs.indexOf(x);
      return at >= 0 && Math.abs(toY(later.ys[at]) - toY(line.ys[i])) < 1;
    });
  }

  // Draws a chart into its figure; returns the ends of the box that holds lines and bars.
  function draw(svg, chart) {
    const [xLow, xHigh] = chart.x_range;
    let yTicks = roundTicks(...chart.y_range, true);
    if (chart.counts.length) yTicks = yTicks.filter(Number.isInteger);
    const xTicks = chart.is_logarithmic ? logTicks(xLow, xHigh) : roundTicks(xLow, xHigh, false);
    const [xLabels, yLabels] = [xTicks, yTicks].map(labels);
    const left = Math.max(58, 8 + CHARACTER * Math.max(...yLabels.map((text) => text.length)));
    const right = WIDTH - Math.max(14, (CHARACTER * (xLabels.at(-1) || "").length) / 2);
    const toX = scale(xLow, xHigh, left, right, chart.is_logarithmic);
    const toY = scale(Math.min(chart.y_range[0], yTicks[0]), Math.max(chart.y_range[1], yTicks.at(-1)), FLOOR, TOP);
    const grid = add(svg, "g", { class: "grid", "aria-hidden": "true" });
    yTicks.forEach((tick, i) => {
      const y = toY(tick);
      add(grid, "line", { x1: left, x2: right, y1: y, y2: y });
      add(grid, "text", { x: left - 6, y: y + 4, "text-anchor": "end" }, yLabels[i]);
    });
    xTicks.forEach((tick, i) => add(grid, "text", { x: toX(tick), y: 207, "text-anchor": "middle" }, xLabels[i]));
    add(grid, "text", { class: "axis", x: (left + right) / 2, y: 226, "text-anchor": "middle" }, chart.x_label);
    chart.counts.forEach((count, i) => {
      const [from, to, y] = [toX(chart.edges[i]), toX(chart.edges[i + 1]), toY(count)];
      if (!count) return;
      const bar = add(svg, "rect", { class: "bar", x: from + 0.75, y, width: to - from - 1.5, height: FLOOR - y, rx: 1.5 });
      const range = `${short(chart.edges[i])} to ${short(chart.edges[i + 1])}`;
      add(bar, "title", {}, `${range}: ${TW.format(count)} ${chart.y_label}`);
    });
    chart.lines.forEach((line, i) => {
      const isCovered = chart.lines.slice(i + 1).some((later) => covers(later, line, toY));
      const name = `line s${i + 1}${chart.is_stepped ? " area" : ""}${isCovered ? " covered" : ""}`;
      add(svg, "path", { class: name, d: linePath(line, toX, toY, chart.is_stepped) });
    });
    return [left, right];
  }

  function readable(number) {
    if (number === 0) return "0";
    if (Math.abs(number) >= 1000) return TW.format(number);
    return plain(number, 4);
  }

  TW.chart = function (figure, chart) {
    const svg = figure.querySelector("svg"),
      output = figure.querySelector("output");
    const [left, right] = draw(svg, chart);
    if (!chart.lines.length) return;
    const cross = add(svg, "line", { class: "cross", x1: 0, x2: 0, y1: TOP, y2: FLOOR, visibility: "hidden" });
    const [low, high] = chart.x_range;
    const longest = chart.lines.reduce((a, b) => (b.xs.length > a.xs.length ? b : a));
    let at = -1;
    const show = (x) => {
      const place = left + ((x - low) / (high - low)) * (right - left);
      cross.setAttribute("x1", place);
      cross.setAttribute("x2", place);
      cross.setAttribute("visibility", "visible");
      const values = chart.lines.map((line) => {
        const index = Math.max(0, TW.lastAtMost(line.xs, x));
        return `${line.label} ${readable(line.ys[index])}`;
      });
      output.textContent = `${chart.x_label} ${readable(x)}: ${values.join(", ")}`;
    };
    const hide = () => {
      cross.setAttribute("visibility", "hidden");
      output.textContent = "";
      at = -1;
    };
    const nearest = (event) => {
      const box = svg.getBoundingClientRect();
      const share = (((event.clientX - box.left) / box.width) * WIDTH - left) / (right - left);
      const x = low + share * (high - low);
      const index = Math.max(0, TW.lastAtMost(longest.xs, x));
      const next = Math.min(longest.xs.length - 1, index + 1);
      return x - longest.xs[index] > longest.xs[next] - x ? next : index;
    };
    const pointed = (event) => {
      at = nearest(event);
      show(longest.xs[at]);
    };
    svg.addEventListener("pointermove", pointed);
    svg.addEventListener("pointerdown", pointed);
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      const last = longest.xs.length - 1;
      const moves = { ArrowLeft: Math.max(0, at - 1), ArrowRight: Math.min(last, at + 1), Home: 0, End: last };
      if (!(event.key in moves)) return;
      event.preventDefault();
      at = moves[event.key];
      show(longest.xs[at]);
    });
  };
})(window.TW);
