/** How long an attempt may go on: until the caller does not want it any more, or something takes too long. */

export class Life {
  #controller = new AbortController();
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  #timer;
  #caller;
  #onAbort;
  /** @type {unknown} */
  #held;

  /** @param {AbortSignal} caller the caller's own */
  constructor(caller) {
    this.#caller = caller;
    this.#onAbort = () => this.#controller.abort(caller.reason);
    if (caller.aborted) this.#onAbort();
    caller.addEventListener("abort", this.#onAbort);
  }

  get signal() {
    return this.#controller.signal;
  }

  /**
   * Keeps a request in memory. Node's knows its signal by a weak reference only, and once it is collected nothing
   * ends what it has begun.
   *
   * @param {Request} request
   */
  hold(request) {
    this.#held = request;
  }

  /**
   * What `wait` gives, unless life ends before.
   *
   * @template T
   * @param {Promise<T>} wait
   * @param {number | null} [limit] milliseconds, or null for ever
   * @param {() => Error} [late] why it ends then
   * @returns {Promise<T>}
   */
  async during(wait, limit = null, late) {
    if (limit !== null) this.#timer = setTimeout(() => this.#controller.abort(late?.()), limit);
    try {
      return await abortable(wait, this.signal);
    } finally {
      clearTimeout(this.#timer);
    }
  }

  /** Ends it in any case, so that nothing of it is left. */
  end() {
    this.#caller.removeEventListener("abort", this.#onAbort);
    this.#controller.abort();
    this.#held = undefined;
  }
}

/**
 * What `wait` gives, or the reason for which `signal` aborts, whichever comes first.
 *
 * @template T
 * @param {Promise<T>} wait
 * @param {AbortSignal} signal
 * @returns {Promise<T>}
 */
export function abortable(wait, signal) {
  return new Promise((resolve, reject) => {
    const onAbort = () => reject(signal.reason);
    if (signal.aborted) onAbort();
    signal.addEventListener("abort", onAbort);
    wait.then(resolve, reject).finally(() => signal.removeEventListener("abort", onAbort));
  });
}

/**
 * Waits for so many milliseconds, or throws the reason for which `signal` aborts.
 *
 * @param {number} milliseconds
 * @param {AbortSignal} signal
 * @returns {Promise<void>}
 */
export async function sleep(milliseconds, signal) {
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let timer;
  try {
    await abortable(new Promise((resolve) => { timer = setTimeout(resolve, Math.min(milliseconds, 2 ** 31 - 1)); }), signal);
  } finally {
    clearTimeout(timer);
  }
}
