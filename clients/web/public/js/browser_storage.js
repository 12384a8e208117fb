/** Small things that the browser keeps for the page; where it does not, or has no room, the page does while it is open. */

class Area {
  /** What could not be written.
   * @type {Map<string, string | null>} */
  #held = new Map();
  #storage;

  /** @param {() => Storage} storage  throws where the browser keeps nothing */
  constructor(storage) {
    this.#storage = storage;
  }

  /** @param {string} name @returns {string | null} */
  get(name) {
    const held = this.#held.get(name);
    if (held !== undefined) return held;
    try {
      return this.#storage().getItem(name);
    } catch {
      return null;
    }
  }

  /** @param {string} name @param {string | null} value  null is none */
  set(name, value) {
    try {
      if (value === null) this.#storage().removeItem(name);
      else this.#storage().setItem(name, value);
      this.#held.delete(name);
    } catch {
      this.#held.set(name, value);
    }
  }
}

/** Of this browser, for all tabs. */
export const ofBrowser = new Area(() => localStorage);
/** Of this tab, over reloads too. */
export const ofTab = new Area(() => sessionStorage);
