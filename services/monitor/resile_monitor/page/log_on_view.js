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
      h("p", {}, "The token is in ", h("code", {}, "pool.json"), " of the pool's home; ",
        h("code", {}, "resile up"), " prints a link that holds it. This browser keeps it as a cookie for 30 days."),
      h("label", { for: "token" }, "Token"), token, error,
      h("button", { class: "primary" }, "Log on"));
    setTimeout(() => token.focus());
  }

  update() {}

  close() {}
}
