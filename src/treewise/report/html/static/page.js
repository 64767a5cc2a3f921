"use strict";
// What brings the page to life: the theme, the charts, the choice of a budget, and the picture.
(function (TW) {
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

  for (const figure of document.querySelectorAll("[data-chart]")) TW.chart(figure, page.charts[figure.dataset.chart]);

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
