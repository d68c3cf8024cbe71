// One job: what it does and why, its curves, its history, its log; if it failed, the traceback first.

import { isFinal, jobActions } from "./actions.js";
import { follow, get } from "./api.js";
import { lines } from "./charts.js";
import { codeOf } from "./code.js";
import { Panel, h } from "./dom.js";
import { colour, count, duration, moment, number, timeOrDay, workersOf } from "./format.js";
import { Log } from "./log.js";
import { stackedSteps } from "./stacked.js";

const MAX_REPORTS = 500;
const OVERLAP = 50; // events before the connection, which the monitor may not have in its curves yet
const END_MS = 10000; // after the end of a job, for its last lines
const NUM_ITEMS = 100;

export class JobView {
  hasOwnStream = true;
  #live;
  #id;
  #job = null;
  #changes = [];
  #isStale = true;
  #stored = null;
  #reports = [];
  #generation = 0;
  #unfollow;
  #ending = null;
  #head = new Panel(h("div", { class: "head" }), (job) => head(job, this.#live));
  #now = new Panel(h("dl", { class: "tiles" }), now);
  #failure = new Panel(h("div", {}), failure);
  #history = new Panel(h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "History" }), historyTable);
  #facts = new Panel(h("dl", { class: "facts" }), facts);
  #ledger = new Panel(h("div", {}), ledger);
  #code = new Panel(h("div", {}), ({ id, script }) => codeOf(id, script));
  #curves = h("div", { class: "curves" });
  #log;
  #resized = new ResizeObserver(() => this.#draw());
  #drawing = null;
  #missing;
  #content;

  constructor(live, id) {
    this.#live = live;
    this.#id = id;
    this.title = id;
    this.#log = new Log(id);
    this.#missing = h("p", { class: "empty" }, `There is no job ${id} in this pool. `, h("a", { href: "#/" }, "All jobs"));
    this.#content = h("div", {}, this.#head.element, this.#failure.element, this.#now.element,
      h("section", { class: "card", "aria-labelledby": "curves" }, h("h2", { id: "curves" }, "Curves"), this.#curves),
      h("section", { class: "card", "aria-labelledby": "log" }, h("h2", { id: "log" }, "Log"), this.#log.element),
      h("section", { class: "card", "aria-labelledby": "history" }, h("h2", { id: "history" }, "History"), this.#history.element),
      h("section", { class: "card", "aria-labelledby": "facts" }, h("h2", { id: "facts" }, "Submission and result"), this.#facts.element, this.#ledger.element, this.#code.element));
    this.element = h("div", {}, h("p", { class: "empty" }, "Loading…"));
    this.#resized.observe(this.#curves);
    this.#follow();
  }

  async update() {
    const summary = this.#live.job(this.#id);
    const shown = summary ? this.#content : this.#missing;
    if (this.element.firstChild !== shown) {
      this.element.replaceChildren(shown);
      this.#log.scrollToEnd();
    }
    if (!summary) return;
    this.title = summary.name;
    this.#show({ ...this.#job, ...summary });
    if (isFinal(summary)) this.#ending ??= setTimeout(() => this.#end(), END_MS);
    if (this.#isStale || (this.#job && summary.state !== this.#job.state)) await this.#load();
  }

  close() {
    this.#resized.disconnect();
    this.#log.close();
    this.#unfollow();
    clearTimeout(this.#ending);
    clearTimeout(this.#drawing);
  }

  async #load() {
    this.#isStale = false;
    try {
      this.#job = await get(`/v1/jobs/${encodeURIComponent(this.#id)}`);
      this.#show(this.#job);
      this.#draw();
      this.#changes = (await get(`/v1/jobs/${encodeURIComponent(this.#id)}/changes`)).changes;
      this.#show(this.#job);
    } catch {
      this.#isStale = true;
    }
  }

  #show(job) {
    this.#head.show(pick(job, "id", "name", "state", "reason", "priority", "has_model"));
    this.#now.show(pick(job, "workers", "max_workers", "iteration", "iterations_total", "epoch", "epochs", "loss", "iteration_seconds", "seconds_left", "samples_seen", "metrics", "validation"));
    if (!this.#job) return;
    this.#failure.show(pick(job, "state", "reason", "details", "warnings"));
    this.#history.show({ ...pick(job, "id", "history", "history_length"), changes: this.#changes });
    this.#facts.show(pick(job, "id", "script", "args", "min_workers", "max_workers", "priority", "tenant", "settings", "submitted", "bits", "params_sha256", "checkpoint", "exchange_path"));
    this.#ledger.show(pick(job, "ledger"));
    this.#code.show(pick(job, "id", "script"));
  }

  #follow() {
    const path = `/v1/events?job=${encodeURIComponent(this.#id)}&logs=1&follow=1&tail=${OVERLAP}`;
    this.#unfollow = follow(path, {
      onOpen: () => this.#reload(),
      onEvent: (event) => this.#add(event),
      isOver: () => Boolean(this.#job) && isFinal(this.#job),
    });
  }

  #reload() {
    this.#isStale = true;
    this.#loadCurves();
    this.#log.load();
  }

  /** Nothing more comes; a page that was not seen at the end has not followed it. */
  #end() {
    this.#unfollow();
    if (document.hidden) this.#reload();
  }

  #add(event) {
    if (event.stream === "logs") {
      this.#log.add(event);
    } else if (event.stream === "progress") {
      this.#reports.push({ ...event.data.content, time: Date.parse(event.data.time) });
      if (this.#reports.length > MAX_REPORTS || event.data.generation > this.#generation) this.#loadCurves();
      this.#generation = event.data.generation;
      this.#drawSoon();
    } else {
      this.#isStale = true;
      this.#live.refresh();
    }
  }

  /** Ask for the curves so far; what is reported meanwhile, or after, is drawn behind them. */
  async #loadCurves() {
    const reports = this.#reports.splice(0);
    try {
      this.#stored = await get(`/v1/jobs/${encodeURIComponent(this.#id)}/curves`);
      this.#drawSoon();
    } catch {
      this.#reports.unshift(...reports.slice(-MAX_REPORTS));
    }
  }

  #drawSoon() {
    this.#drawing ??= setTimeout(() => this.#draw(), 500);
  }

