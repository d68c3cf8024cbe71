// The code that was submitted: its files, which are fetched when somebody wants to see them.

import { h } from "./dom.js";
import { unpack } from "./tar.js";

const MAX_BYTES = 8 << 20;
const MAX_SHOWN = 200_000; // characters of one file

/** A closed list of the files of a job's code, the script first. */
export function codeOf(job, script) {
  const path = `/v1/jobs/${encodeURIComponent(job)}/code`;
  const list = h("div", { "aria-live": "polite" });
  const load = async () => {
    list.replaceChildren(h("p", { class: "empty" }, "Loading…"));
    try {
      const response = await fetch(path);
      if (!response.ok) throw new Error((await response.json()).detail);
      const files = await unpack(await response.blob(), MAX_BYTES);
      const order = (file) => (file.path.replace(/^\.\//, "") === script ? 0 : 1);
      files.sort((a, b) => order(a) - order(b) || a.path.localeCompare(b.path));
      list.replaceChildren(...files.map((file, n) => shown(file, n === 0)));
    } catch (problem) {
      list.replaceChildren(h("p", { class: "error" }, `The code cannot be shown: ${problem.message}`));
    }
  };
  const details = h("details", { class: "code", ontoggle: () => details.open && !list.firstChild && load() },
    h("summary", {}, "Submitted code"), list,
    h("p", {}, h("a", { class: "button", href: path, download: "" }, "Download code")));
  return details;
}

function shown({ path, bytes }, isOpen) {
  const isText = !bytes.subarray(0, 8000).includes(0);
  const text = isText ? new TextDecoder().decode(bytes.subarray(0, MAX_SHOWN)) : "";
  return h("details", { open: isOpen }, h("summary", {}, h("code", {}, path), ` ${bytes.length.toLocaleString()} bytes`),
    isText ? h("pre", { tabindex: "0", role: "region", "aria-label": path }, text) : h("p", { class: "empty" }, "This file is not text."),
    text.length >= MAX_SHOWN && h("p", { class: "more" }, "The rest is not shown."));
}
