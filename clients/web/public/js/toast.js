/** A line at the foot of the page that goes away by itself. */

import { byId, el } from "./dom.js";

const SHOWN_MS = 8000;
/** @type {number | undefined} */
let timer;

/**
 * @param {string} text
 * @param {string} label  of what can be done about it
 * @param {() => void} deed
 */
export function toast(text, label, deed) {
  const place = byId("toast", HTMLElement);
  const close = () => place.replaceChildren();
  const click = () => {
    close();
    deed();
  };
  const line = el("span", { dir: "auto" }, text);
  place.replaceChildren(el("div", { class: "toast" }, line, el("button", { type: "button", class: "button", click }, label)));
  clearTimeout(timer);
  timer = setTimeout(close, SHOWN_MS);
}
