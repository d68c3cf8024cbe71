// Packs files as the API takes them, and unpacks them again: a tar archive (ustar, pax), compressed with gzip.

const BLOCK = 512;

/** Pack `[{path, file}]`; returns a Blob. Throws an Error for a path that does not fit. */
export async function pack(files) {
  const parts = [];
  for (const { path, file } of files) {
    parts.push(header(path, file.size), file, new Uint8Array((BLOCK - (file.size % BLOCK)) % BLOCK));
  }
  parts.push(new Uint8Array(2 * BLOCK));
  const packed = new Blob(parts).stream().pipeThrough(new CompressionStream("gzip"));
  return new Response(packed).blob();
}

/** Unpack a tar.gz; returns `[{path, bytes}]` of its files. Throws an Error if it is larger than `maxBytes`. */
export async function unpack(packed, maxBytes) {
  const all = new Uint8Array(await bounded(packed.stream().pipeThrough(new DecompressionStream("gzip")), maxBytes));
  const files = [];
  let longPath = null;
  for (let at = 0; at + BLOCK <= all.length && all[at] !== 0;) {
    const text = (from, length) => new TextDecoder().decode(all.subarray(at + from, at + from + length)).replace(/\0.*$/s, "");
    const size = parseInt(text(124, 12), 8) || 0;
    const bytes = all.subarray(at + BLOCK, at + BLOCK + size);
    const kind = text(156, 1);
    const prefix = text(257, 5) === "ustar" ? text(345, 155) : "";
    if (kind === "x") longPath = /\d+ path=(.*)\n/.exec(new TextDecoder().decode(bytes))?.[1] ?? null;
    else {
      if (kind === "0" || kind === "") files.push({ path: longPath ?? (prefix ? `${prefix}/${text(0, 100)}` : text(0, 100)), bytes });
      longPath = null;
    }
    at += BLOCK + Math.ceil(size / BLOCK) * BLOCK;
  }
  return files;
}

async function bounded(stream, maxBytes) {
  const parts = [];
  let size = 0;
  for await (const part of stream) {
    size += part.length;
    if (size > maxBytes) throw new Error("it is too large to be shown here");
    parts.push(part);
  }
  return new Blob(parts).arrayBuffer();
}

function header(path, size) {
  const block = new Uint8Array(BLOCK);
  const [prefix, name] = split(path);
  const put = (text, at) => block.set(new TextEncoder().encode(text), at);
  const octal = (value, length) => value.toString(8).padStart(length - 1, "0");
  put(name, 0);
  put(octal(0o644, 8), 100);
  put(octal(0, 8), 108);
  put(octal(0, 8), 116);
  put(octal(size, 12), 124);
  put(octal(0, 12), 136);
  put("        0", 148);
  put("ustar\u000000", 257);
  put(prefix, 345);
  put(`${octal(block.reduce((sum, byte) => sum + byte, 0), 7)}\0 `, 148);
  return block;
}

/** Cut a path at a slash so that its last part has at most 100 bytes and what is before it at most 155. */
function split(path) {
  const size = (text) => new TextEncoder().encode(text).length;
  if (size(path) <= 100) return ["", path];
  for (let at = path.indexOf("/"); at > 0; at = path.indexOf("/", at + 1)) {
    const [prefix, name] = [path.slice(0, at), path.slice(at + 1)];
    if (size(name) <= 100 && size(prefix) <= 155) return [prefix, name];
  }
  throw new Error(`${path}: the path is too long; use \`resile submit\` on the command line`);
}
