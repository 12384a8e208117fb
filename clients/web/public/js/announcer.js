/** Tells people who cannot see the page what happens: whole paragraphs, never single tokens. */

import { byId, el } from "./dom.js";

const KEPT = 20;

/** @param {string} text */
export function announce(text) {
  const region = byId("announcer", HTMLElement);
  region.append(el("p", {}, text));
  while (region.children.length > KEPT) region.firstElementChild?.remove();
}
