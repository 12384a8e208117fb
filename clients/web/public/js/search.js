/** The field above the list of conversations: which of them have a text in them. */

import { byId } from "./dom.js";

const TYPING_MS = 200;

export class Search {
  #field = byId("search", HTMLInputElement);
  #told = byId("found", HTMLElement);
  /** @type {number | undefined} */
  #timer;
  #numAsked = 0;
  /** Those that have it; null while nothing is looked for. @type {ReadonlySet<string> | null} */
  found = null;

  /**
   * @param {(text: string) => Promise<ReadonlySet<string>>} find
   * @param {() => void} changed
   */
  constructor(find, changed) {
    this.find = find;
    this.changed = changed;
    this.#field.addEventListener("input", () => this.again());
    this.#field.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !this.#field.value) return;
      // It empties the field; on a phone it would close the list as well.
      event.stopPropagation();
      event.preventDefault();
      this.#field.value = "";
      this.#look();
    });
  }

  /** Looks once more, soon: something was typed, or said in a conversation. */
  again() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#look(), TYPING_MS);
  }

  async #look() {
    clearTimeout(this.#timer);
    const asked = ++this.#numAsked;
    const text = this.#field.value.trim();
    const found = text ? await this.find(text) : null;
    // What was typed meanwhile counts.
    if (asked !== this.#numAsked) return;
    const isNew = shownOf(found) !== shownOf(this.found);
    this.found = found;
    const said = found === null ? "" : found.size === 1 ? "1 conversation found" : `${found.size} conversations found`;
    if (this.#told.textContent !== said) this.#told.textContent = said;
    if (isNew) this.changed();
  }
}

/** @param {ReadonlySet<string> | null} found */
function shownOf(found) {
  return found && JSON.stringify([...found].sort());
}
