/** A page that goes leaves its streams; nothing else tells the server. Elsewhere than on pages it has nothing to do. */

/** @typedef {import("./place.js").Place} Place */

export class Departures {
  /** @type {Set<Place>} */
  #places = new Set();
  #leave;

  /** @param {(place: Place) => void} leave ends a stream on the server, with a request that outlives the page */
  constructor(leave) {
    this.#leave = leave;
  }

  /** A stream begins. @param {Place} place */
  add(place) {
    if (this.#places.size === 0) globalThis.addEventListener?.("pagehide", this.#onHide);
    this.#places.add(place);
  }

  /** It is over. @param {Place} place */
  delete(place) {
    this.#places.delete(place);
    if (this.#places.size === 0) globalThis.removeEventListener?.("pagehide", this.#onHide);
  }

  #onHide = (/** @type {PageTransitionEvent} */ { persisted }) => {
    // A page that is only put aside goes on with its streams when it is shown again.
    if (!persisted) for (const place of this.#places) this.#leave(place);
  };
}
