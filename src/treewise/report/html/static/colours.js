"use strict";
// Colour scales. Sequential ones go from pale to deep, diverging ones over a neutral middle; all are told apart by
// people who do not see red and green, and each is drawn in the legend with its numbers.
(function (TW) {
  const SEQUENTIAL = {
    light: [
      [214, 236, 228],
      [122, 196, 183],
      [43, 148, 143],
      [14, 98, 110],
      [13, 52, 77],
    ],
    dark: [
      [26, 66, 72],
      [27, 110, 112],
      [52, 158, 148],
      [128, 206, 178],
      [214, 243, 214],
    ],
  };
  const DIVERGING = {
    light: [
      [170, 66, 8],
      [236, 166, 104],
      [252, 246, 228],
      [112, 167, 214],
      [22, 86, 158],
    ],
    dark: [
      [250, 150, 74],
      [158, 92, 46],
      [96, 92, 76],
      [46, 106, 160],
      [112, 184, 250],
    ],
  };
  const CATEGORIES = {
    light: ["#7fb8ad", "#e3b07a", "#a99bd8", "#8cb9e0", "#d99fb4", "#b5bf77", "#8fa3b0", "#d8c26a"],
    dark: ["#2f7f74", "#96622a", "#6a58ab", "#386f9f", "#91506b", "#6f7a2c", "#566a78", "#877322"],
  };

  TW.isDark = function () {
    const theme = document.documentElement.dataset.theme;
    return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  };

  TW.cssColour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function mixed(stops, share) {
    const place = Math.min(1, Math.max(0, share)) * (stops.length - 1);
    const low = Math.min(stops.length - 2, Math.floor(place));
    const part = place - low;
    return "rgb(" + stops[low].map((c, i) => Math.round(c + (stops[low + 1][i] - c) * part)).join(",") + ")";
  }

  // A scale has colour(value), a legend, and where it runs from and to.
  TW.scale = function (mode, tree, budget, plan) {
    const theme = TW.isDark() ? "dark" : "light";
    const context = TW.cssColour("--context");
    if (mode === "micro-batch") {
      const colours = CATEGORIES[theme];
      // By order of appearance, so that neighbours differ.
      const order = new Map();
      for (const value of tree.microBatches[budget].values) if (!order.has(value)) order.set(value, order.size);
      return {
        stream: tree.microBatches[budget],
        colour: (value) => colours[order.get(value) % colours.length],
        isHatched: (value) => plan.kinds[value] !== "closed",
        words: (value) => `micro-batch ${TW.format(value + 1)}, ${plan.kinds[value]}`,
        legend: {
          kind: "categories",
          colours,
          text: `${TW.format(order.size)} micro-batches in this tree; hatched: open (others continue it; see Plan)`,
        },
      };
    }
    if (mode === "multiplicity") {
      const most = tree.multiplicity.reduce((a, b) => Math.max(a, b), 1);
      const share = (value) => (most > 1 ? Math.log(value) / Math.log(most) : 0.5);
      return {
        perSegment: tree.multiplicity,
        colour: (value) => mixed(SEQUENTIAL[theme], share(value)),
        words: (value) => `${TW.format(value)} trajectories`,
        legend: {
          kind: "ramp",
          stops: SEQUENTIAL[theme],
          low: "1",
          high: `${TW.format(most)} trajectories through it, logarithmic`,
        },
      };
    }
    if (mode === "advantage" || mode === "reward") {
      const stream = tree.streams[mode];
      let most = 0;
      for (const value of stream.values) if (!Number.isNaN(value)) most = Math.max(most, Math.abs(value));
      most = most || 1;
      const legend =
        mode === "advantage"
          ? "mean advantage of the trajectories that train it"
          : "mean reward of the trajectories through it";
      return {
        stream,
        colour: (value) => (Number.isNaN(value) ? context : mixed(DIVERGING[theme], 0.5 + value / most / 2)),
        words: (value) => (Number.isNaN(value) ? "not trained" : `${mode} ${value.toPrecision(3)}`),
        legend: {
          kind: "ramp",
          stops: DIVERGING[theme],
          low: (-most).toPrecision(3),
          high: `${most.toPrecision(3)}, ${legend}`,
          none: mode === "advantage" ? "not trained" : null,
        },
      };
    }
    const stream = tree.streams.weight;
    let least = Infinity,
      most = 0;
    for (const value of stream.values)
      if (value > 0) {
        least = Math.min(least, value);
        most = Math.max(most, value);
      }
    const spread = most > least ? Math.log(most / least) : 0;
    const share = (value) => (spread ? 0.25 + (0.75 * Math.log(value / least)) / spread : 0.55);
    return {
      stream,
      colour: (value) => (value > 0 ? mixed(SEQUENTIAL[theme], share(value)) : context),
      words: (value) => (value > 0 ? `loss weight ${Number(value.toPrecision(4))}` : "context, not trained"),
      legend: spread
        ? {
            kind: "ramp",
            stops: SEQUENTIAL[theme].slice(1),
            low: `${Number(least.toPrecision(3))}`,
            high: `${Number(most.toPrecision(4))}, loss weight summed over trajectories, logarithmic`,
            none: "context, not trained",
          }
        : {
            kind: "categories",
            colours: [mixed(SEQUENTIAL[theme], 0.55)],
            text: `trained, weight ${Number((most || 1).toPrecision(3))}`,
            none: "context, not trained",
          },
      swatchOfContext: context,
    };
  };

  // Draws a legend into an element.
  TW.showLegend = function (element, legend) {
    element.replaceChildren();
    const swatch = (colour, text) => {
      const item = document.createElement("span");
      const box = document.createElement("span");
      box.className = "swatch";
      box.style.background = colour;
      item.append(box, text);
      element.append(item);
    };
    if (legend.kind === "ramp") {
      const item = document.createElement("span");
      item.className = "ramp";
      const ramp = document.createElement("canvas");
      ramp.width = 130;
      ramp.height = 12;
      const pen = ramp.getContext("2d");
      for (let x = 0; x < 130; x++) {
        pen.fillStyle = mixed(legend.stops, x / 129);
        pen.fillRect(x, 0, 1, 12);
      }
      item.append(legend.low, ramp, legend.high);
      element.append(item);
    } else {
      const item = document.createElement("span");
      for (const colour of legend.colours) {
        const box = document.createElement("span");
        box.className = "swatch";
        box.style.background = colour;
        item.append(box);
      }
      item.append(legend.text);
      element.append(item);
    }
    if (legend.none) swatch(TW.cssColour("--context"), legend.none);
  };
})(window.TW);
