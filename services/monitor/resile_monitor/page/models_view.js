// The models of jobs whose training has ended: all of them, those that are chosen side by side, and their files.

import { get } from "./api.js";
import { h, Panel } from "./dom.js";
import { colour, moment, number } from "./format.js";

const REFRESH_MS = 5000;

export class ModelsView {
  title = "Models";
  #models = null;
  #chosen = new Set();
  #error = h("p", { class: "error", role: "alert" });
  #list = new Panel(h("div", { class: "scroll" }), (models) => this.#table(models));
  #beside = new Panel(h("section", { "aria-label": "Chosen models side by side" }), (models) => this.#comparison(models));
  #timer = 0;

  constructor() {
    this.element = h("div", {}, h("section", { class: "card" }, h("h1", {}, "Models"), this.#error, this.#list.element), this.#beside.element);
    this.#list.element.append(h("p", { class: "empty" }, "Loading…"));
    this.#load();
    this.#timer = setInterval(() => this.#load(), REFRESH_MS);
  }

  update() {}

  close() {
    clearInterval(this.#timer);
  }

  async #load() {
    try {
      ({ models: this.#models } = await get("/v1/models"));
      this.#error.textContent = "";
    } catch (problem) {
      this.#error.textContent = problem.message;
    }
    this.#show();
  }

  #show() {
    if (!this.#models) return;
    this.#list.show(this.#models.map((model) => ({ ...model, chosen: this.#chosen.has(model.job) })));
    this.#beside.show(this.#models.filter((model) => this.#chosen.has(model.job)));
  }

  #table(models) {
    if (!models.length) return h("p", { class: "empty" }, "No training has ended yet. The models of jobs appear here when their training has ended.");
    const row = (model) => h("tr", {},
      h("td", { class: "choose" }, h("input", { type: "checkbox", checked: model.chosen, "data-key": `choose-${model.job}`, "aria-label": `Compare ${model.job}`, onchange: (event) => {
        this.#chosen[event.target.checked ? "add" : "delete"](model.job);
        this.#show();
      } })),
      h("th", { scope: "row" }, h("i", { class: `swatch ${colour(model.job)}` }), h("a", { href: `#/jobs/${model.job}` }, model.name), h("small", {}, model.job), badge(model)),
      cell("Ended", moment(model.completed)), cell("Loss", number(model.loss)), cell("Validation", values(model.validation)),
      cell("sha256", h("code", { title: model.params_sha256 }, model.params_sha256.slice(0, 12))), h("td", {}, fetched(model)));
    return h("table", { class: "jobs models" },
      h("thead", {}, h("tr", {}, ["Compare", "Job", "Ended", "Loss", "Validation", "sha256", "File"].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, models.map(row)));
  }

  #comparison(models) {
    if (models.length < 2) return null;
    const names = (name) => [...new Set(models.flatMap((model) => Object.keys(model[name])))].sort();
    const rows = [
      ["state", (model) => (model.state === "completed" ? "completed" : badge(model))], ["ended", (model) => moment(model.completed)], ["iterations", (model) => String(model.iterations)],
      ["samples", (model) => String(model.samples_seen)], ["loss", (model) => number(model.loss)],
      ...names("metrics").map((name) => [name, (model) => number(model.metrics[name])]),
      ...names("validation").map((name) => [`validation ${name}`, (model) => number(model.validation[name])]),
      ["arguments", (model) => [model.script, ...model.args].join(" ")], ["bits", (model) => model.bits],
      ["sha256", (model) => h("code", {}, model.params_sha256)], ["file", fetched],
    ];
    return h("div", { class: "card" }, h("h2", {}, "Side by side"), h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Comparison" }, h("table", {},
      h("thead", {}, h("tr", {}, h("td"), models.map((model) => h("th", { scope: "col" }, `${model.name} (${model.job})`)))),
      h("tbody", {}, rows.map(([name, show]) => h("tr", {}, h("th", { scope: "row" }, name), models.map((model) => h("td", {}, show(model)))))))));
  }
}

const cell = (label, ...content) => h("td", { "data-label": label }, content);

/** What became of a job after its training, unless it completed. */
const badge = (model) => model.state !== "completed" && h("span", { class: `badge ${model.state}`, title: model.reason }, model.state);

const values = (found) => Object.entries(found).map(([name, value]) => `${name} ${number(value)}`).join(", ") || "–";

const fetched = (model) => h("a", { class: "button", href: `/v1/jobs/${model.job}/model`, download: "", "aria-label": `Download the model of ${model.job}` }, "Download");
