"use strict";
// The interactive picture: view, focus, folding, and the path of a trajectory. State that others may want to know
// (tests, assistive scripts) is written to data attributes of the canvas.
(function (TW) {
  const MODES = {
    weight: "trained weight",
    multiplicity: "multiplicity",
    advantage: "advantage",
    reward: "reward",
    "micro-batch": "micro-batch",
  };
  const MARGIN = 1.02,
    ROW = 64; // the widest row, in pixels
  const byId = (id) => document.getElementById(id);

  TW.Picture = class {
    constructor(page) {
      this.page = page;
      this.vocabulary = new TW.Vocabulary(page.vocabulary);
      this.thumbnails = page.thumbnails.map((address) => {
        const image = new Image();
        image.onload = () => this.redraw();
        image.src = address;
        return image;
      });
      this.canvas = byId("canvas");
      this.mode = "weight";
      this.budget = page.first_plan;
      this.fillChoices();
      byId("budget-choice").value = this.budget;
      this.showTree(0);
      new TW.Input(this);
    }

    fillChoices() {
      const options = (select, texts, values) =>
        texts.forEach((text, i) => {
          const option = TW.element("option", "", text);
          option.value = values ? values[i] : i;
          select.append(option);
        });
      options(
        byId("tree-choice"),
        this.page.trees.map((t) => `${t.name} (${TW.format(t.num_tokens)} tokens)`),
      );
      options(
        byId("budget-choice"),
        this.page.plans.map((p) => (p.max_tokens ? `${TW.format(p.max_tokens)} tokens` : "none")),
      );
    }

    showTree(number) {
      this.tree = new TW.Tree(this.page.trees[number], this.vocabulary);
      this.focused = this.hovered = -1;
      this.token = null;
      this.path = null;
      const colour = byId("colour-choice");
      const modes = Object.keys(MODES).filter(
        (mode) => ["weight", "multiplicity", "micro-batch"].includes(mode) || this.tree.streams[mode],
      );
      if (!modes.includes(this.mode)) this.mode = "weight";
      colour.replaceChildren(
        ...modes.map((mode) => {
          const option = TW.element("option", "", MODES[mode]);
          option.value = mode;
          return option;
        }),
      );
      colour.value = this.mode;
      byId("path-choice").max = this.tree.endSegment.length;
      this.choosePath(-1);
      this.everything();
      this.recolour();
      this.focus(-1);
    }

    recolour() {
      this.scale = TW.scale(this.mode, this.tree, this.budget, this.page.plans[this.budget]);
      byId("budget-label").hidden = this.mode !== "micro-batch";
      TW.showLegend(byId("colour-legend"), this.scale.legend);
      this.redraw();
    }

    chooseBudget(number) {
      this.budget = number;
      byId("budget-choice").value = number;
      this.recolour();
      this.focus(this.focused, this.token, true);
    }

    // -- view -------------------------------------------------------------------------------------------------------

    everything() {
      this.full = { x0: 0, x1: this.tree.maxDepth * MARGIN, y0: 0, y1: this.tree.numRows };
      this.fit();
      this.view = { ...this.full };
      this.redraw();
    }

    // A few rows get a low picture, and are not stretched.
    fit() {
      const tallest = Math.min(640, Math.max(320, window.innerHeight * 0.58));
      this.canvas.style.height = `${Math.round(Math.min(tallest, Math.max(150, this.tree.numRows * ROW + TW.AXIS)))}px`;
      this.full.y1 = Math.max(this.tree.numRows, this.rowsOfHeight());
    }

    rowsOfHeight() {
      return (this.canvas.clientHeight - TW.AXIS) / ROW;
    }

    // Shrinks or widens the view about a point that stays where it is. Shares are of the canvas, 0 to 1.
    zoom(factor, shareX = 0.5, shareY = 0.5) {
      const { x0, x1, y0, y1 } = this.view;
      const width = Math.min(this.full.x1 - this.full.x0, Math.max(4, (x1 - x0) * factor));
      const height = Math.min(this.full.y1 - this.full.y0, Math.max(1, (y1 - y0) * factor));
      const x = x0 + (x1 - x0) * shareX,
        y = y0 + (y1 - y0) * shareY;
      this.look(x - width * shareX, y - height * shareY, width, height);
    }

    move(tokens, rows) {
      this.look(this.view.x0 + tokens, this.view.y0 + rows, this.view.x1 - this.view.x0, this.view.y1 - this.view.y0);
    }

    look(x0, y0, width, height) {
      const { full } = this;
      const x = Math.min(Math.max(full.x0, x0), full.x1 - width),
        y = Math.min(Math.max(full.y0, y0), full.y1 - height);
      this.view = { x0: x, x1: x + width, y0: y, y1: y + height };
      this.redraw();
    }

    zoomTo(s) {
      const { tree } = this;
      if (s < 0) return this.everything();
      const width = Math.max(8, tree.length[s] * 1.25),
        height = Math.max(1, tree.bottom[s] - tree.top[s]);
      const tall = Math.min(this.full.y1 - this.full.y0, Math.max(height * 1.1, Math.min(6, tree.numRows)));
      const middle = (tree.top[s] + tree.bottom[s]) / 2;
      this.look(tree.depth[s] - width * 0.1, middle - tall / 2, Math.min(width, this.full.x1), tall);
    }

    // Moves the view so that a segment can be seen, without zooming in.
    reveal(s) {
      const { tree, view } = this;
      const width = view.x1 - view.x0,
        height = view.y1 - view.y0;
      const begin = tree.depth[s],
        end = begin + tree.length[s];
      let { x0, y0 } = view;
      if (begin > view.x1 - width * 0.05 || end < view.x0 + width * 0.02) x0 = begin - width * 0.1;
      if (tree.top[s] >= view.y1 || tree.bottom[s] <= view.y0) y0 = (tree.top[s] + tree.bottom[s]) / 2 - height / 2;
      // A row too thin to be seen is widened to a tenth of the picture.
      const rows = tree.bottom[s] - tree.top[s];
      if ((rows / height) * this.canvas.clientHeight < 4) {
        const wanted = Math.max(1, rows * 10);
        return this.look(x0, (tree.top[s] + tree.bottom[s]) / 2 - wanted / 2, width, wanted);
      }
      if (x0 !== view.x0 || y0 !== view.y0) this.look(x0, y0, width, height);
    }

    // Moves the view up or down so that the row of a segment can be seen; its zoom and its columns stay.
    bringIntoView(s) {
      const { tree, view } = this;
      while (s >= 0 && tree.isHidden[s]) s = tree.parent[s];
      if (s < 0) return;
      const height = view.y1 - view.y0,
        rows = tree.bottom[s] - tree.top[s];
      const seen = Math.min(tree.bottom[s], view.y1) - Math.max(tree.top[s], view.y0);
      if (seen > Math.min(rows / 2, height / 10)) return;
      this.look(view.x0, (tree.top[s] + tree.bottom[s] - height) / 2, view.x1 - view.x0, height);
    }

    redraw() {
      if (this.waiting || !this.scale) return;
      this.waiting = requestAnimationFrame(() => {
        this.waiting = 0;
        const begun = performance.now();
        const drawn = TW.draw(this.canvas, this.tree, this.view, {
          scale: this.scale,
          focused: this.focused,
          hovered: this.hovered,
          path: this.path,
          thumbnails: this.thumbnails,
        });
        const isZoomed =
          this.view.x1 - this.view.x0 < this.full.x1 * 0.999 || this.view.y1 - this.view.y0 < this.full.y1 * 0.999;
        this.canvas.classList.toggle("is-zoomed", isZoomed);
        const span = (a, b) => `${a.toFixed(2)} ${b.toFixed(2)}`;
        Object.assign(this.canvas.dataset, {
          drawn,
          milliseconds: (performance.now() - begun).toFixed(1),
          shown: this.tree.numShown,
          focused: this.focused,
          path: this.path ? this.path.join(" ") : "",
          x: span(this.view.x0, this.view.x1),
          y: span(this.view.y0, this.view.y1),
        });
      });
    }

    // -- focus, folding, path -----------------------------------------------------------------------------------------

    focus(s, token = null, isQuiet = false) {
      this.focused = s;
      this.token = token;
      TW.showDetail(byId("detail"), this.tree, s, token, this.page.plans[this.budget], this.budget, this.thumbnails);
      const canFold = s >= 0 && this.tree.firstChild[s] >= 0;
      byId("fold").disabled = !canFold;
      byId("fold").textContent = canFold && this.tree.folded[s] ? "unfold segment" : "fold segment";
      byId("zoom-segment").disabled = byId("path-here").disabled = s < 0;
      if (s >= 0 && !isQuiet) this.reveal(s);
      this.redraw();
    }

    fold() {
      const s = this.focused;
      if (s < 0 || !this.tree.fold(s, !this.tree.folded[s])) return;
      this.afterFolding();
    }

    afterFolding() {
      const { x0, x1 } = this.view;
      const wasFull = this.view.y1 - this.view.y0 >= this.full.y1 - 1e-6;
      this.fit();
      const height = wasFull ? this.full.y1 : Math.min(this.full.y1, this.view.y1 - this.view.y0);
      let s = this.focused;
      while (s >= 0 && this.tree.isHidden[s]) s = this.tree.parent[s];
      this.look(x0, s >= 0 ? this.tree.top[s] - height / 4 : this.view.y0, x1 - x0, height);
      this.focus(s);
    }

    choosePath(trajectory) {
      const { tree } = this;
      const isNone = !(trajectory >= 0 && trajectory < tree.endSegment.length);
      this.path = isNone ? null : tree.path(trajectory);
      this.trajectory = isNone ? -1 : trajectory;
      byId("path-choice").value = isNone ? "" : trajectory + 1;
      byId("path-none").hidden = isNone;
      const note = byId("path-note");
      if (isNone) {
        note.textContent = `${TW.format(tree.endSegment.length)} trajectories. Choose one to light up its path.`;
      } else {
        const { places, rewards, num_trained: trained } = tree.trajectories;
        const last = this.path[this.path.length - 1];
        const parts = [`Trajectory ${TW.format(trajectory + 1)} of ${TW.format(tree.endSegment.length)}`];
        if (places[trajectory]) parts.push(places[trajectory]);
        parts.push(
          `${TW.many(tree.depth[last] + tree.length[last], "token")} in ${TW.many(this.path.length, "segment")}`,
        );
        if (trained[trajectory] != null) parts.push(`${TW.format(trained[trajectory])} trained`);
        if (rewards[trajectory] != null) parts.push(`reward ${Number(rewards[trajectory].toPrecision(4))}`);
        note.textContent = parts.join(" · ");
        this.bringIntoView(last);
      }
      this.redraw();
    }

    step(by) {
      const count = this.tree.endSegment.length;
      this.choosePath(this.trajectory < 0 ? (by > 0 ? 0 : count - 1) : (this.trajectory + by + count) % count);
    }
  };
})(window.TW);
