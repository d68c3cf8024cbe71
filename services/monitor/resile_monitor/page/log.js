// The log of a job: the newest lines, and those that its stream brings after them.

import { get } from "./api.js";
import { h } from "./dom.js";
import { moment } from "./format.js";

const TAIL_LINES = 500;
const MAX_LINES = 2000;
const WRITE_MS = 100;
const RETRY_MS = 2000;

export class Log {
  element = h("pre", { class: "log", tabindex: "0", "aria-label": "Log" }, note());
  #path;
  #loaded = null; // the number of the newest message that was loaded, null while the lines so far are missing
  #pending = []; // lines of the stream that are not shown yet
  #turn = 0;
  #writing = null;
  #retry = null;

  constructor(job) {
    this.#path = `/v1/jobs/${encodeURIComponent(job)}/logs?tail=${TAIL_LINES}`;
  }

  /** Load the lines so far, at each connection of the stream; lines that the stream brings meanwhile are shown after them. */
  async load() {
    const turn = ++this.#turn;
    clearTimeout(this.#retry);
    [this.#loaded, this.#pending] = [null, []];
    try {
      const { lines } = await get(this.#path);
      if (turn !== this.#turn) return;
      this.element.replaceChildren();
      this.#write(lines);
      this.#loaded = lines.at(-1)?.sequence ?? 0;
      this.#writeSoon();
    } catch {
      if (turn === this.#turn) this.#retry = setTimeout(() => this.load(), RETRY_MS);
    }
  }

  /** Show an event of the stream `logs`. */
  add({ sequence, data }) {
    this.#pending.push({ ...data, sequence });
    this.#writeSoon();
  }

  scrollToEnd() {
    this.element.scrollTop = this.element.scrollHeight;
  }

  close() {
    this.#turn += 1;
    clearTimeout(this.#writing);
    clearTimeout(this.#retry);
  }

  /** Show what has come some times a second, however much it is. */
  #writeSoon() {
    if (this.#loaded === null) return;
    this.#writing ??= setTimeout(() => {
      this.#writing = null;
      if (this.#loaded !== null) this.#write(this.#pending.splice(0).filter(({ sequence }) => sequence > this.#loaded));
    }, WRITE_MS);
  }

  #write(lines) {
    const { element } = this;
    const isAtEnd = element.scrollTop + element.clientHeight >= element.scrollHeight - 20;
    if (lines.length && element.firstChild?.className === "note") element.replaceChildren();
    element.append(...lines.slice(-MAX_LINES).map(shown));
    while (element.childElementCount > MAX_LINES) element.firstChild.remove();
    if (!element.firstChild) element.append(note());
    if (isAtEnd) this.scrollToEnd();
  }
}

const note = () => h("span", { class: "note" }, "Nothing has been printed yet.");

function shown({ host, worker, stream, time, text }) {
  return h("span", { class: `line ${stream}` }, h("i", { title: moment(time) }, `${host} ${worker ?? "environment"} `), text, "\n");
}
