/** Server-sent events, the reading side: bytes in, the data of events out, by the rules of WHATWG. */

export class EventDecoder {
  #text = new TextDecoder();
  #line = "";
  /** @type {string[]} */
  #data = [];
  #endedInCr = false;

  /**
   * The data of the events that `bytes` completes. Comments and events without data are none. Hot: once a
   * piece from the network.
   *
   * @param {Uint8Array} bytes
   * @returns {string[]}
   */
  decode(bytes) {
    let text = this.#text.decode(bytes, { stream: true });
    // The LF of a CRLF that was cut in two belongs to the line which the CR has already ended.
    if (this.#endedInCr && text) {
      if (text[0] === "\n") text = text.slice(1);
      this.#endedInCr = false;
    }
    if (text.endsWith("\r")) this.#endedInCr = true;
    const lines = (this.#line + text).split(/\r\n|\r|\n/);
    this.#line = /** @type {string} */ (lines.pop());
    return lines.flatMap((line) => this.#take(line));
  }

  /** @param {string} line */
  #take(line) {
    if (line === "") {
      const data = this.#data;
      this.#data = [];
      return data.length ? [data.join("\n")] : [];
    }
    if (line.startsWith("data:")) this.#data.push(line.slice(line[5] === " " ? 6 : 5));
    return [];
  }
}
