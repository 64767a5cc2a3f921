"use strict";
// A tree: its segments, where each is drawn, and what lies on the path of a trajectory.
// Segments are in depth-first order, so those below segment s are s + 1 .. after[s] - 1.
(function (TW) {
  TW.Tree = class {
    constructor(data, vocabulary) {
      this.name = data.name;
      this.numTokens = data.num_tokens;
      this.vocabulary = vocabulary;
      this.start = TW.unpack(data.start);
      this.parent = TW.unpack(data.parent);
      this.multiplicity = TW.unpack(data.multiplicity);
      this.tokens = TW.unpack(data.tokens);
      this.endSegment = TW.unpack(data.end_segment);
      this.trajectories = data.trajectories;
      this.images = {
        starts: TW.unpack(data.images.starts),
        lengths: TW.unpack(data.images.lengths),
        thumbnails: TW.unpack(data.images.thumbnails),
      };
      this.size = this.start.length;
      this.streams = {};
      for (const [name, runs] of Object.entries(data.streams)) {
        this.streams[name] = { starts: TW.unpack(runs.starts), values: TW.unpack(runs.values) };
      }
      this.microBatches = data.micro_batches.map((runs) => ({
        starts: TW.unpack(runs.starts),
        values: TW.unpack(runs.values),
      }));
      this.shape();
      this.folded = new Uint8Array(this.size);
      this.layOut();
    }

    shape() {
      const n = this.size;
      this.length = new Uint32Array(n);
      this.depth = new Uint32Array(n);
      this.after = new Int32Array(n).fill(0);
      this.firstChild = new Int32Array(n).fill(-1);
      this.nextSibling = new Int32Array(n).fill(-1);
      this.previousSibling = new Int32Array(n).fill(-1);
      this.numEnds = new Uint32Array(n);
      for (let s = 0; s < n; s++) {
        this.length[s] = (s + 1 < n ? this.start[s + 1] : this.numTokens) - this.start[s];
        const above = this.parent[s];
        this.depth[s] = above < 0 ? 0 : this.depth[above] + this.length[above];
      }
      const last = new Int32Array(n + 1).fill(-1); // the child of each segment seen last; at n, of the whole forest
      for (let s = 0; s < n; s++) {
        const above = this.parent[s] < 0 ? n : this.parent[s];
        if (last[above] >= 0) {
          this.nextSibling[last[above]] = s;
          this.previousSibling[s] = last[above];
        } else if (above < n) this.firstChild[above] = s;
        last[above] = s;
      }
      this.reach = new Uint32Array(n); // the deepest depth below
      for (let s = n - 1; s >= 0; s--) {
        this.after[s] = Math.max(this.after[s], s + 1);
        this.reach[s] = Math.max(this.reach[s], this.depth[s] + this.length[s]);
        const above = this.parent[s];
        if (above >= 0) {
          this.after[above] = Math.max(this.after[above], this.after[s]);
          this.reach[above] = Math.max(this.reach[above], this.reach[s]);
        }
      }
      for (const s of this.endSegment) this.numEnds[s]++;
      this.maxDepth = this.reach.reduce((a, b) => Math.max(a, b), 1);
    }

    // Rows: one for every leaf, and for every folded segment.
    layOut() {
      const n = this.size;
      const rows = new Float64Array(n);
      for (let s = n - 1; s >= 0; s--) {
        if (this.folded[s] || this.firstChild[s] < 0) rows[s] = 1;
        if (this.parent[s] >= 0) rows[this.parent[s]] += rows[s];
      }
      this.top = new Float64Array(n);
      this.bottom = new Float64Array(n);
      this.isHidden = new Uint8Array(n);
      const cursor = new Float64Array(n);
      let next = 0;
      for (let s = 0; s < n; s++) {
        const above = this.parent[s];
        if (above >= 0 && (this.isHidden[above] || this.folded[above])) {
          this.isHidden[s] = 1;
          continue;
        }
        const own = this.folded[s] ? 1 : rows[s];
        this.top[s] = above < 0 ? next : cursor[above];
        this.bottom[s] = this.top[s] + own;
        if (above < 0) next += own;
        else cursor[above] += own;
        cursor[s] = this.top[s];
      }
      this.numRows = Math.max(1, next);
      this.numShown = n - this.isHidden.reduce((a, b) => a + b, 0);
    }

    fold(s, isFolded) {
      if (this.firstChild[s] < 0) return false;
      this.folded[s] = isFolded ? 1 : 0;
      this.layOut();
      return true;
    }

    // Every child of a fork, so that the trunk and one row per branch stay.
    foldAll() {
      this.folded.fill(0);
      for (let s = 0; s < this.size; s++) {
        const above = this.parent[s];
        const isBranch = this.nextSibling[s] >= 0 || this.previousSibling[s] >= 0;
        if (this.firstChild[s] >= 0 && (isBranch || (above >= 0 && this.folded[above]))) this.folded[s] = 1;
      }
      this.layOut();
    }

    unfoldAll() {
      this.folded.fill(0);
      this.layOut();
    }

    // The visible segment at a depth and a row; -1 for none.
    at(depth, row) {
      for (let s = 0; s >= 0;) {
        if (row < this.top[s] || row >= this.bottom[s]) {
          s = this.nextSibling[s];
          continue;
        }
        const end = this.folded[s] ? this.reach[s] : this.depth[s] + this.length[s];
        if (depth < end) return depth >= this.depth[s] ? s : -1;
        if (this.folded[s]) return -1;
        s = this.firstChild[s];
      }
      return -1;
    }

    // Segments from the root to the end of a trajectory.
    path(trajectory) {
      const found = [];
      for (let s = this.endSegment[trajectory]; s >= 0; s = this.parent[s]) found.push(s);
      return found.reverse();
    }

    firstTrajectoryThrough(s) {
      for (let i = 0; i < this.endSegment.length; i++) {
        if (this.endSegment[i] >= s && this.endSegment[i] < this.after[s]) return i;
      }
      return -1;
    }

    // The value of a stream at a tree position.
    value(stream, position) {
      return stream.values[TW.lastAtMost(stream.starts, position)];
    }

    // Images that begin from one tree position up to another, as indices; none reaches over the end of a segment.
    imagesIn(from, to) {
      const { starts, lengths } = this.images;
      const found = [];
      for (let i = Math.max(0, TW.lastAtMost(starts, from)); i < starts.length && starts[i] < to; i++) {
        if (starts[i] + lengths[i] > from) found.push(i);
      }
      return found;
    }

    read(from, to) {
      return this.tokens.length ? this.vocabulary.read(this.tokens, from, to) : "";
    }

    tokenId(position) {
      return this.tokens.length ? this.vocabulary.ids[this.tokens[position]] : null;
    }

    // How many tokens of a segment are trained, and what they weigh.
    weights(s) {
      const { starts, values } = this.streams.weight;
      const end = this.start[s] + this.length[s];
      let trained = 0,
        total = 0;
      for (let r = TW.lastAtMost(starts, this.start[s]); r < starts.length && starts[r] < end; r++) {
        const until = Math.min(end, r + 1 < starts.length ? starts[r + 1] : this.numTokens);
        const count = until - Math.max(starts[r], this.start[s]);
        if (values[r] > 0) {
          trained += count;
          total += count * values[r];
        }
      }
      return { trained, total };
    }
  };
})(window.TW);