  #draw() {
    clearTimeout(this.#drawing);
    this.#drawing = null;
    const width = parseFloat(getComputedStyle(this.#curves).gridTemplateColumns); // of the first column, in pixels
    if (!this.#curves.clientWidth || !width) return;
    const charts = curves(this.#stored, this.#reports).map((series) => lines({ series, width }));
    if (this.#job?.history.some((item) => item.workers)) charts.push(workersOverTime(this.#job, width));
    const nothing = this.#job && isFinal(this.#job) ? "It ended before it reported anything." : "Nothing has been reported yet.";
    this.#curves.replaceChildren(...(charts.length ? charts : [h("p", { class: "empty" }, nothing)]));
  }
}

const pick = (object, ...names) => Object.fromEntries(names.map((name) => [name, object[name]]));

function head(job, live) {
  return [
    h("div", { class: "row" },
      h("h1", {}, h("i", { class: `swatch ${colour(job.id)}` }), job.name, " ", h("small", {}, job.id), " ", h("span", { class: `badge ${job.state}` }, job.state)),
      h("p", { class: "buttons" }, jobActions(job, live))),
    job.state !== "failed" && job.reason && h("p", { class: "reason" }, job.reason),
  ];
}

function now(job) {
  const tile = (name, value, more) => h("div", { class: "tile" }, h("dt", {}, name), h("dd", {}, h("strong", {}, value), more && h("span", {}, more)));
  const scores = Object.entries({ ...job.metrics, ...Object.fromEntries(Object.entries(job.validation).map(([name, value]) => [`validation ${name}`, value])) });
  return [
    tile("Workers", workersOf(job)),
    tile("Iteration", job.iteration, job.iterations_total ? `of ${job.iterations_total}` : ""),
    tile("Epoch", job.epoch, job.epochs ? `of ${job.epochs}` : ""),
    tile("Loss", number(job.loss), scores.map(([name, value]) => `${name} ${number(value)}`).join(", ")),
    tile("Iteration time", job.workers ? duration(job.iteration_seconds) : "–"),
    tile("Time left", duration(job.seconds_left)),
  ];
}

function failure({ state, reason, details, warnings }) {
  return [
    state === "failed" && h("section", { class: "card failure", "aria-labelledby": "failure" },
      h("h2", { id: "failure" }, "Why it failed"), h("p", {}, reason), details && h("pre", {}, details)),
    warnings?.length > 0 && h("section", { class: "card warning", "aria-labelledby": "warnings" },
      h("h2", { id: "warnings" }, "Warnings"), h("ul", {}, warnings.map((warning) => h("li", {}, warning)))),
  ];
}

/** The scores of a report that ends an epoch: the others repeat them. */
function scores({ validation, ends_epoch }) {
  return Object.fromEntries(ends_epoch ? Object.entries(validation ?? {}).map(([name, value]) => [`validation ${name}`, value]) : []);
}

/** Loss first, then each metric and each score, then the speed, by iteration. A job that went back draws over what it lost. */
function curves(stored, reports) {
  const found = new Map([["loss", new Map()]]);
  const add = (iteration, values) => {
    for (const [name, value] of Object.entries(values)) {
      if (value === null || value === undefined) continue;
      if (!found.has(name)) found.set(name, new Map());
      found.get(name).set(iteration, value);
    }
  };
  const speeds = new Map();
  let last = null;
  if (stored) {
    const { training, validation } = stored;
    rows(training).forEach(([iteration, values], n) => {
      add(iteration, values);
      if (training.iterations_per_second[n] !== null) speeds.set(iteration, training.iterations_per_second[n]);
    });
    for (const [iteration, values] of rows(validation)) add(iteration, Object.fromEntries(Object.entries(values).map(([name, value]) => [`validation ${name}`, value])));
    last = training.iterations.length ? { iteration: training.iterations.at(-1), time: training.times.at(-1) } : null;
  }
  for (const report of reports) {
    add(report.iteration, { loss: report.loss, ...report.metrics, ...scores(report) });
    last ??= report;
    if (report.iteration <= last.iteration || report.time - last.time < 1000) continue;
    speeds.set(report.iteration, (1000 * (report.iteration - last.iteration)) / (report.time - last.time));
    last = report;
  }
  found.set("iterations per second", speeds);
  return [...found].filter(([, values]) => values.size)
    .map(([label, values], n) => [{ label, className: `c${n % 10}`, points: [...values].sort(([a], [b]) => a - b) }]);
}

/** What a table of the API holds, by iteration. */
const rows = ({ iterations, values }) => iterations.map((iteration, n) => [iteration, Object.fromEntries(Object.entries(values).map(([name, column]) => [name, column[n]]))]);

function workersOverTime(job, width) {
  const steps = job.history.map((item) => [Date.parse(item.time), ["queued", "paused", "completed", "failed", "stopped"].includes(item.kind) ? 0 : item.workers]);
  const begin = steps[0][0];
  const end = isFinal(job) ? steps.at(-1)[0] : Date.now();
  const marks = job.history.filter((item) => item.kind !== "allocation").map((item) => ({ time: Date.parse(item.time), kind: item.kind, name: job.name, text: item.reason }));
  return stackedSteps({
    jobs: [{ id: job.id, name: job.name, className: colour(job.id), steps }],
    begin, end: Math.max(end, begin + 1000), marks, width, height: 180, hint: "workers over time",
  });
}

function historyTable({ id, history, history_length, changes }) {
  if (!history.length) return h("p", { class: "empty" }, "Nothing has happened yet.");
  const items = history.slice(-NUM_ITEMS).reverse();
  const traces = new Map(changes.filter(({ trace }) => trace).flatMap((change) => change.items.map((number) => [number, change])));
  const linked = (item, text) => {
    const change = traces.get(item.number);
    return change ? h("a", { href: `#/jobs/${encodeURIComponent(id)}/changes/${change.trace}`, "data-key": `change-${item.number}`, title: "Show the steps of this change" }, text) : text;
  };
  const checkpoints = changes.filter(({ kind }) => kind === "checkpoint").slice(-20).reverse();
  return [
    h("table", { class: "jobs" },
      h("thead", {}, h("tr", {}, ["#", "Time", "What", "Workers", "Iteration", "Why"].map((head) => h("th", { scope: "col" }, head)))),
      h("tbody", {}, items.map((item) => h("tr", {},
        h("th", { scope: "row" }, item.number), h("td", { "data-label": "Time" }, h("time", { datetime: item.time, title: moment(item.time) }, timeOrDay(item.time))),
        h("td", { "data-label": "What" }, linked(item, item.kind)), h("td", { "data-label": "Workers", title: item.slots.join(", ") }, item.workers), h("td", { "data-label": "Iteration" }, item.iteration), h("td", { class: "reason" }, item.reason))))),
    checkpoints.length > 0 && h("p", { class: "more" }, "Checkpoints: ", checkpoints.map((change, n) => [n > 0 && ", ",
      h("a", { href: `#/jobs/${encodeURIComponent(id)}/changes/${change.trace}`, "data-key": change.trace }, `iteration ${change.iteration}`), ` (${duration(change.seconds)})`])),
    history_length > items.length && h("p", { class: "more" }, `${count(history_length - items.length, "older item")} not shown.`),
  ];
}

function facts(job) {
  const fact = (name, value) => value !== "" && value !== null && value !== undefined && [h("dt", {}, name), h("dd", {}, value)];
  return [
    fact("Script", h("code", {}, [job.script, ...job.args].join(" "))),
    fact("Minimum workers", job.min_workers),
    fact("Submitted", moment(job.submitted)),
    fact("Tenant", job.tenant),
    Object.entries(job.settings).map(([name, value]) => fact(name[0].toUpperCase() + name.slice(1), value)),
    fact("Latest checkpoint", job.checkpoint === null ? "" : `iteration ${job.checkpoint}`),
    fact("Exchange", job.exchange_path),
    fact("Reproducibility", job.bits ?? ""),
    fact("sha256 of parameters", job.params_sha256 && h("code", {}, job.params_sha256)),
  ];
}

function ledger({ ledger: epochs }) {
  if (!epochs?.length) return null;
  const isExact = epochs.every((epoch) => epoch.once === epoch.samples);
  return h("details", {}, h("summary", {}, isExact ? "Every sample was used once in each epoch" : "Not every sample was used once in each epoch"),
    h("table", {},
      h("thead", {}, h("tr", {}, ["Epoch", "Samples", "Once", "More often", "Never"].map((head) => h("th", { scope: "col" }, head)))),
      h("tbody", {}, epochs.slice(0, 1000).map((epoch) => h("tr", {}, h("th", { scope: "row" }, epoch.epoch), [epoch.samples, epoch.once, epoch.more, epoch.never].map((n) => h("td", {}, n)))))));
}
