/** This page among those of other tabs: which of them are there still. */

import { newId } from "./store.js";

// Where tabs cannot be asked (without HTTPS), one that has not saved its answer for so long is taken for gone.
export const STALE_MS = 6000;

export class Tab {
  id = newId();
  /** @type {Promise<void>} resolves when others can see this one */
  isHere;

  #canAsk = isSecureContext;

  constructor() {
    this.isHere = new Promise((resolve) => {
      if (!this.#canAsk) return resolve();
      // Held until the page goes away, however it does.
      const hold = () => {
        resolve();
        return new Promise(() => {});
      };
      navigator.locks.request(lockName(this.id), hold).catch(() => {
        // A browser that keeps nothing for the page has no locks for it either.
        this.#canAsk = false;
        resolve();
      });
    });
  }

  /**
   * @param {string} owner  a tab
   * @param {number} savedAt  when it last saved what it writes; 0 if it has left
   * @returns {Promise<boolean>} whether it writes no more
   */
  async isGone(owner, savedAt) {
    if (owner === this.id) return false;
    if (savedAt === 0) return true;
    if (!this.#canAsk) return Date.now() - savedAt > STALE_MS;
    const { held = [] } = await navigator.locks.query();
    return !held.some(({ name }) => name === lockName(owner));
  }
}

/** @param {string} id */
function lockName(id) {
  return `streamserve.tab.${id}`;
}
