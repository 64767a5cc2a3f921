"use strict";
// Drawing with level of detail: what is smaller than a pixel is drawn once and not gone into, what lies outside of the
// view is not visited, and a segment is never drawn in more pieces than it has pixels.
(function (TW) {
  const TEXT_HEIGHT = 12,
    MIN_TEXT_WIDTH = 30,
    TOKEN_WIDTH = 22,
    MIN_IMAGE = 8,
    LETTER = 6.7;
  TW.AXIS = 20; // pixels of the depth axis at the bottom

  TW.draw = function (canvas, tree, view, options) {
    const ratio = window.devicePixelRatio || 1;
    const width = canvas.clientWidth,
      full = canvas.clientHeight,
      height = full - TW.AXIS;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(full * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(full * ratio);
    }
    const pen = canvas.getContext("2d", { alpha: false });
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    const job = {
      pen,
      tree,
      view,
      options,
      width,
      height,
      sx: width / (view.x1 - view.x0),
      sy: height / (view.y1 - view.y0),
      paper: TW.cssColour("--picture"),
      ink: TW.cssColour("--ink"),
      accent: TW.cssColour("--warm"),
      muted: TW.cssColour("--muted"),
      onPath: options.path ? new Set(options.path) : null,
      covered: new Float64Array(Math.ceil(height) + 1).fill(-1),
      drawn: 0,
    };
    pen.fillStyle = job.paper;
    pen.fillRect(0, 0, width, full);
    const ticks = depthTicks(job);
    grid(job, ticks, 0, height);
    pen.save();
    pen.beginPath();
    pen.rect(0, 0, width, height);
    pen.clip();
    walk(job);
    if (job.onPath) for (const s of options.path) segment(job, s, true);
    outline(job, options.hovered, 1);
    outline(job, options.focused, 2.5);
    pen.restore();
    axis(job, ticks);
    return job.drawn;
  };

  function depthTicks(job) {
    const { view, width } = job;
    const rough = (view.x1 - view.x0) / Math.max(2, width / 110);
    const power = 10 ** Math.floor(Math.log10(Math.max(1, rough)));
    const step = Math.max(1, [1, 2, 5, 10].map((f) => f * power).find((s) => s >= rough) || 10 * power);
    const ticks = [];
    for (let depth = Math.ceil(view.x0 / step) * step; depth <= view.x1; depth += step) ticks.push(depth);
    return ticks;
  }

  function grid(job, ticks, top, bottom) {
    const { pen } = job;
    pen.fillStyle = job.muted;
    pen.globalAlpha = 0.25;
    for (const depth of ticks) pen.fillRect(Math.round((depth - job.view.x0) * job.sx), top, 1, bottom - top);
    pen.globalAlpha = 1;
  }

  function axis(job, ticks) {
    const { pen, width, height } = job;
    grid(job, ticks, height, height + 5);
    pen.fillStyle = job.muted;
    pen.globalAlpha = 0.35;
    pen.fillRect(0, height, width, 1);
    pen.globalAlpha = 1;
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "bottom";
    for (const depth of ticks) {
      const x = (depth - job.view.x0) * job.sx;
      pen.textAlign = x < 24 ? "left" : x > width - 24 ? "right" : "center";
      pen.fillText(TW.format(depth), Math.min(width - 4, Math.max(4, x)), height + TW.AXIS - 2);
    }
  }

  function walk(job) {
    const { tree, view } = job;
    let s = 0;
    while (s < tree.size) {
      if (
        tree.isHidden[s] ||
        tree.bottom[s] <= view.y0 ||
        tree.top[s] >= view.y1 ||
        tree.depth[s] >= view.x1 ||
        tree.reach[s] <= view.x0
      ) {
        s = tree.after[s];
        continue;
      }
      if ((tree.bottom[s] - tree.top[s]) * job.sy < 0.9) {
        speck(job, s);
        s = tree.after[s];
        continue;
      }
      if (!(job.onPath && job.onPath.has(s))) segment(job, s, false);
      s = tree.folded[s] ? tree.after[s] : s + 1;
    }
  }

  // A subtree thinner than a pixel: one stroke per pixel row, as far as it reaches.
  function speck(job, s) {
    const { pen, tree, view } = job;
    const row = Math.max(0, Math.floor((tree.top[s] - view.y0) * job.sy));
    const end = (tree.reach[s] - view.x0) * job.sx;
    if (row >= job.covered.length || job.covered[row] >= end) return;
    const begin = Math.max((tree.depth[s] - view.x0) * job.sx, job.covered[row]);
    pen.globalAlpha = job.onPath ? 0.22 : 0.85;
    pen.fillStyle = colourAt(job, s, tree.start[s] + (tree.length[s] >> 1));
    pen.fillRect(begin, row, Math.max(1, end - begin), 1);
    pen.globalAlpha = 1;
    job.covered[row] = end;
    job.drawn++;
  }

  function colourAt(job, s, position) {
    const { scale } = job.options;
    return scale.colour(scale.perSegment ? scale.perSegment[s] : job.tree.value(scale.stream, position));
  }

  function box(job, s) {
    const { tree, view } = job;
    const x = (tree.depth[s] - view.x0) * job.sx,
      y = (tree.top[s] - view.y0) * job.sy;
    const h = (tree.bottom[s] - tree.top[s]) * job.sy;
    return { x, y, w: tree.length[s] * job.sx, h, gap: h > 5 ? 1 : 0 };
  }

  function segment(job, s, isOnPath) {
    const { pen, tree } = job;
    if (tree.isHidden[s]) return;
    let { x, y, w, h, gap } = box(job, s);
    if (isOnPath && h < 3) {
      y -= (3 - h) / 2;
      h = 3;
    }
    const height = Math.max(1, h - gap);
    const left = Math.max(0, x),
      right = Math.min(job.width, x + Math.max(1, w));
    pen.globalAlpha = job.onPath && !isOnPath ? 0.22 : 1;
    if (right > left && y < job.height && y + h > 0) {
      stretches(job, s, x, y, height, left, right);
      images(job, s, x, y, height);
      if (w > 3) {
        pen.fillStyle = job.paper;
        pen.fillRect(x, y, 1, height);
      } // where a segment begins
      if (isOnPath) edge(job, left, right, y, height);
      if (tree.numEnds[s] && tree.firstChild[s] >= 0 && height > 3) {
        // a trajectory ends inside the tree
        pen.fillStyle = job.ink;
        pen.fillRect(x + w - 2, y, 2, height);
      }
      job.drawn++;
    }
    if (tree.folded[s]) foldedRest(job, s, x + w, y, height);
    pen.globalAlpha = 1;
  }

  // The runs of a stream over one segment; where they are finer than pixels, one sample per pixel.
  function stretches(job, s, x, y, height, left, right) {
    const { pen, tree } = job;
    const { scale } = job.options;
    const hasText = height >= TEXT_HEIGHT && tree.tokens.length > 0;
    const paint = (from, to, value) => {
      const colour = scale.colour(value);
      pen.fillStyle = colour;
      pen.fillRect(from, y, Math.max(1, to - from), height);
      if (scale.isHatched && scale.isHatched(value) && to - from > 4) hatch(job, from, y, to - from, height);
      if (hasText && to - from >= MIN_TEXT_WIDTH) text(job, s, { x, y, height, from, to, colour });
    };
    if (scale.perSegment) return paint(left, right, scale.perSegment[s]);
    const { starts, values } = scale.stream;
    const begin = tree.start[s],
      end = begin + tree.length[s];
    const first = TW.lastAtMost(starts, begin + Math.max(0, Math.floor((left - x) / job.sx)));
    const last = TW.lastAtMost(starts, Math.min(end - 1, begin + Math.ceil((right - x) / job.sx)));
    if (last - first + 1 > right - left) {
      for (let at = left; at < right; at++) {
        paint(at, at + 1, tree.value(scale.stream, Math.min(end - 1, begin + Math.floor((at + 0.5 - x) / job.sx))));
      }
      return;
    }
    for (let run = first; run <= last; run++) {
      const from = Math.max(left, x + (starts[run] - begin) * job.sx);
      const to = Math.min(right, run < last ? x + (starts[run + 1] - begin) * job.sx : right);
      if (to > from) paint(from, to, values[run]);
    }
  }

  // The images of a segment in their place, where there is room; a frame where there is little.
  function images(job, s, x, y, height) {
    const { pen, tree, options } = job;
    const begin = tree.start[s];
    const from = begin + Math.max(0, Math.floor(-x / job.sx)),
      to = Math.min(begin + tree.length[s], begin + Math.ceil((job.width - x) / job.sx));
    if (height < MIN_IMAGE || !(to > from)) return;
    for (const image of tree.imagesIn(from, to)) {
      const left = x + (tree.images.starts[image] - begin) * job.sx,
        width = tree.images.lengths[image] * job.sx - 1;
      const small = options.thumbnails[tree.images.thumbnails[image]];
      if (width < 3) continue;
      pen.strokeStyle = job.ink;
      pen.lineWidth = 1;
      pen.strokeRect(left + 0.5, y + 0.5, Math.max(1, width - 1), height - 1);
      if (width < MIN_IMAGE || !small || !small.complete || !small.naturalWidth) continue;
      const scale = Math.min((width - 2) / small.naturalWidth, (height - 2) / small.naturalHeight);
      const wide = small.naturalWidth * scale,
        tall = small.naturalHeight * scale;
      pen.fillStyle = job.paper;
      pen.fillRect(left + 1, y + 1, width - 2, height - 2);
      pen.drawImage(small, left + (width - wide) / 2, y + (height - tall) / 2, wide, tall);
    }
  }

  function hatch(job, x, y, width, height) {
    const { pen } = job;
    pen.save();
    pen.beginPath();
    pen.rect(x, y, width, height);
    pen.clip();
    pen.strokeStyle = job.paper;
    pen.globalAlpha *= 0.55;
    pen.lineWidth = 1.5;
    pen.beginPath();
    const reach = Math.min(height, 4000);
    for (let at = Math.floor((x - reach) / 7) * 7; at < x + width; at += 7) {
      pen.moveTo(at, y + reach);
      pen.lineTo(at + reach, y);
    }
    pen.stroke();
    pen.restore();
  }

  function edge(job, left, right, y, height) {
    const { pen } = job;
    pen.fillStyle = job.accent;
    pen.fillRect(left, y, right - left, Math.min(2, height));
    if (height > 6) pen.fillRect(left, y + height - 2, right - left, 2);
  }

  // What a folded segment hides: how far it reaches, fading.
  function foldedRest(job, s, x, y, height) {
    const { pen, tree, view } = job;
    const end = (tree.reach[s] - view.x0) * job.sx;
    if (end <= x + 1) return;
    pen.globalAlpha *= 0.45;
    pen.fillStyle = colourAt(job, s, tree.start[s] + tree.length[s] - 1);
    pen.fillRect(x, y, end - x, height);
    hatch(job, x, y, end - x, height);
    pen.globalAlpha = 1;
    const label = `+ ${TW.many(tree.after[s] - s - 1, "segment")}`;
    if (height >= TEXT_HEIGHT && end - x > 90) {
      pen.font = "11px system-ui, sans-serif";
      pen.textAlign = "left";
      pen.textBaseline = "middle";
      pen.fillStyle = job.ink;
      pen.fillText(label, Math.max(4, x + 5), y + Math.min(height, 24) / 2);
    }
  }

  // The text of one run, from where it comes into view; token by token where there is room for that.
  function text(job, s, run) {
    const { pen, tree } = job;
    const { x, y, height, from, to } = run;
    const alpha = pen.globalAlpha;
    pen.save();
    pen.beginPath();
    pen.rect(from, y, to - from - 2, height);
    pen.clip();
    pen.textAlign = "left";
    pen.textBaseline = "middle";
    pen.font = "11px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace";
    pen.fillStyle = legible(run.colour);
    const top = Math.max(0, y),
      bottom = Math.min(job.height, y + height);
    const middle = (top + bottom) / 2;
    const begin = tree.start[s],
      end = Math.min(begin + tree.length[s], begin + Math.round((to - x) / job.sx));
    const first = Math.max(begin, begin + Math.round((from - x) / job.sx));
    if (job.sx >= TOKEN_WIDTH) {
      for (let t = Math.max(begin, first - 1); t < end; t++) {
        const place = x + (t - begin) * job.sx;
        pen.globalAlpha = alpha;
        pen.fillText(
          oneLine(tree.read(t, t + 1)).slice(0, Math.ceil(job.sx / LETTER) + 1),
          place + 4,
          middle,
          job.sx - 6,
        );
        pen.globalAlpha = alpha * 0.3;
        pen.fillRect(place, y, 1, height);
      }
    } else {
      const room = Math.ceil((to - from) / LETTER);
      const words = oneLine(tree.read(first, Math.min(end, first + room)));
      pen.fillText(words.slice(0, room), from + 5, middle);
    }
    pen.restore();
  }

  // Dark text on pale colours, pale text on deep ones.
  function legible(colour) {
    const parts =
      colour[0] === "#" ? [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16)) : colour.match(/\d+/g).map(Number);
    return 0.299 * parts[0] + 0.587 * parts[1] + 0.114 * parts[2] > 125 ? "#0d1418" : "#f8fbfc";
  }

  const oneLine = (words) => words.replace(/\n/g, "⏎").replace(/\t/g, "⇥");

  function outline(job, s, thickness) {
    if (s == null || s < 0 || job.tree.isHidden[s]) return;
    const { pen } = job;
    const { x, y, w, h } = box(job, s);
    const left = Math.max(-4, x),
      right = Math.min(job.width + 4, x + Math.max(2, w));
    const top = Math.max(-4, y),
      bottom = Math.min(job.height + 4, y + Math.max(2, h));
    if (right < left || bottom < top) return;
    pen.strokeStyle = job.ink;
    pen.lineWidth = thickness;
    pen.strokeRect(left + thickness / 2, top + thickness / 2, right - left - thickness, bottom - top - thickness);
  }
})(window.TW);
