// Says that the address names no view.

import { h } from "./dom.js";

export class UnknownView {
  title = "No such view";

  constructor(address) {
    this.element = h("section", { class: "card" }, h("h1", {}, "There is no such view"),
      h("p", {}, "The address ", h("code", {}, address), " names none. ", h("a", { href: "#/" }, "Go to the pool"), "."));
  }

  update() {}

  close() {}
}
