// The pool at a glance: who has how many slots over time, what is on each slot, who waits and why, what happens.

import { drainButton, undrainButton, isFinal, policyButton } from "./actions.js";
import { Panel, h } from "./dom.js";
import { colour, count, describe, duration, number, timeOrDay, when, workersOf } from "./format.js";
import { SlotHistory } from "./slots.js";
import { stackedSteps } from "./stacked.js";

const RANGES = { "5 min": 300, "30 min": 1800, "3 h": 10800, "24 h": 86400 };
const NUM_EVENTS = 60;
const NUM_ENDED = 20;
const NUM_NAMED = 12;
const KEY = [["submitted", "●", "job submitted, host joined"], ["priority", "◆", "priority or policy changed"], ["lost", "▼", "host lost"], ["limit", "╌", "slots of the pool"]];

export class PoolView {
  title = "Pool";
  #live;
  #history;
  #range = "30 min";
  #pointer = {};
  #chart = h("div", { class: "canvas" });
  #summary = new Panel(h("dl", { class: "tiles" }), (data) => tiles(data, this.#live));
  #legend = new Panel(h("ul", { class: "legend" }), legend);
  #hosts = new Panel(h("div", { class: "hosts" }), (hosts) => hostCards(hosts, this.#live));
  #jobs = new Panel(h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Jobs" }), jobTable);
  #events = new Panel(h("ol", { class: "feed", tabindex: "0", "aria-label": "Events" }), feed);
  #resized = new ResizeObserver(() => this.#draw());

