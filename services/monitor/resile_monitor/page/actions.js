// What people can do to jobs, hosts and the pool; each asks before it acts.

import { send } from "./api.js";
import { h, notify } from "./dom.js";

const FINAL = ["completed", "failed", "stopped"];

export const isFinal = (job) => FINAL.includes(job.state);

/** The buttons for what is possible with a job in its state. */
export function jobActions(job, live) {
  const path = `/v1/jobs/${encodeURIComponent(job.id)}`;
  const act = (question, detail, run, input) => () => ask({ question, detail, input, run, live });
  const buttons = [];
  if (isFinal(job)) {
    if (job.has_model) buttons.push(h("a", { class: "button", href: `${path}/model`, download: "" }, "Download model"));
    buttons.push(h("a", { class: "button", href: `${path}/output`, download: "" }, "Download output"));
    buttons.push(button("Delete", "delete", act(`Delete ${job.id}?`,
      "This removes its record, history, logs, checkpoints, model and output. It cannot be undone.",
      async () => {
        await send("DELETE", path);
        location.hash = "#/";
      }), "danger"));
    return buttons;
  }
  buttons.push(button("Priority", "priority", act(`Priority of ${job.id}`, "A higher number means a larger share; others follow at their next iteration.",
    (priority) => send("POST", `${path}/priority`, { priority: Number(priority) }),
    { label: "Priority", type: "number", min: 1, max: 1000000, step: 1, value: job.priority })));
  if (job.state === "paused") buttons.push(button("Resume", "resume", act(`Resume ${job.id}?`, "It continues from its checkpoint as soon as it gets slots.", () => send("POST", `${path}/resume`))));
  else buttons.push(button("Pause", "pause", act(`Pause ${job.id}?`, "It saves a checkpoint and releases all of its slots. No iteration is lost.", () => send("POST", `${path}/pause`))));
  buttons.push(button("Stop", "stop", act(`Stop ${job.id}?`, "It ends without a final model and cannot be resumed. Pause it instead to continue later.",
    (reason) => send("POST", `${path}/stop`, { reason }), { label: "Reason (optional)", type: "text", maxlength: 1000, value: "" }), "danger"));
  return buttons;
}

export function drainButton(host, live) {
  return button("Drain", `drain-${host.id}`, () => ask({
    question: `Drain ${host.id}?`,
    detail: "Jobs leave it at an iteration boundary, and it gets no new workers.",
    run: () => send("POST", `/v1/hosts/${encodeURIComponent(host.id)}/drain`),
    live,
  }), "small");
}

export function undrainButton(host, live) {
  return button("Undrain", `undrain-${host.id}`, () => ask({
    question: `Undrain ${host.id}?`,
    detail: "It takes workers again.",
    run: () => send("POST", `/v1/hosts/${encodeURIComponent(host.id)}/undrain`),
    live,
  }), "small");
}

export function policyButton(policy, live) {
  const choice = h("select", { id: "policy" }, Object.entries(policy.policies).map(([name, description]) =>
    h("option", { value: name, title: description, selected: name === policy.policy }, name)));
  const preemption = h("input", { type: "checkbox", id: "preemption", checked: policy.preemption });
  return button("Change", "policy", () => ask({
    question: "Policy of the pool",
    detail: "Jobs follow at their next iteration boundary.",
    fields: [h("label", { for: "policy" }, "Policy"), choice, h("label", {}, preemption, " Jobs may lose slots to others")],
    run: () => send("PUT", "/v1/policy", { policy: choice.value, preemption: preemption.checked }),
    live,
  }), "small");
}

function button(text, key, onclick, kind = "") {
  return h("button", { type: "button", class: kind, "data-key": key, onclick }, text);
}

/** Ask in a dialog; `run` gets what was entered. A failure is shown in the dialog, which stays open. */
function ask({ question, detail, input, fields = [], run, live }) {
  const { label, ...attributes } = input ?? {};
  const entry = input && h("input", { id: "entry", ...attributes });
  const error = h("p", { class: "error", role: "alert" });
  const confirm = h("button", { class: "primary", value: "yes" }, "Confirm");
  const dialog = h("dialog", { "aria-labelledby": "question" },
    h("form", { method: "dialog", onsubmit: submit },
      h("h2", { id: "question" }, question), h("p", {}, detail), fields,
      entry && [h("label", { for: "entry" }, label), entry], error,
      h("p", { class: "buttons" }, h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"), confirm)));
  async function submit(event) {
    event.preventDefault();
    confirm.disabled = true;
    try {
      await run(entry?.value);
      dialog.close();
      notify(`${question.replace(/\?$/, "")}: done.`, "done");
      live.refresh();
    } catch (problem) {
      error.textContent = problem.message;
      confirm.disabled = false;
    }
  }
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}
