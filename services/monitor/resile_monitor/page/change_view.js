// One change of a job: what happened in one sentence, and its steps as a waterfall.

import { get } from "./api.js";
import { Panel, h, svg } from "./dom.js";
import { colour, duration, moment, preciseTime, withLocalTimes } from "./format.js";

const ROW = 20;
const NARROW = 560; // pixels: on less, each step has its name above its bar
const NARROW_ROW = 36;
const TOP = 26;
const SERVICES = ["monitor", "registry", "scheduler", "learner"];
const MAX_ROWS = 600;
const MESSAGES = /^(handle|answer|ask|publish) resile\./;

export class ChangeView {
  hasOwnStream = true; // none: it asks
  #live;
  #job;
  #trace;
  #change = null;
  #spans = null;
  #dropped = 0;
  #showsAll = false;
  #chosen = null;
  #head = new Panel(h("div", { class: "head" }), (shown) => head(shown));
  #waterfall = h("div", { class: "waterfall scroll", tabindex: "0", role: "region", "aria-label": "Steps of the change" });
  #details = new Panel(h("div", { class: "details", "aria-live": "polite" }), (span) => span && details(span));
  #all = h("input", { type: "checkbox", id: "all", onchange: () => this.#showAll() });
  #resized = new ResizeObserver(() => this.#draw());
  #timer = null;

