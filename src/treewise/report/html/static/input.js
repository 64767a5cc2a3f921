"use strict";
// Mouse, touch, keys and controls: what they ask of the picture.
(function (TW) {
  TW.Input = class {
    constructor(picture) {
      this.picture = picture;
      this.canvas = picture.canvas;
      this.tip = document.getElementById("tip");
      this.pointers = new Map();
      this.listen();
    }

    listen() {
      const on = (id, kind, action) => document.getElementById(id).addEventListener(kind, action);
      on("tree-choice", "change", (event) => this.picture.showTree(Number(event.target.value)));
      on("colour-choice", "change", (event) => {
        this.picture.mode = event.target.value;
        this.picture.recolour();
      });
      on("budget-choice", "change", (event) => TW.chooseBudget(Number(event.target.value)));
      on("path-choice", "change", (event) =>
        this.picture.choosePath(event.target.value === "" ? -1 : Number(event.target.value) - 1),
      );
      on("path-back", "click", () => this.picture.step(-1));
      on("path-on", "click", () => this.picture.step(1));
      on("path-none", "click", () => this.picture.choosePath(-1));
      on("zoom-in", "click", () => this.picture.zoom(0.6));
      on("zoom-out", "click", () => this.picture.zoom(1 / 0.6));
      on("zoom-all", "click", () => this.picture.everything());
      on("fold", "click", () => this.picture.fold());
      on("fold-all", "click", () => {
        this.picture.tree.foldAll();
        this.picture.afterFolding();
      });
      on("unfold-all", "click", () => {
        this.picture.tree.unfoldAll();
        this.picture.afterFolding();
      });
      on("zoom-segment", "click", () => this.picture.zoomTo(this.picture.focused));
      on("path-here", "click", () =>
        this.picture.choosePath(this.picture.tree.firstTrajectoryThrough(this.picture.focused)),
      );
      this.canvas.addEventListener("keydown", (event) => this.key(event));
      this.canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
      this.canvas.addEventListener("dblclick", (event) => {
        const s = this.under(event).s;
        if (s >= 0) this.picture.zoomTo(s);
      });
      for (const kind of ["pointerdown", "pointermove", "pointerup", "pointercancel", "pointerleave"]) {
        this.canvas.addEventListener(kind, (event) => this[kind](event));
      }
      new ResizeObserver(() => {
        const height = Math.max(this.picture.tree.numRows, this.picture.rowsOfHeight());
        if (this.picture.view.y1 - this.picture.view.y0 >= this.picture.full.y1 - 1e-6)
          this.picture.view.y1 = this.picture.view.y0 + height;
        this.picture.full.y1 = height;
        this.picture.redraw();
      }).observe(this.canvas);
    }

    place(event) {
      const box = this.canvas.getBoundingClientRect();
      return {
        shareX: (event.clientX - box.left) / box.width,
        shareY: (event.clientY - box.top) / (box.height - TW.AXIS),
      };
    }

    // The segment under the pointer, and the tree position of the token there.
    under(event) {
      const { shareX, shareY } = this.place(event);
      const depth = this.picture.view.x0 + shareX * (this.picture.view.x1 - this.picture.view.x0);
      const s = this.picture.tree.at(
        depth,
        this.picture.view.y0 + shareY * (this.picture.view.y1 - this.picture.view.y0),
      );
      if (s < 0) return { s, position: null };
      const inside = Math.min(
        this.picture.tree.length[s] - 1,
        Math.max(0, Math.floor(depth - this.picture.tree.depth[s])),
      );
      return { s, position: this.picture.tree.start[s] + inside };
    }

    wheel(event) {
      if (document.activeElement !== this.canvas && !event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      const { shareX, shareY } = this.place(event);
      const pixels = event.deltaY * (event.deltaMode === 1 ? 16 : 1);
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        this.picture.move(
          ((event.deltaX || event.deltaY) / this.canvas.clientWidth) * (this.picture.view.x1 - this.picture.view.x0),
          0,
        );
      } else this.picture.zoom(Math.exp(pixels / 500), shareX, shareY);
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
      const dx = event.clientX - before.x,
        dy = event.clientY - before.y;
      if (this.pointers.size === 1) {
        if (!this.hasMoved && Math.hypot(dx, dy) < 5) return;
        if (!this.hasMoved) this.canvas.setPointerCapture(event.pointerId);
        this.hasMoved = true;
        this.canvas.classList.add("is-dragged");
        const { view } = this.picture,
          { canvas } = this;
        this.picture.move(
          (-dx / canvas.clientWidth) * (view.x1 - view.x0),
          (-dy / canvas.clientHeight) * (view.y1 - view.y0),
        );
      } else {
        const other = [...this.pointers].find(([id]) => id !== event.pointerId)[1];
        const old = Math.hypot(before.x - other.x, before.y - other.y),
          now = Math.hypot(event.clientX - other.x, event.clientY - other.y);
        const middle = this.place({ clientX: (event.clientX + other.x) / 2, clientY: (event.clientY + other.y) / 2 });
        if (now > 8) this.picture.zoom(old / now, middle.shareX, middle.shareY);
      }
      this.pointers.set(event.pointerId, { x: event.clientX, y: event.clientY });
    }

    pointerup(event) {
      const wasClick = this.pointers.has(event.pointerId) && this.pointers.size === 1 && !this.hasMoved;
      this.pointercancel(event);
      if (wasClick) {
        const { s, position } = this.under(event);
        this.picture.focus(s, position, true);
      }
    }

    pointercancel(event) {
      this.pointers.delete(event.pointerId);
      if (!this.pointers.size) this.canvas.classList.remove("is-dragged");
    }

    pointerleave() {
      if (this.pointers.size) return;
      this.tip.hidden = true;
      this.picture.hovered = -1;
      this.picture.redraw();
    }

    hover(event) {
      if (event.pointerType === "touch") return;
      const { s, position } = this.under(event);
      if (s !== this.picture.hovered) {
        this.picture.hovered = s;
        this.picture.redraw();
      }
      this.tip.hidden = s < 0;
      if (s < 0) return;
      TW.showTip(this.tip, this.picture.tree, s, position, this.picture.scale);
      const box = this.canvas.getBoundingClientRect();
      const x = event.clientX - box.left,
        y = event.clientY - box.top;
      this.tip.style.left = `${Math.max(4, Math.min(x + 14, box.width - this.tip.offsetWidth - 6))}px`;
      const below = y + 18 + this.tip.offsetHeight < box.height;
      this.tip.style.top = `${below ? y + 18 : Math.max(4, y - this.tip.offsetHeight - 10)}px`;
    }

    key(event) {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const { tree } = this.picture;
      const s = this.picture.focused;
      const to = (next) => {
        if (next >= 0) this.picture.focus(next);
      };
      const actions = {
        ArrowLeft: () => to(s < 0 ? 0 : tree.parent[s]),
        ArrowRight: () => to(s < 0 ? 0 : tree.folded[s] ? -1 : tree.firstChild[s]),
        ArrowUp: () => to(s < 0 ? 0 : this.beside(s, -1)),
        ArrowDown: () => to(s < 0 ? 0 : this.beside(s, 1)),
        Home: () => to(0),
        Enter: () => this.picture.zoomTo(s),
        " ": () => this.picture.fold(),
        f: () => this.picture.fold(),
        p: () => {
          if (s >= 0) this.picture.choosePath(tree.firstTrajectoryThrough(s));
        },
        "+": () => this.picture.zoom(0.6),
        "=": () => this.picture.zoom(0.6),
        "-": () => this.picture.zoom(1 / 0.6),
        0: () => this.picture.everything(),
        Escape: () => {
          this.picture.choosePath(-1);
          this.picture.focus(-1);
          this.picture.everything();
        },
      };
      const action = actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
      if (!action) return;
      event.preventDefault();
      this.tip.hidden = true;
      action();
    }

    // The next segment up or down: a sibling, or the nearest one of a cousin at about this depth.
    beside(s, by) {
      const { tree } = this.picture;
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
