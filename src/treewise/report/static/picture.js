"use strict";
// The interactive picture: view, focus, folding, and the path of a trajectory. State that others may want to know
// (tests, assistive scripts) is written to data attributes of the canvas.
(function (TW) {
  const MODES = { weight: "trained weight", multiplicity: "multiplicity", advantage: "advantage", reward: "reward", "micro-batch": "micro-batch" };
  const MARGIN = 1.02, ROW = 64; // the widest row, in pixels
  const byId = (id) => document.getElementById(id);

  TW.Picture = class {
    constructor(page) {
      this.page = page;
      this.vocabulary = new TW.Vocabulary(page.vocabulary);
      this.canvas = byId("canvas");
      this.tip = byId("tip");
      this.mode = "weight";
      this.budget = 0;
      this.pointers = new Map();
      this.fillChoices();
      this.listen();
      this.showTree(0);
    }

    fillChoices() {
      const options = (select, texts, values) => texts.forEach((text, i) => {
        const option = TW.element("option", "", text);
        option.value = values ? values[i] : i;
        select.append(option);
      });
      options(byId("tree-choice"), this.page.trees.map((t) => `${t.name} (${TW.format(t.num_tokens)} tokens)`));
      options(byId("budget-choice"), this.page.plans.map((p) => (p.max_tokens ? `${TW.format(p.max_tokens)} tokens` : "none")));
    }

    showTree(number) {
      this.tree = new TW.Tree(this.page.trees[number], this.vocabulary);
      this.focused = this.hovered = -1;
      this.token = null;
      this.path = null;
      const colour = byId("colour-choice");
      const modes = Object.keys(MODES).filter((mode) => ["weight", "multiplicity", "micro-batch"].includes(mode) || this.tree.streams[mode]);
      if (!modes.includes(this.mode)) this.mode = "weight";
      colour.replaceChildren(...modes.map((mode) => {
        const option = TW.element("option", "", MODES[mode]);
        option.value = mode;
        return option;
      }));
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

    rowsOfHeight() { return (this.canvas.clientHeight - TW.AXIS) / ROW; }

    // Shrinks or widens the view about a point that stays where it is. Shares are of the canvas, 0 to 1.
    zoom(factor, shareX = 0.5, shareY = 0.5) {
      const { x0, x1, y0, y1 } = this.view;
      const width = Math.min(this.full.x1 - this.full.x0, Math.max(4, (x1 - x0) * factor));
      const height = Math.min(this.full.y1 - this.full.y0, Math.max(1, (y1 - y0) * factor));
      const x = x0 + (x1 - x0) * shareX, y = y0 + (y1 - y0) * shareY;
      this.look(x - width * shareX, y - height * shareY, width, height);
    }

    move(tokens, rows) {
      this.look(this.view.x0 + tokens, this.view.y0 + rows, this.view.x1 - this.view.x0, this.view.y1 - this.view.y0);
    }

    look(x0, y0, width, height) {
      const { full } = this;
      const x = Math.min(Math.max(full.x0, x0), full.x1 - width), y = Math.min(Math.max(full.y0, y0), full.y1 - height);
      this.view = { x0: x, x1: x + width, y0: y, y1: y + height };
      this.redraw();
    }

    zoomTo(s) {
      const { tree } = this;
      if (s < 0) return this.everything();
      const width = Math.max(8, tree.length[s] * 1.25), height = Math.max(1, tree.bottom[s] - tree.top[s]);
      const tall = Math.min(this.full.y1 - this.full.y0, Math.max(height * 1.1, Math.min(6, tree.numRows)));
      const middle = (tree.top[s] + tree.bottom[s]) / 2;
      this.look(tree.depth[s] - width * 0.1, middle - tall / 2, Math.min(width, this.full.x1), tall);
    }

    // Moves the view so that a segment can be seen, without zooming in.
    reveal(s) {
      const { tree, view } = this;
      const width = view.x1 - view.x0, height = view.y1 - view.y0;
      const begin = tree.depth[s], end = begin + tree.length[s];
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

    redraw() {
      if (this.waiting || !this.scale) return;
      this.waiting = requestAnimationFrame(() => {
        this.waiting = 0;
        const begun = performance.now();
        const drawn = TW.draw(this.canvas, this.tree, this.view, { scale: this.scale, focused: this.focused, hovered: this.hovered, path: this.path });
        const isZoomed = this.view.x1 - this.view.x0 < this.full.x1 * 0.999 || this.view.y1 - this.view.y0 < this.full.y1 * 0.999;
        this.canvas.classList.toggle("is-zoomed", isZoomed);
        const span = (a, b) => `${a.toFixed(2)} ${b.toFixed(2)}`;
        Object.assign(this.canvas.dataset, {
          drawn, milliseconds: (performance.now() - begun).toFixed(1), shown: this.tree.numShown, focused: this.focused,
          path: this.path ? this.path.join(" ") : "", x: span(this.view.x0, this.view.x1), y: span(this.view.y0, this.view.y1),
        });
      });
    }

    // -- focus, folding, path -----------------------------------------------------------------------------------------

    focus(s, token = null, isQuiet = false) {
      this.focused = s;
      this.token = token;
      TW.showDetail(byId("detail"), this.tree, s, token, this.page.plans[this.budget], this.budget);
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
        parts.push(`${TW.format(tree.depth[last] + tree.length[last])} tokens in ${TW.format(this.path.length)} segments`);
        if (trained[trajectory] != null) parts.push(`${TW.format(trained[trajectory])} trained`);
        if (rewards[trajectory] != null) parts.push(`reward ${Number(rewards[trajectory].toPrecision(4))}`);
        note.textContent = parts.join(" · ");
      }
      this.redraw();
    }

    step(by) {
      const count = this.tree.endSegment.length;
      this.choosePath(this.trajectory < 0 ? (by > 0 ? 0 : count - 1) : (this.trajectory + by + count) % count);
    }

    // -- input ----------------------------------------------------------------------------------------------------------

    listen() {
      const on = (id, kind, action) => byId(id).addEventListener(kind, action);
      on("tree-choice", "change", (event) => this.showTree(Number(event.target.value)));
      on("colour-choice", "change", (event) => { this.mode = event.target.value; this.recolour(); });
      on("budget-choice", "change", (event) => TW.chooseBudget(Number(event.target.value)));
      on("path-choice", "change", (event) => this.choosePath(event.target.value === "" ? -1 : Number(event.target.value) - 1));
      on("path-back", "click", () => this.step(-1));
      on("path-on", "click", () => this.step(1));
      on("path-none", "click", () => this.choosePath(-1));
      on("zoom-in", "click", () => this.zoom(0.6));
      on("zoom-out", "click", () => this.zoom(1 / 0.6));
      on("zoom-all", "click", () => this.everything());
      on("fold", "click", () => this.fold());
      on("fold-all", "click", () => { this.tree.foldAll(); this.afterFolding(); });
      on("unfold-all", "click", () => { this.tree.unfoldAll(); this.afterFolding(); });
      on("zoom-segment", "click", () => this.zoomTo(this.focused));
      on("path-here", "click", () => this.choosePath(this.tree.firstTrajectoryThrough(this.focused)));
      this.canvas.addEventListener("keydown", (event) => this.key(event));
      this.canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
      this.canvas.addEventListener("dblclick", (event) => { const s = this.under(event).s; if (s >= 0) this.zoomTo(s); });
      for (const kind of ["pointerdown", "pointermove", "pointerup", "pointercancel", "pointerleave"]) {
        this.canvas.addEventListener(kind, (event) => this[kind](event));
      }
      new ResizeObserver(() => {
        const height = Math.max(this.tree.numRows, this.rowsOfHeight());
        if (this.view.y1 - this.view.y0 >= this.full.y1 - 1e-6) this.view.y1 = this.view.y0 + height;
        this.full.y1 = height;
        this.redraw();
      }).observe(this.canvas);
    }

    place(event) {
      const box = this.canvas.getBoundingClientRect();
      return { shareX: (event.clientX - box.left) / box.width, shareY: (event.clientY - box.top) / (box.height - TW.AXIS) };
    }

    // The segment under the pointer, and the tree position of the token there.
    under(event) {
      const { shareX, shareY } = this.place(event);
      const depth = this.view.x0 + shareX * (this.view.x1 - this.view.x0);
      const s = this.tree.at(depth, this.view.y0 + shareY * (this.view.y1 - this.view.y0));
      if (s < 0) return { s, position: null };
      const inside = Math.min(this.tree.length[s] - 1, Math.max(0, Math.floor(depth - this.tree.depth[s])));
      return { s, position: this.tree.start[s] + inside };
    }

    wheel(event) {
      if (document.activeElement !== this.canvas && !event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      const { shareX, shareY } = this.place(event);
      const pixels = event.deltaY * (event.deltaMode === 1 ? 16 : 1);
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        this.move(((event.deltaX || event.deltaY) / this.canvas.clientWidth) * (this.view.x1 - this.view.x0), 0);
      } else this.zoom(Math.exp(pixels / 500), shareX, shareY);
    }

    pointerdown(event) {
      this.pointers.set(event.pointerId, { x: event.clientX, y: event.clientY });
      this.hasMoved = this.pointers.size > 1;
      this.tip.hidden = true;
      if (this.pointers.size === 2) this.canvas.setPointerCapture(event.pointerId);
    }

    pointermove(event) {
      const before = this.pointers.get(event.pointerId);
      if (!before) return this.hover(event);
      const dx = event.clientX - before.x, dy = event.clientY - before.y;
      if (this.pointers.size === 1) {
        if (!this.hasMoved && Math.hypot(dx, dy) < 5) return;
        if (!this.hasMoved) this.canvas.setPointerCapture(event.pointerId);
        this.hasMoved = true;
        this.canvas.classList.add("is-dragged");
        const { view, canvas } = this;
        this.move((-dx / canvas.clientWidth) * (view.x1 - view.x0), (-dy / canvas.clientHeight) * (view.y1 - view.y0));
      } else {
        const other = [...this.pointers].find(([id]) => id !== event.pointerId)[1];
        const old = Math.hypot(before.x - other.x, before.y - other.y), now = Math.hypot(event.clientX - other.x, event.clientY - other.y);
        const middle = this.place({ clientX: (event.clientX + other.x) / 2, clientY: (event.clientY + other.y) / 2 });
        if (now > 8) this.zoom(old / now, middle.shareX, middle.shareY);
      }
      this.pointers.set(event.pointerId, { x: event.clientX, y: event.clientY });
    }

    pointerup(event) {
      const wasClick = this.pointers.has(event.pointerId) && this.pointers.size === 1 && !this.hasMoved;
      this.pointercancel(event);
      if (wasClick) {
        const { s, position } = this.under(event);
        this.focus(s, position, true);
      }
    }

    pointercancel(event) {
      this.pointers.delete(event.pointerId);
      if (!this.pointers.size) this.canvas.classList.remove("is-dragged");
    }

    pointerleave() {
      if (this.pointers.size) return;
      this.tip.hidden = true;
      this.hovered = -1;
      this.redraw();
    }

    hover(event) {
      if (event.pointerType === "touch") return;
      const { s, position } = this.under(event);
      if (s !== this.hovered) { this.hovered = s; this.redraw(); }
      this.tip.hidden = s < 0;
      if (s < 0) return;
      TW.showTip(this.tip, this.tree, s, position, this.scale);
      const box = this.canvas.getBoundingClientRect();
      const x = event.clientX - box.left, y = event.clientY - box.top;
      this.tip.style.left = `${Math.max(4, Math.min(x + 14, box.width - this.tip.offsetWidth - 6))}px`;
      const below = y + 18 + this.tip.offsetHeight < box.height;
      this.tip.style.top = `${below ? y + 18 : Math.max(4, y - this.tip.offsetHeight - 10)}px`;
    }

    key(event) {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const { tree } = this;
      const s = this.focused;
      const to = (next) => { if (next >= 0) this.focus(next); };
      const actions = {
        ArrowLeft: () => to(s < 0 ? 0 : tree.parent[s]),
        ArrowRight: () => to(s < 0 ? 0 : tree.folded[s] ? -1 : tree.firstChild[s]),
        ArrowUp: () => to(s < 0 ? 0 : this.beside(s, -1)),
        ArrowDown: () => to(s < 0 ? 0 : this.beside(s, 1)),
        Home: () => to(0),
        Enter: () => this.zoomTo(s),
        " ": () => this.fold(),
        f: () => this.fold(),
        p: () => { if (s >= 0) this.choosePath(tree.firstTrajectoryThrough(s)); },
        "+": () => this.zoom(0.6),
        "=": () => this.zoom(0.6),
        "-": () => this.zoom(1 / 0.6),
        0: () => this.everything(),
        Escape: () => { this.choosePath(-1); this.focus(-1); this.everything(); },
      };
      const action = actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
      if (!action) return;
      event.preventDefault();
      this.tip.hidden = true;
      action();
    }

    // The next segment up or down: a sibling, or the nearest one of a cousin at about this depth.
    beside(s, by) {
      const { tree } = this;
      const sibling = by > 0 ? tree.nextSibling[s] : tree.previousSibling[s];
      if (sibling >= 0) return sibling;
      const row = by > 0 ? tree.bottom[s] + 1e-6 : tree.top[s] - 1e-6;
      for (let depth = tree.depth[s]; depth >= 0; depth = depth ? Math.floor(depth / 2) : -1) {
        const found = tree.at(depth, row);
        if (found >= 0 && found !== s) return found;
      }
      return -1;
    }
  };
})(window.TW);
