/** How fast an answer comes. */

/** @typedef {import("./types.js").Speed} Speed */

/** Times one connection, on top of what was timed of the answer before. */
export class Clock {
  #startedMs = performance.now();
  /** @type {{atMs: number, tokens: number} | null} */
  #first = null;
  #numTokens = 0;

  /**
   * @param {Speed | null} before
   * @param {number} numKnown  tokens of the stream that are in `before` already
   */
  constructor(before, numKnown) {
    this.before = before;
    this.numKnown = numKnown;
  }

  /**
   * @param {boolean} hasText
   * @param {number | undefined} numTokens  of this stream so far, where the server says so
   * @returns {Speed | null}
   */
  tick(hasText, numTokens) {
    const now = performance.now();
    if (numTokens !== undefined) this.#numTokens = numTokens - this.numKnown;
    if (!this.#first && hasText) this.#first = { atMs: now, tokens: this.#numTokens };
    if (!this.#first) return this.before;
    const gained = this.#numTokens - this.#first.tokens;
    return {
      firstTokenMs: this.before?.firstTokenMs ?? this.#first.atMs - this.#startedMs,
      numTokens: (this.before?.numTokens ?? 0) + this.#numTokens,
      timedTokens: (this.before?.timedTokens ?? 0) + gained,
      timedMs: (this.before?.timedMs ?? 0) + (gained > 0 ? now - this.#first.atMs : 0),
    };
  }
}