  constructor(live, job, trace) {
    this.#live = live;
    this.#job = job;
    this.#trace = trace;
    this.title = `Change of ${job}`;
    this.element = h("div", {}, this.#head.element,
      h("section", { class: "card", "aria-labelledby": "steps" },
        h("div", { class: "row" }, h("h2", { id: "steps" }, "Steps"),
          h("label", { class: "check" }, this.#all, " Show all steps, with messages")),
        this.#waterfall, this.#details.element));
    this.#waterfall.append(h("p", { class: "empty" }, "Loading…"));
    this.#resized.observe(this.#waterfall);
    this.#load();
  }

  update() {}

  close() {
    this.#resized.disconnect();
    clearTimeout(this.#timer);
  }

  /** Steps of a change arrive for some seconds after it: ask again until it is over for a while. */
  async #load() {
    const [changes, trace] = await Promise.allSettled([
      get(`/v1/jobs/${encodeURIComponent(this.#job)}/changes`),
      get(`/v1/traces/${encodeURIComponent(this.#trace)}`),
    ]);
    const problem = [changes, trace].find(({ status, reason }) => status === "rejected" && reason.status !== 404)?.reason;
    if (changes.status === "fulfilled") this.#change = changes.value.changes.find((change) => change.trace === this.#trace) ?? null;
    if (trace.status === "fulfilled") {
      this.#spans = trace.value.spans;
      this.#dropped = trace.value.dropped;
    }
    this.#head.show({ job: this.#job, name: this.#live.job(this.#job)?.name ?? this.#job, change: this.#change, problem: problem?.message, isThere: changes.status === "fulfilled" });
    this.#draw();
    const newest = Math.max(0, ...(this.#spans ?? []).map((span) => span.begin + span.seconds));
    if (problem || !this.#spans || Date.now() / 1000 - newest < 30) this.#timer = setTimeout(() => this.#load(), 2000);
  }

  #showAll() {
    this.#showsAll = this.#all.checked;
    this.#draw();
  }

  #draw() {
    if (!this.#spans) {
      this.#waterfall.replaceChildren(h("p", { class: "empty" }, "The steps of this change are no longer kept: a monitor keeps the newest ones since its start. An OpenTelemetry collector keeps them longer."));
      return;
    }
    const rows = arranged(this.#spans, this.#job, this.#showsAll);
    const width = Math.max(this.#waterfall.clientWidth, 300);
    const choose = (span) => {
      this.#chosen = span;
      this.#details.show(span);
      for (const row of this.#waterfall.querySelectorAll(".step")) row.classList.toggle("chosen", row.dataset.id === span.id);
    };
    const focused = document.activeElement?.dataset?.id;
    this.#waterfall.replaceChildren(legend(rows), drawn(rows.slice(0, MAX_ROWS), width, choose, this.#chosen?.id),
      ...(rows.length > MAX_ROWS || this.#dropped ? [h("p", { class: "more" }, `${Math.max(0, rows.length - MAX_ROWS) + this.#dropped} more steps are not shown.`)] : []));
    if (focused) this.#waterfall.querySelector(`[data-id="${CSS.escape(focused)}"]`)?.focus();
  }
}

function head({ job, name, change, problem, isThere }) {
  return [
    h("p", {}, h("a", { href: `#/jobs/${encodeURIComponent(job)}` }, h("i", { class: `swatch ${colour(job)}` }), name), " ", h("small", {}, job)),
    h("h1", {}, change ? { start: "Start", resize: "Resize", recovery: "Recovery", pause: "Pause", checkpoint: "Checkpoint", end: "End", other: "Change" }[change.kind] : "Change"),
    change && h("p", { class: "summary" }, withLocalTimes(change.summary)),
    change && h("p", { class: "reason" }, [
      moment(change.time), change.seconds !== null && duration(change.seconds), change.kind !== "checkpoint" && `workers ${change.workers_before} → ${change.workers}`, `iteration ${change.iteration}`,
    ].filter(Boolean).join(" · ")),
    change?.url && h("p", {}, h("a", { href: change.url, rel: "noreferrer" }, "The whole trace in the collector")),
    !change && isThere && h("p", { class: "empty" }, "This job's history has no such change."),
    problem && h("p", { class: "error" }, problem),
  ];
}

/**
 * The steps in the order of the tree, with their depth. Without `showsAll` messages are left out, what they led to moves
 * up; so are steps of other jobs, and of iterations all but the last before the change and the first after it.
 */
function arranged(spans, job, showsAll) {
  const byId = new Map(spans.map((span) => [span.id, span]));
  const isShown = (span) => showsAll || !(MESSAGES.test(span.name) || isOfOther(span, job) || span.name === "carry out" || span.isFar);
  if (!showsAll) markFar(spans);
  const parentOf = (span) => {
    if (span.name === "attack") return null; // it came before everything else
    let parent = byId.get(span.parent);
    while (parent && !isShown(parent)) parent = byId.get(parent.parent);
    return parent?.id ?? null;
  };
  const children = new Map();
  for (const span of spans.filter(isShown)) {
    const parent = parentOf(span);
    children.set(parent, [...(children.get(parent) ?? []), span]);
  }
  const rows = [];
  const add = (parent, depth) => {
    for (const span of (children.get(parent) ?? []).sort((a, b) => a.begin - b.begin)) {
      rows.push({ span, depth });
      add(span.id, depth + 1);
    }
  };
  add(null, 0);
  return rows;
}

const isOfOther = (span, job) => span.attributes["resile.job"] && span.attributes["resile.job"] !== job;

/** Mark the iterations, and what is in them, that are not next to the change. */
function markFar(spans) {
  const switched = new Map();
  for (const span of spans.filter(({ name }) => ["switch generation", "recover", "load state"].includes(name))) switched.set(worker(span), span.begin);
  const kept = new Set();
  const ofWorkers = Map.groupBy(spans.filter(({ name }) => name === "iteration"), worker);
  for (const [key, iterations] of ofWorkers) {
    const sorted = iterations.sort((a, b) => a.begin - b.begin);
    const at = switched.get(key) ?? -Infinity;
    const before = sorted.filter((span) => span.begin < at).at(-1);
    const after = sorted.find((span) => span.begin >= at);
    for (const span of [before, after]) if (span) kept.add(span.id);
  }
  for (const span of spans) {
    const iteration = span.name === "iteration" ? span.id : span.name === "exchange" ? span.parent : null;
    span.isFar = iteration !== null && ofWorkers.has(worker(span)) && !kept.has(iteration) && spans.some(({ id, name }) => id === iteration && name === "iteration");
  }
}

const worker = ({ attributes }) => `${attributes["resile.job"]}/${attributes["resile.worker"]}`;

/** What a step is about, in a few words. */
function about({ attributes, service }) {
  if (attributes["resile.attack"]) return attributes["resile.attack"];
  const parts = [
    attributes["resile.worker"] !== undefined && `worker ${attributes["resile.worker"]}`,
    attributes["resile.host"],
  ].filter((part) => part !== false && part !== undefined);
  return parts.length ? parts.join(" ") : service;
}

function legend(rows) {
  const isThere = (kind) => rows.some(({ span }) => kindOf(span) === kind);
  return h("ul", { class: "legend" }, [...SERVICES, "attack"].filter(isThere).map((kind) => h("li", {}, h("i", { class: `swatch ${kind}` }), kind)));
}

function drawn(rows, width, choose, chosen) {
  const begin = Math.min(...rows.map(({ span }) => span.begin));
  const end = Math.max(...rows.map(({ span }) => span.begin + span.seconds), begin + 0.001);
  const isNarrow = width < NARROW;
  const row = isNarrow ? NARROW_ROW : ROW;
  const height = TOP + rows.length * row + 4;
  const names = isNarrow ? 16 : Math.max(230, Math.min(420, width / 3));
  const x = (at) => names + ((at - begin) / (end - begin)) * (width - names - 70);
  const ticks = ticksOf(end - begin, (width - names) / 90).map((at) => svg("g", { class: "grid", "aria-hidden": "true" },
    svg("line", { x1: x(begin + at), x2: x(begin + at), y1: TOP - 6, y2: height }),
    svg("text", { x: x(begin + at), y: 12, "text-anchor": "middle" }, duration(at))));
  const steps = rows.map(({ span, depth }, n) => step(span, { x, room: isNarrow ? width : names, y: TOP + n * row, row, depth, choose, isChosen: span.id === chosen }));
  const label = `${rows.length} steps in ${duration(end - begin)}`;
  const made = svg("svg", { role: "list", "aria-label": label, viewBox: `0 0 ${width} ${height}`, width, height }, ticks, steps);
  made.addEventListener("keydown", (event) => {
    const next = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const all = [...made.querySelectorAll(".step")];
    const to = all[all.indexOf(document.activeElement) + next];
    if (!next || !to) return;
    event.preventDefault();
    for (const each of all) each.setAttribute("tabindex", each === to ? "0" : "-1");
    to.focus();
  });
  made.querySelector(".step")?.setAttribute("tabindex", "0");
  return made;
}

function step(span, { x, room, y, row, depth, choose, isChosen }) {
  const from = x(span.begin);
  const wide = Math.max(2, x(span.begin + span.seconds) - from);
  const indent = Math.min(depth, 10) * 8;
  const number = span.attributes["resile.iteration"];
  const text = `${nameOf(span)}${number === undefined ? "" : ` ${number}`} · ${about(span)}${isAbandoned(span) ? " · abandoned" : ""}`;
  const most = Math.floor((room - indent - 8) / 5.9); // characters
  const bar = y + row - ROW; // where its line begins
  return svg("g", {
    class: `step ${kindOf(span)}${span.error ? " failed" : ""}${isAbandoned(span) ? " abandoned" : ""}${isChosen ? " chosen" : ""}`, role: "listitem", tabindex: "-1", "data-id": span.id,
    "aria-label": `${text}: ${duration(span.seconds)}, from ${preciseTime(span.begin * 1000)}`,
    onclick: () => choose(span), onfocus: () => choose(span),
  },
    svg("rect", { class: "row", x: 0, y, width: "100%", height: row }),
    svg("text", { class: "name", x: indent + 4, y: y + 14 }, text.length > most ? `${text.slice(0, most - 1)}…` : text),
    svg("rect", { class: "bar", x: from, y: bar + 4, width: wide, height: ROW - 8, rx: 2 }),
    svg("text", { class: "time", x: from + wide + 4, y: bar + 14 }, duration(span.seconds)),
    svg("title", {}, text));
}

const kindOf = (span) => (span.name === "attack" ? "attack" : span.service);

/** The name of a step; that of a decision names an event in words. */
const nameOf = ({ name }) => name.replace(/^(decide upon) ([A-Z]\w+)$/, (_, what, event) => `${what} ${event.replace(/\B[A-Z]/g, " $&").toLowerCase()}`);

const isAbandoned = (span) => Boolean(span.attributes["resile.abandoned"]);

const STEPS = [10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400]; // seconds

function ticksOf(seconds, wanted) {
  const power = 10 ** Math.floor(Math.log10(seconds / Math.max(wanted, 1)));
  const steps = power < 10 ? [1, 2, 5, 10].map((m) => m * power) : STEPS;
  const step = steps.find((s) => seconds / s <= wanted) ?? seconds;
  const found = [];
  for (let n = 0; n * step <= seconds; n += 1) found.push(n * step);
  return found;
}

function details(span) {
  const fact = (name, value) => [h("dt", {}, name), h("dd", {}, String(value))];
  return [
    h("h3", {}, nameOf(span)),
    span.error && h("p", { class: "error" }, span.error),
    h("dl", { class: "facts" },
      fact("service", span.service), fact("began", preciseTime(span.begin * 1000)), fact("took", duration(span.seconds)),
      Object.entries(span.attributes).map(([name, value]) => fact(name.replace(/^resile\./, ""), value)),
      span.events.map((event) => fact(preciseTime(event.time / 1000), `${event.name} ${event.attributes["exception.message"] ?? ""}`))),
  ];
}
