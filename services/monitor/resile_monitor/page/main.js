// Starts the page: logs on, chooses the view that the address names, and shows the connection.

import { logOff, logOn } from "./api.js";
import { ChangeView } from "./change_view.js";
import { h, notify } from "./dom.js";
import { JobView } from "./job_view.js";
import { Live } from "./live.js";
import { LogOnView } from "./log_on_view.js";
import { ModelsView } from "./models_view.js";
import { PoolView } from "./pool_view.js";
import { SchedulerView } from "./scheduler_view.js";
import { SubmitView } from "./submit_view.js";
import { UnknownView } from "./unknown_view.js";

const main = document.getElementById("main");
const connection = document.getElementById("connection");
const logOffButton = document.getElementById("log-off");

let live = null;
let view = null;

function connect() {
  live?.stop();
  live = new Live();
  live.addEventListener("change", ({ detail }) => onChange(detail));
  live.start();
}

function onChange(detail) {
  connection.className = live.status.replace(" ", "-");
  connection.textContent = live.status === "disconnected" ? "disconnected, reconnecting…" : live.status;
  connection.title = detail;
  logOffButton.hidden = live.status !== "live";
  if (live.status === "logged off") {
    live.stop();
    show(new LogOnView(connect));
    return;
  }
  if (!view || view instanceof LogOnView) open();
  if (live.jobs) view.update();
}

/** Show what the part of the address after # names: #/, #/jobs/job-1, #/jobs/job-1/changes/<trace>, #/scheduler, … */
function open() {
  const [, place, id, part, trace] = location.hash.split("/").map(decoded);
  if (place === "jobs" && part === "changes" && trace) show(new ChangeView(live, id, trace));
  else if (place === "jobs" && id) show(new JobView(live, id));
  else if (place === "scheduler") show(new SchedulerView(live));
  else if (place === "models") show(new ModelsView());
  else if (place === "submit") show(new SubmitView(live));
  else if (place) show(new UnknownView(location.hash));
  else show(new PoolView(live));
  if (live.jobs) view.update();
}

/** A part of the address; one that cannot be decoded names nothing that there is. */
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function show(next) {
  view?.close();
  view = next;
  live.follow(!(view.hasOwnStream || view instanceof LogOnView));
  main.replaceChildren(next.element);
  document.title = next.title ? `${next.title} · Resile` : "Resile";
  for (const link of document.querySelectorAll("nav a")) {
    link.toggleAttribute("aria-current", link.getAttribute("href") === (location.hash || "#/"));
  }
}

async function start() {
  const token = /^#token=(.+)$/.exec(location.hash)?.[1];
  if (token) {
    history.replaceState(null, "", "#/");
    try {
      await logOn(decodeURIComponent(token));
    } catch (problem) {
      notify(problem.message);
    }
  }
  connect();
}

addEventListener("hashchange", () => {
  if (location.hash.startsWith("#token=")) start();
  else if (location.hash.startsWith("#/") && live.status !== "logged off") {
    open();
    main.focus({ preventScroll: true });
    scrollTo(0, 0);
  }
});

logOffButton.addEventListener("click", async () => {
  await logOff();
  connect();
});

main.append(h("p", { class: "empty" }, "Loading…"));
start();
