"use strict";
// What brings the page to life: the theme, the charts, the choice of a budget, and the picture.
(function (TW) {
  const TOP = 12,
    FLOOR = 190;
  const page = JSON.parse(document.getElementById("page-data").textContent);
  let picture = null;

  // -- theme: as the system, light, dark
  const button = document.getElementById("theme");
  const themes = [
    ["", "◐", "auto", "as the system"],
    ["light", "○", "light", "light"],
    ["dark", "●", "dark", "dark"],
  ];
  let theme = 0;
  button.addEventListener("click", () => {
    theme = (theme + 1) % themes.length;
    const [value, sign, word, name] = themes[theme];
    if (value) document.documentElement.dataset.theme = value;
    else delete document.documentElement.dataset.theme;
    button.replaceChildren(`${sign} `, TW.element("span", "", word));
    button.setAttribute("aria-label", `Colour theme: ${name}`);
    if (picture) picture.recolour();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => picture && picture.recolour());

  // -- charts: values under the pointer, or by arrow keys
  function readable(number) {
    if (number === 0) return "0";
    if (Math.abs(number) >= 1000) return TW.format(number);
    return Number(number.toPrecision(4)).toString();
  }

  function chart(figure, reading) {
    const svg = figure.querySelector("svg"),
      cross = figure.querySelector(".cross"),
      output = figure.querySelector("output");
    const [low, high] = reading.x_range,
      [left, right] = reading.box;
    const longest = reading.lines.reduce((a, b) => (b.xs.length > a.xs.length ? b : a));
    let at = -1;
    const show = (x) => {
      const place = left + ((x - low) / (high - low)) * (right - left);
      cross.setAttribute("x1", place);
      cross.setAttribute("x2", place);
      cross.setAttribute("visibility", "visible");
      const values = reading.lines.map((line) => {
        const index = Math.max(0, TW.lastAtMost(line.xs, x));
        return `${line.label} ${readable(line.ys[index])}`;
      });
      output.textContent = `${reading.x_label} ${readable(x)}: ${values.join(", ")}`;
    };
    const hide = () => {
      cross.setAttribute("visibility", "hidden");
      output.textContent = "";
      at = -1;
    };
    const nearest = (event) => {
      const box = svg.getBoundingClientRect();
      const share = (((event.clientX - box.left) / box.width) * 460 - left) / (right - left);
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
  }

  for (const figure of document.querySelectorAll("[data-chart]")) chart(figure, page.charts[figure.dataset.chart]);

  // -- one budget for the picture and the plan
  TW.chooseBudget = function (number) {
    for (const part of document.querySelectorAll(".plan")) part.hidden = Number(part.dataset.plan) !== number;
    for (const radio of document.querySelectorAll("#plan-choice input")) radio.checked = Number(radio.value) === number;
    if (picture) picture.chooseBudget(number);
  };
  for (const radio of document.querySelectorAll("#plan-choice input")) {
    radio.addEventListener("change", () => TW.chooseBudget(Number(radio.value)));
  }

  if (page.trees.length) picture = new TW.Picture(page);
  document.documentElement.dataset.ready = "yes";
})(window.TW);
