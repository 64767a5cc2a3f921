"use strict";
// What is said about a segment: facts and text, written as text and never as markup.
(function (TW) {
  const HEAD = 360,
    TAIL = 120,
    AROUND = 60, // tokens shown
    MOST_IMAGES = 60;

  TW.element = function (tag, className, text) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text != null) made.textContent = text;
    return made;
  };

  TW.describe = function (tree, s) {
    const { trained } = tree.weights(s);
    const end = tree.depth[s] + tree.length[s];
    const words = [
      `Segment ${TW.format(s + 1)} of ${TW.format(tree.size)}`,
      `depth ${TW.format(tree.depth[s])} to ${TW.format(end)}`,
      `${TW.format(tree.length[s])} tokens`,
      `${TW.format(trained)} trained`,
      `${TW.format(tree.multiplicity[s])} trajectories`,
    ];
    if (tree.folded[s]) words.push("folded");
    return words.join(", ");
  };

  // The panel below the picture. `token` is a tree position to be pointed out, or null.
  TW.showDetail = function (panel, tree, s, token, plan, budget, thumbnails) {
    panel.replaceChildren();
    if (s < 0) {
      panel.append(
        TW.element(
          "p",
          "note",
          `${TW.many(tree.size, "segment")}, ${TW.many(tree.numTokens, "token")}, ` +
            `${TW.format(tree.endSegment.length)} trajector${tree.endSegment.length === 1 ? "y" : "ies"}. ` +
            "Choose a segment to see its tokens and text.",
        ),
      );
      return;
    }
    panel.append(TW.element("h3", "", `Segment ${TW.format(s + 1)} of ${TW.format(tree.size)}`));
    panel.append(facts(tree, s, token, plan, budget));
    const seen = tree.imagesIn(tree.start[s], tree.start[s] + tree.length[s]);
    if (seen.length) panel.append(images(tree, s, seen, thumbnails));
    if (!tree.tokens.length) {
      panel.append(TW.element("p", "note", "The tokens of this tree were left out of this file to keep it small."));
    } else {
      panel.append(words(tree, s, token));
    }
  };

  function facts(tree, s, token, plan, budget) {
    const list = TW.element("dl", "facts");
    const add = (name, value) => {
      const item = TW.element("div");
      item.append(TW.element("dt", "", name), TW.element("dd", "", value));
      list.append(item);
    };
    const { trained, total } = tree.weights(s);
    add("depth", `${TW.format(tree.depth[s])} to ${TW.format(tree.depth[s] + tree.length[s])}`);
    add("tokens", TW.format(tree.length[s]));
    add("trained", trained ? `${TW.format(trained)}, weight ${Number(total.toPrecision(5))}` : "none");
    add("trajectories", TW.format(tree.multiplicity[s]));
    const seen = tree.imagesIn(tree.start[s], tree.start[s] + tree.length[s]);
    if (seen.length) {
      const tokens = seen.reduce((sum, image) => sum + tree.images.lengths[image], 0);
      add("images", `${TW.format(seen.length)}, ${TW.format(tokens)} tokens`);
    }
    if (tree.numEnds[s]) add("end here", TW.format(tree.numEnds[s]));
    if (tree.after[s] > s + 1)
      add("below", `${TW.many(tree.after[s] - s - 1, "segment")}${tree.folded[s] ? ", folded" : ""}`);
    if (tree.streams.reward) add("mean reward", Number(tree.value(tree.streams.reward, tree.start[s]).toPrecision(4)));
    const runs = tree.microBatches[budget];
    if (runs && plan) {
      const first = TW.lastAtMost(runs.starts, tree.start[s]);
      const last = TW.lastAtMost(runs.starts, tree.start[s] + tree.length[s] - 1);
      const number = runs.values[first];
      add(
        "micro-batch",
        first === last
          ? `${TW.format(number + 1)}, ${plan.kinds[number]}`
          : `${TW.format(last - first + 1)} stretches from ${TW.format(number + 1)} on`,
      );
    }
    if (token != null && tree.tokens.length)
      add("token", `depth ${TW.format(tree.depth[s] + token - tree.start[s])}, id ${tree.tokenId(token)}`);
    return list;
  }

  // The images of a segment, in order; what the page has no thumbnail of is named.
  function images(tree, s, seen, thumbnails) {
    const strip = TW.element("div", "thumbnails");
    strip.tabIndex = 0;
    strip.setAttribute("aria-label", "Images of the segment");
    seen.slice(0, MOST_IMAGES).forEach((image, number) => {
      const figure = TW.element("figure");
      const depth = tree.depth[s] + tree.images.starts[image] - tree.start[s];
      const words = `image ${TW.format(number + 1)}: ${TW.format(tree.images.lengths[image])} tokens at depth ${TW.format(depth)}`;
      const small = thumbnails[tree.images.thumbnails[image]];
      if (small) {
        const copy = new Image();
        copy.src = small.src;
        copy.alt = words;
        figure.append(copy);
      } else figure.append(TW.element("p", "note", "not in this file"));
      figure.append(TW.element("figcaption", "", words));
      strip.append(figure);
    });
    if (seen.length > MOST_IMAGES) strip.append(TW.element("p", "note", `and ${TW.format(seen.length - MOST_IMAGES)} more`));
    return strip;
  }

  // The text, trained runs marked; of a long segment its ends, and what lies around the token pointed at.
  function words(tree, s, token) {
    const begin = tree.start[s],
      end = begin + tree.length[s];
    let parts = [[begin, end]];
    if (tree.length[s] > HEAD + TAIL)
      parts = [
        [begin, begin + HEAD],
        [end - TAIL, end],
      ];
    if (token != null) parts.push([Math.max(begin, token - AROUND), Math.min(end, token + AROUND)]);
    parts.sort((a, b) => a[0] - b[0]);
    const joined = [];
    for (const part of parts) {
      const before = joined[joined.length - 1];
      if (before && part[0] <= before[1]) before[1] = Math.max(before[1], part[1]);
      else joined.push(part.slice());
    }
    const box = TW.element("pre", "text-of");
    box.tabIndex = 0;
    box.setAttribute("aria-label", "Text of the segment; trained tokens are marked");
    let here = begin;
    for (const [from, to] of joined) {
      if (from > here) box.append(TW.element("span", "gap", ` … ${TW.format(from - here)} tokens … `));
      let at = from;
      for (const image of tree.imagesIn(from, to)) {
        const first = tree.images.starts[image],
          last = first + tree.images.lengths[image];
        if (first > at) runs(tree, at, first, token, box);
        box.append(TW.element("span", "gap", ` [image of ${TW.format(last - first)} tokens] `));
        at = Math.max(at, Math.min(to, last));
      }
      if (to > at) runs(tree, at, to, token, box);
      here = to;
    }
    return box;
  }

  function runs(tree, from, to, token, box) {
    const { starts, values } = tree.streams.weight;
    for (let run = TW.lastAtMost(starts, from); run < starts.length && starts[run] < to; run++) {
      const low = Math.max(from, starts[run]),
        high = Math.min(to, run + 1 < starts.length ? starts[run + 1] : tree.numTokens);
      const cuts = token != null && token >= low && token < high ? [low, token, token + 1, high] : [low, high];
      for (let i = 0; i + 1 < cuts.length; i++) {
        if (cuts[i] === cuts[i + 1]) continue;
        const classes = [
          values[run] > 0 ? "trained" : "",
          cuts[i] === token && cuts[i + 1] === token + 1 ? "token-here" : "",
        ];
        box.append(TW.element("span", classes.join(" ").trim(), tree.read(cuts[i], cuts[i + 1])));
      }
    }
  }

  // The little box at the pointer.
  TW.showTip = function (tip, tree, s, position, scale) {
    tip.replaceChildren();
    const value = scale.perSegment ? scale.perSegment[s] : tree.value(scale.stream, position);
    const depth = tree.depth[s] + position - tree.start[s];
    tip.append(TW.element("b", "", `depth ${TW.format(depth)}`));
    tip.append(
      ` · ${TW.format(tree.multiplicity[s])} traj. · segment of ${TW.format(tree.length[s])} tokens` +
        ` · ${scale.words(value)}`,
    );
    if (tree.tokens.length) {
      const end = tree.start[s] + tree.length[s];
      const line = TW.element("span", "tip-text");
      line.append(tree.read(Math.max(tree.start[s], position - 12), position));
      line.append(TW.element("mark", "", tree.read(position, position + 1)));
      line.append(tree.read(position + 1, Math.min(end, position + 24)));
      tip.append(line);
    }
  };
})(window.TW);