  constructor(live) {
    this.#live = live;
    this.#history = new SlotHistory(live);
    const ranges = Object.keys(RANGES).map((name) =>
      h("label", {}, h("input", { type: "radio", name: "range", checked: name === this.#range, onchange: () => {
        this.#range = name;
        this.#draw();
      } }), name));
    this.element = h("div", {},
      h("h1", { class: "hidden" }, "Pool"),
      this.#summary.element,
      h("section", { class: "card", "aria-labelledby": "slots" },
        h("div", { class: "row" }, h("h2", { id: "slots" }, "Slots of each job"), h("fieldset", { class: "ranges" }, h("legend", { class: "hidden" }, "Time shown"), ranges)),
        this.#chart, h("ul", { class: "key" }, KEY.map(([kind, symbol, text]) => h("li", { class: kind }, h("i", {}, symbol), text))), this.#legend.element),
      h("section", { class: "card", "aria-labelledby": "jobs" }, h("h2", { id: "jobs" }, "Jobs"), this.#jobs.element),
      h("div", { class: "columns" },
        h("section", { class: "card", "aria-labelledby": "hosts" }, h("h2", { id: "hosts" }, "Hosts"), this.#hosts.element),
        h("section", { class: "card", "aria-labelledby": "events" }, h("h2", { id: "events" }, "Events"), this.#events.element)));
    this.#resized.observe(this.#chart);
  }

  update() {
    const { jobs, hosts, policy, events } = this.#live;
    const ended = jobs.filter(isFinal);
    this.#summary.show({ jobs: jobs.map(({ state, workers }) => ({ state, workers })), hosts, policy });
    this.#jobs.show({ active: jobs.filter((job) => !isFinal(job)), ended: ended.slice(-NUM_ENDED).reverse(), numEnded: ended.length });
    this.#hosts.show(hosts.filter((host) => host.state !== "left"));
    this.#events.show(events.filter(({ subject }) => !subject.endsWith(".hello")).slice(-NUM_EVENTS).reverse());
    this.#draw();
  }

  close() {
    this.#resized.disconnect();
  }

  async #draw() {
    this.#drawNow();
    if (await this.#history.load(RANGES[this.#range])) this.#drawNow();
  }

  #drawNow() {
    const width = this.#chart.clientWidth;
    if (!this.#live.jobs || !width) return;
    const end = Date.now();
    const begin = Math.max(end - RANGES[this.#range] * 1000, Math.min(this.#history.oldest, end - 60000));
    const shown = this.#history.shown(begin, end);
    this.#chart.replaceChildren(stackedSteps({ ...shown, begin, end, width, pointer: this.#pointer }));
    this.#legend.show(shown.jobs.map(({ id, name, className, steps }) => ({ id, name, className, now: steps.at(-1)[1] })));
  }
}

const isUp = (host) => host.state === "up" || host.state === "draining";

function tiles({ jobs, hosts, policy }, live) {
  const slots = hosts.filter(isUp).flatMap((host) => host.slots);
  const used = slots.filter((slot) => slot.job).length;
  const num = (...states) => jobs.filter(({ state }) => states.includes(state)).length;
  const lost = hosts.filter((host) => host.state === "lost").length;
  const tile = (name, value, more, action) => h("div", { class: "tile" }, h("dt", {}, name), h("dd", {}, h("strong", {}, value), more && h("span", {}, more), action));
  return [
    tile("Slots in use", `${used} of ${slots.length}`, slots.length - used ? `${slots.length - used} idle` : slots.length ? "none idle" : "no host has joined"),
    tile("Hosts", `${hosts.filter(isUp).length} up`, lost ? `${lost} lost` : ""),
    tile("Training", `${num("starting", "running", "rescaling", "recovering")}`, `${num("accepted", "queued")} waiting, ${num("paused")} paused`),
    tile("Ended", `${num("completed")} completed`, num("failed") ? `${num("failed")} failed` : ""),
    tile("Policy", policy.policy, policy.preemption ? "with preemption" : "without preemption", policyButton(policy, live)),
  ];
}

/** The jobs that hold the most, in the order of the chart; with few jobs those too that hold none now. */
function legend(jobs) {
  const named = new Set((jobs.length > NUM_NAMED ? jobs.toSorted((a, b) => b.now - a.now).slice(0, NUM_NAMED) : jobs).map(({ id }) => id));
  const others = jobs.filter(({ id, now }) => now && !named.has(id));
  return [
    jobs.filter(({ id }) => named.has(id)).map(({ id, name, className, now }) =>
      h("li", {}, h("i", { class: `swatch ${className}` }), h("a", { href: `#/jobs/${id}`, "data-key": `legend-${id}` }, name), ` ${now}`)),
    others.length > 0 && h("li", { class: "more" }, `${count(others.length, "other job")} ${others.reduce((sum, { now }) => sum + now, 0)}`),
  ];
}

function hostCards(hosts, live) {
  if (!hosts.length) return h("p", { class: "empty" }, "No host has joined yet. Start one with ", h("code", {}, "resile host --join URL"), ".");
  return hosts.map((host) => h("article", { class: `host ${host.state}` },
    h("h3", {}, host.id, " ", h("span", { class: `badge ${host.state}` }, host.state), host.state === "up" && drainButton(host, live), host.state === "draining" && undrainButton(host, live)),
    host.state !== "up" && host.reason && h("p", { class: "reason" }, host.reason),
    h("ul", { class: "slots" }, host.slots.map((slot) => slotSquare(slot)))));
}

function slotSquare(slot) {
  const index = slot.name.split("/").at(-1);
  const text = slot.job ? `${slot.name} ${slot.device}: ${slot.job}, worker ${slot.worker ?? "?"} ${slot.worker_state ?? ""}` : `${slot.name} ${slot.device}: idle`;
  const content = slot.job ? h("a", { href: `#/jobs/${slot.job}`, "aria-label": text, "data-key": slot.name }, index) : h("span", { "aria-label": text, role: "img" }, index);
  return h("li", { class: slot.job ? `${colour(slot.job)} ${slot.worker_state ?? ""}` : "idle", title: text }, content);
}

function jobTable({ active, ended, numEnded }) {
  if (!active.length && !ended.length) {
    return h("p", { class: "empty" }, "No job has been submitted yet. ", h("a", { href: "#/submit" }, "Submit one"), " or run ", h("code", {}, "resile submit train.py"), ".");
  }
  const heads = ["Job", "State", "Workers", "Progress", "Loss", "Speed", "Time left", "Priority", "Why"];
  return [
    h("table", { class: "jobs" },
      h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))),
      h("tbody", {}, active.map(jobRow)),
      ended.length > 0 && h("tbody", { class: "ended" }, ended.map(jobRow))),
    numEnded > ended.length && h("p", { class: "more" }, `${count(numEnded - ended.length, "older job")} not shown: resile jobs lists all.`),
  ];
}

function jobRow(job) {
  const cell = (label, ...content) => h("td", { "data-label": label }, content);
  const total = job.iterations_total;
  return h("tr", {},
    h("th", { scope: "row" }, h("i", { class: `swatch ${colour(job.id)}` }), h("a", { href: `#/jobs/${job.id}`, "data-key": job.id }, job.name), h("small", {}, job.id)),
    cell("State", h("span", { class: `badge ${job.state}` }, job.state)),
    cell("Workers", workersOf(job)),
    cell("Progress", total ? h("progress", { max: total, value: job.iteration, "aria-label": `progress of ${job.name}` }) : null, total ? h("small", {}, `${job.iteration} of ${total}`) : job.iteration || "–"),
    cell("Loss", number(job.loss)),
    cell("Speed", job.workers && job.iteration_seconds ? `${number(1 / job.iteration_seconds)} it/s` : "–"),
    cell("Time left", duration(job.seconds_left)),
    cell("Priority", String(job.priority)),
    h("td", { class: "reason", "data-label": "Why" }, job.reason));
}

function feed(events) {
  if (!events.length) return h("li", { class: "empty" }, "Nothing has happened yet.");
  return events.map((event) => {
    const { job, about, what, reason } = describe(event);
    return h("li", {}, h("time", { datetime: when(event) }, timeOrDay(when(event))), " ",
      job ? h("a", { href: `#/jobs/${job}` }, about) : h("b", {}, about), ` ${what}`, reason && h("span", { class: "reason" }, ` — ${reason}`));
  });
}
