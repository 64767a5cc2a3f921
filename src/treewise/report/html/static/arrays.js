"use strict";
// Typed arrays from base64, and tokens to text. All scripts of the page share one namespace, TW.
window.TW = {};
(function (TW) {
  const KINDS = { u2: Uint16Array, u4: Uint32Array, i4: Int32Array, f4: Float32Array };

  TW.bytes = function (base64) {
    const binary = atob(base64);
    const bytes = new Uint8Array(binary.length);
    for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
    return bytes;
  };

  // The page is little-endian, as is every machine that a browser runs on.
  TW.unpack = (packed) => new KINDS[packed.kind](TW.bytes(packed.data).buffer);

  TW.format = (number) => Math.round(number).toLocaleString("en");

  // "1 segment", "2 segments"
  TW.many = (number, noun) => `${TW.format(number)} ${noun}${number === 1 ? "" : "s"}`;

  // The last index whose value is at most `wanted`, in an ascending array; -1 for none.
  TW.lastAtMost = function (ascending, wanted) {
    let low = 0,
      high = ascending.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (ascending[middle] <= wanted) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  };

  // Bytes of every token once; text is put together from them, so characters split over tokens come out whole.
  TW.Vocabulary = class {
    constructor(data) {
      this.hasText = data.has_text;
      this.ids = TW.unpack(data.ids);
      const lengths = TW.unpack(data.lengths);
      this.starts = new Uint32Array(lengths.length + 1);
      for (let i = 0; i < lengths.length; i++) this.starts[i + 1] = this.starts[i] + lengths[i];
      this.data = TW.bytes(data.bytes);
      this.decoder = new TextDecoder();
    }

    read(numbers, from, to) {
      let size = 0;
      for (let i = from; i < to; i++) size += this.starts[numbers[i] + 1] - this.starts[numbers[i]];
      const joined = new Uint8Array(size);
      for (let i = from, at = 0; i < to; i++) {
        const piece = this.data.subarray(this.starts[numbers[i]], this.starts[numbers[i] + 1]);
        joined.set(piece, at);
        at += piece.length;
      }
      return this.decoder.decode(joined);
    }
  };
})(window.TW);
