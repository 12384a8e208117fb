/** The tokens of an answer with how likely each was, and what else might have stood there. */

import { el } from "./dom.js";
import { percent } from "./numbers.js";

/** @typedef {import("./types.js").TokenChance} TokenChance */

const NUM_SHADES = 5;

/** @param {TokenChance} chance */
function shade(chance) {
  return String(Math.min(NUM_SHADES - 1, Math.floor((1 - Math.exp(chance.logprob)) * NUM_SHADES)));
}

/** @param {string} token */
function visible(token) {
  return token.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "(no text)";
}

/** @param {TokenChance} chance */
function details(chance) {
  const rows = chance.top.some((each) => each.token === chance.token) ? chance.top : [chance, ...chance.top];
  return rows.map((each) => {
    const bar = el("progress", { max: "1", "aria-hidden": "true" });
    bar.value = Math.exp(each.logprob);
    const row = el("li", {}, el("code", {}, visible(each.token)), bar, el("span", {}, percent(each.logprob)));
    if (each.token === chance.token) row.className = "is-chosen";
    return row;
  });
}

/**
 * @param {readonly TokenChance[]} chances
 * @returns {HTMLElement} arrow keys go from token to token
 */
export function chancesView(chances) {
  const list = el("ul", { class: "alternatives", "aria-live": "polite" });
  const hint = el("p", { class: "hint" }, "Point at a token, or go through them with the arrow keys.");
  const panel = el("div", { class: "alternatives-panel" }, hint, list);
  const tokens = el("div", { class: "tokens", role: "group", "aria-label": "Tokens" });
  /** @type {Map<Element, TokenChance>} */
  const chanceOf = new Map();
  /** @type {HTMLElement | null} */
  let shown = null;
  /** @param {HTMLElement} token */
  const show = (token) => {
    const chance = chanceOf.get(token);
    if (!chance) return;
    const before = shown ?? tokens.firstElementChild;
    if (before instanceof HTMLElement) before.tabIndex = -1;
    shown?.classList.remove("is-shown");
    shown = token;
    token.tabIndex = 0;
    token.classList.add("is-shown");
    hint.hidden = true;
    list.replaceChildren(...details(chance));
  };
  for (const [index, chance] of chances.entries()) {
    const attributes = {
      type: "button",
      class: "token",
      "data-shade": shade(chance),
      tabindex: index ? "-1" : "0",
      "aria-label": `${visible(chance.token)}, ${percent(chance.logprob)}`,
    };
    // A button does not break its line; what stands behind it does.
    const breaks = "\n".repeat(chance.token.split("\n").length - 1);
    const button = el("button", attributes, chance.token.replaceAll("\n", "⏎"));
    chanceOf.set(button, chance);
    tokens.append(button, breaks);
  }
  for (const kind of /** @type {const} */ (["pointerover", "focusin"])) {
    tokens.addEventListener(kind, (event) => {
      if (event.target instanceof HTMLElement) show(event.target);
    });
  }
  tokens.addEventListener("keydown", (event) => {
    const at = document.activeElement;
    const next = event.key === "ArrowRight" ? at?.nextElementSibling : event.key === "ArrowLeft" ? at?.previousElementSibling : null;
    if (next instanceof HTMLElement) {
      next.focus();
      event.preventDefault();
    }
  });
  return el("section", { class: "chances", "aria-label": "Probabilities of the tokens" }, tokens, panel);
}
