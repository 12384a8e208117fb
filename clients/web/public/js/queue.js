/**
 * What one side puts in as it comes and the other takes out when it has time.
 *
 * @template T
 */
export class Queue {
  /** @type {T[]} */
  #items = [];
  /** @type {(() => void) | null} */
  #wake = null;
  /** @type {{error: unknown} | null} */
  #end = null;

  /** @param {T} item */
  put(item) {
    this.#items.push(item);
    this.#wake?.();
  }

  /** @param {unknown} [error]  why there is no more; none if that is as it should be */
  close(error) {
    this.#end ??= { error };
    this.#wake?.();
  }

  /** @returns {AsyncGenerator<T, void>} */
  async *items() {
    for (;;) {
      const item = this.#items.shift();
      if (item !== undefined) {
        yield item;
      } else if (this.#end) {
        if (this.#end.error !== undefined) throw this.#end.error;
        return;
      } else {
        await new Promise((resolve) => {
          this.#wake = () => resolve(undefined);
        });
        this.#wake = null;
      }
    }
  }
}
