// Who has what share of the slots, and why; what waiting jobs wait for; tenants, and the policy that decides.

import { isFinal, policyButton } from "./actions.js";
import { get } from "./api.js";
import { Panel, h } from "./dom.js";
import { colour, count, duration } from "./format.js";

const REFRESH_MS = 5000;

export class SchedulerView {
  title = "Scheduler";
  #live;
  #tenants = [];
  #policy = new Panel(h("section", { class: "card", "aria-labelledby": "policy-now" }), (policy) => policyCard(policy, this.#live));
  #shares = new Panel(scroll("Shares of the slots"), shareTable);
  #waiting = new Panel(scroll("Waiting jobs"), waitingTable);
  #tenantTable = new Panel(scroll("Tenants"), tenantTable);
  #timer = null;

  constructor(live) {
    this.#live = live;
    const card = (id, title, panel) => h("section", { class: "card", "aria-labelledby": id }, h("h2", { id }, title), panel.element);
    this.element = h("div", {}, h("h1", { class: "hidden" }, "Scheduler"), this.#policy.element,
      card("shares", "Jobs with slots", this.#shares), card("waiting", "Waiting jobs", this.#waiting), card("tenants", "Tenants", this.#tenantTable));
    this.#load();
    this.#timer = setInterval(() => this.#load(), REFRESH_MS);
  }

  update() {
    const { jobs, hosts, policy } = this.#live;
    const numSlots = hosts.filter((host) => host.state === "up" || host.state === "draining").flatMap((host) => host.slots).length;
    const active = jobs.filter((job) => !isFinal(job));
    const facts = ({ id, name, tenant, state, priority, min_workers, max_workers, workers, reason }) => ({ id, name, tenant, state, priority, min_workers, max_workers, workers, reason });
    const holds = active.filter((job) => job.workers || !isWaiting(job));
    const sum = (list, of) => list.reduce((total, job) => total + of(job), 0);
    this.#policy.show(policy);
    this.#shares.show({ jobs: holds.map(facts), numSlots, idle: Math.max(0, numSlots - sum(holds, (job) => job.workers)), priorities: sum(holds, (job) => job.priority) });
    this.#waiting.show(active.filter(isWaiting).map((job) => ({ ...facts(job), since: duration(Math.max(0, (Date.now() - Date.parse(job.submitted)) / 1000)) })));
    this.#tenantTable.show(this.#tenants);
  }

  close() {
    clearInterval(this.#timer);
  }

  async #load() {
    try {
      this.#tenants = (await get("/v1/tenants")).tenants;
      if (this.#live.jobs) this.update();
    } catch {
      // The connection is shown above; the next answer comes by itself.
    }
  }
}

const isWaiting = ({ state, workers }) => !workers && ["accepted", "queued", "paused"].includes(state);

const scroll = (label) => h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label });

function policyCard(policy, live) {
  return [
    h("div", { class: "row" }, h("h2", { id: "policy-now" }, `Policy: ${policy.policy}`), policyButton(policy, live)),
    h("p", { class: "sentence" }, `${policy.policies[policy.policy]}.`),
    h("p", { class: "reason" }, policy.preemption ? "Jobs may lose slots to others, at an iteration boundary." : "Jobs keep the slots that they have until they end."),
  ];
}

function table(kind, heads, rows) {
  return h("table", { class: kind }, h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))), h("tbody", {}, rows));
}

const cell = (label, ...content) => h("td", { "data-label": label }, content);

const named = (job) => h("th", { scope: "row" }, h("i", { class: `swatch ${colour(job.id)}` }), h("a", { href: `#/jobs/${job.id}`, "data-key": job.id }, job.name), h("small", {}, job.id));

const canUse = (job) => (job.max_workers < 10000 ? `${job.min_workers} to ${job.max_workers}` : `${job.min_workers} or more`);

const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");

function shareTable({ jobs, numSlots, idle, priorities }) {
  if (!jobs.length) return h("p", { class: "empty" }, `No job has slots now. ${count(numSlots, "slot")} idle.`);
  const rows = [...jobs].sort((a, b) => b.workers - a.workers).map((job) => h("tr", {}, named(job),
    cell("Slots", h("meter", { min: 0, max: Math.max(numSlots, 1), value: job.workers, "aria-label": `slots of ${job.name}` }), h("small", {}, `${job.workers} of ${numSlots}, ${percent(job.workers, numSlots)}`)),
    cell("Can use", canUse(job)),
    cell("Priority", `${job.priority}`, h("small", {}, `${percent(job.priority, priorities)} of the sum`)),
    cell("Tenant", job.tenant),
    h("td", { class: "reason", "data-label": "Why" }, job.reason)));
  return [table("jobs", ["Job", "Slots", "Can use", "Priority", "Tenant", "Why"], rows),
    h("p", { class: "more" }, idle ? `${count(idle, "slot")} idle.` : "No slot is idle.")];
}

function waitingTable(jobs) {
  if (!jobs.length) return h("p", { class: "empty" }, "No job is waiting.");
  return table("jobs", ["Job", "State", "Submitted", "Can use", "Priority", "Why"], jobs.map((job) => h("tr", {}, named(job),
    cell("State", h("span", { class: `badge ${job.state}` }, job.state)), cell("Submitted", `${job.since} ago`),
    cell("Can use", canUse(job)), cell("Priority", job.priority),
    h("td", { class: "reason", "data-label": "Why" }, job.state === "paused" ? `paused until it is resumed${job.reason ? ` — ${job.reason}` : ""}` : job.reason))));
}

function tenantTable(tenants) {
  if (!tenants.length) return h("p", { class: "empty" }, "No tenant has jobs, and none is configured.");
  return table("", ["Tenant", "Weight", "Quota", "Cap", "Jobs", "Workers"], tenants.map((tenant) => h("tr", {},
    h("th", { scope: "row" }, tenant.id), h("td", {}, tenant.weight, !tenant.is_configured && h("small", {}, "default")),
    h("td", {}, tenant.quota ? count(tenant.quota, "slot") : "none"), h("td", {}, tenant.cap ? count(tenant.cap, "slot") : "none"), h("td", {}, tenant.jobs), h("td", {}, tenant.workers))));
}
