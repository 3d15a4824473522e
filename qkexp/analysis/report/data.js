// The payload: a JSON header and the arrays behind it (data.py says how they are laid out).

async function gunzip(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function fromBase64(text) {
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  return bytes;
}

/** 16-bit codes of a logarithm -> numbers: series.py, encode. */
function decode(code) {
  if (code === 0) return NaN;
  if (code === 1) return 0;
  return code === 65535 ? Infinity : 2 ** ((code - 32768) / 512);
}

class Data {
  constructor(bytes) {
    const length = new DataView(bytes.buffer, bytes.byteOffset).getUint32(0, true);
    Object.assign(this, JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + length))));
    this.buffer = bytes.slice(4 + length).buffer;
    this.byName = new Map(this.runs.map((run) => [run.name, run]));
    this.variantOf = new Map(this.variants.map((variant) => [variant.name, variant]));
  }

  look(variant) {
    return this.variantOf.get(variant);
  }

  /** A configuration key of a run: its own, or what all share. */
  config(run, key) {
    return key in run.config ? run.config[key] : this.common.config[key];
  }

  /** {first, last, low, high}: the smallest and largest value of each stretch of steps; null where there is none. */
  scalar(run, name) {
    if (!run.curves) return null;
    const { first, last } = run.curves.spans;
    const at = run.at.scalars + this.scalars.indexOf(name) * first.length * 8;
    return split({ first, last }, new Float32Array(this.buffer, at, 2 * first.length), (x) => x);
  }

  /** The same of an attention metric: a layer's value, or that of one head (`head` null: the layer's). */
  attention(run, metric, layer, head) {
    const about = run.attention;
    const kind = head === null ? "layers" : "each";
    if (!about || !about[`${kind}_spans`]) return null;
    const place = about.layers.indexOf(layer);
    if (place < 0 || (head !== null && head >= about.heads)) return null;
    const spans = about[`${kind}_spans`];
    const row = this.layered.indexOf(metric) * about.layers.length + place;
    const series = head === null ? row : row * about.heads + head;
    const at = run.at[kind] + series * spans.first.length * 4;
    return split(spans, new Uint16Array(this.buffer, at, 2 * spans.first.length), decode);
  }

  /** Steps a stretch, at most; 1 where nothing was left out. */
  static width(series) {
    return Math.max(1, ...series.first.map((step, i) => series.last[i] - step + 1));
  }
}

function split(spans, pairs, read) {
  const low = [];
  const high = [];
  for (let i = 0; i < pairs.length; i += 2) {
    low.push(read(pairs[i]));
    high.push(read(pairs[i + 1]));
  }
  return { first: spans.first, last: spans.last, low, high };
}
