// Asks for the token of the pool, once.

import { logOn } from "./api.js";
import { h } from "./dom.js";

export class LogOnView {
  title = "Log on";

  constructor(onLogOn) {
    const token = h("input", { id: "token", type: "password", autocomplete: "current-password", required: true });
    const error = h("p", { class: "error", role: "alert" });
    const submit = async (event) => {
      event.preventDefault();
      error.textContent = "";
      try {
        await logOn(token.value.trim());
        onLogOn();
      } catch (problem) {
        error.textContent = problem.message;
        token.select();
      }
    };
    this.element = h("form", { class: "card narrow", onsubmit: submit },
      h("h1", {}, "Log on to the pool"),
      h("p", {}, "Run ", h("code", {}, "resile page"), " on the pool's machine for a link that logs on, or enter the token from ",
        h("code", {}, "pool.json"), " in the pool's home. This browser stays logged on for 30 days."),
      h("label", { for: "token" }, "Token"), token, error,
      h("button", { class: "primary" }, "Log on"));
    setTimeout(() => token.focus());
  }

  update() {}

  close() {}
}
