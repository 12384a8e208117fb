/** @typedef {{data: string, id: string}} ServerEvent  the id is that of the last event which had one */

/** Reads server-sent events out of text that comes in pieces of any size. */
export class EventParser {
  #rest = "";
  /** @type {string[]} */
  #data = [];
  #id = "";
  #isFirst = true;

  /**
   * @param {string} text  the next piece
   * @returns {ServerEvent[]} the events that it completes
   */
  push(text) {
    if (this.#isFirst && text) {
      text = text.replace(/^\ufeff/, "");
      this.#isFirst = false;
    }
    const buffered = this.#rest + text;
    // A carriage return at the end may be half of a line end.
    const whole = buffered.endsWith("\r") ? buffered.slice(0, -1) : buffered;
    const lines = whole.split(/\r\n|\n|\r/);
    this.#rest = (lines.pop() ?? "") + buffered.slice(whole.length);
    const events = [];
    for (const line of lines) {
      if (line === "") {
        if (this.#data.length) events.push({ data: this.#data.join("\n"), id: this.#id });
        this.#data = [];
      } else if (line.startsWith("data:")) {
        this.#data.push(line.slice(line[5] === " " ? 6 : 5));
      } else if (line === "data") {
        this.#data.push("");
      } else if (line.startsWith("id:")) {
        this.#id = line.slice(line[3] === " " ? 4 : 3);
      }
    }
    return events;
  }
}
