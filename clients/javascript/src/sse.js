/** Server-sent events, the reading side: bytes in, events out, by the rules of WHATWG. */

export class EventDecoder {
  #text = new TextDecoder();
  #line = "";
  /** @type {string[]} */
  #data = [];
  #id = "";
  #endedInCr = false;

  /**
   * The events that `bytes` completes. Comments and events without data are none. Hot: once a piece from the
   * network.
   *
   * @param {Uint8Array} bytes
   * @returns {{ id: string, data: string }[]} the id is the last one that came, also with an earlier event
   */
  decode(bytes) {
    let text = this.#text.decode(bytes, { stream: true });
    // The LF of a CRLF that was cut in two belongs to the line which the CR has already ended.
    if (this.#endedInCr && text) {
      if (text[0] === "\n") text = text.slice(1);
      this.#endedInCr = false;
    }
    if (text.endsWith("\r")) this.#endedInCr = true;
    if (!/[\r\n]/.test(text)) {
      // A large event comes in many pieces, which are looked at once.
      this.#line += text;
      return [];
    }
    const lines = (this.#line + text).split(/\r\n|\r|\n/);
    this.#line = /** @type {string} */ (lines.pop());
    return lines.flatMap((line) => this.#take(line));
  }

  /** @param {string} line */
  #take(line) {
    if (line === "") {
      const data = this.#data;
      this.#data = [];
      return data.length ? [{ id: this.#id, data: data.join("\n") }] : [];
    }
    if (line.startsWith("data:")) this.#data.push(line.slice(line[5] === " " ? 6 : 5));
    else if (line.startsWith("id:")) this.#id = line.slice(line[3] === " " ? 4 : 3);
    return [];
  }
}
