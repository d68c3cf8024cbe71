// Makes elements. Text always becomes a text node, never markup.

const SVG = "http://www.w3.org/2000/svg";

/** Make an HTML element. Attributes that begin with "on" are event listeners; those that are null or false are left out. */
export function h(name, attributes, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** Make an SVG element. */
export function svg(name, attributes, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...present(children));
  return element;
}

function present(children) {
  return children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
}

/**
 * A part of the page that is rendered again only when what it shows has changed; the keyboard focus stays. While it is
 * pressed it waits for the next update: a button that is replaced between press and release is not clicked.
 */
export class Panel {
  #render;
  #shown;

  constructor(element, render) {
    this.element = element;
    this.#render = render;
  }

  show(data) {
    const shown = JSON.stringify(data);
    if (shown === this.#shown || this.element.matches(":active")) return;
    this.#shown = shown;
    const focused = this.element.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
    this.element.replaceChildren(...present([this.#render(data)]));
    if (focused) this.element.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  }
}

let notices;

/** Show a line for some seconds, and to screen readers. */
export function notify(text, kind = "error") {
  notices ??= document.getElementById("notices");
  const notice = h("p", { class: `notice ${kind}` }, text);
  notices.append(notice);
  setTimeout(() => notice.remove(), 8000);
}
