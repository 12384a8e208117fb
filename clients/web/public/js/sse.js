/** Reads server-sent events out of text that comes in pieces of any size. */
export class EventParser {
  #rest = "";
  /** @type {string[]} */
  #data = [];
  #isFirst = true;

  /**
   * @param {string} text  the next piece
   * @returns {string[]} the data of the events that it completes
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
        if (this.#data.length) events.push(this.#data.join("\n"));
        this.#data = [];
      } else if (line.startsWith("data:")) {
        this.#data.push(line.slice(line[5] === " " ? 6 : 5));
      } else if (line === "data") {
        this.#data.push("");
      }
    }
    return events;
  }
}
