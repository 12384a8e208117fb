/** A stream's chunks put together to the answer that the request would have got in one piece. */

import { apiError, InvalidAnswer } from "./errors.js";

/**
 * What has come of one stream.
 *
 * @typedef {object} Accumulator
 * @property {boolean} hasBegun a chunk has come, so the request cannot be made again unnoticed
 * @property {boolean} isComplete the stream's end has come
 * @property {string} text of the first choice
 * @property {(chunk: any) => any} add takes the next chunk and returns it; throws APIError or InvalidAnswer
 * @property {(chunk: any) => string} textOf what a chunk adds to the text of the first choice
 * @property {() => void} end the transport says that the stream is over
 * @property {() => any} answer what has come, in the form of a whole answer
 */

/** Of chats and completions, whose chunks have choices. @implements {Accumulator} */
export class ChoicesAccumulator {
  hasBegun = false;
  isComplete = false;
  #isChat;
  /** @type {Record<string, any>} */
  #head = {};
  /** @type {any} */
  #usage = null;
  /** @type {Map<number, any>} */
  #choices = new Map();

  /** @param {boolean} isChat the choices have deltas of messages, else parts of a text */
  constructor(isChat) {
    this.#isChat = isChat;
  }

  get text() {
    return this.#choices.get(0)?.text ?? "";
  }

  /** Hot: once a chunk. @param {any} chunk */
  add(chunk) {
    if (chunk.error) throw apiError(chunk.error);
    try {
      if (!this.hasBegun) {
        const { id, created, model } = chunk;
        this.#head = { id, created, model };
      }
      if ("prompt_token_ids" in chunk) this.#head.prompt_token_ids = chunk.prompt_token_ids;
      for (const choice of chunk.choices) this.#addChoice(choice);
      this.#usage = chunk.usage ?? this.#usage;
    } catch (error) {
      const shown = JSON.stringify(chunk).slice(0, 200);
      throw new InvalidAnswer(`the server sent a chunk that is none: ${shown}`, { cause: error });
    }
    this.hasBegun = true;
    return chunk;
  }

  /** @param {any} chunk */
  textOf(chunk) {
    const first = chunk.choices.find((/** @type {any} */ choice) => choice.index === 0);
    return first ? this.#part(first) : "";
  }

  end() {
    this.isComplete = true;
  }

  answer() {
    const indexes = [...this.#choices.keys()].sort((one, other) => one - other);
    const choices = indexes.map((index) => {
      const { text, fields } = this.#choices.get(index);
      return { ...fields, ...(this.#isChat ? { message: { role: "assistant", content: text } } : { text }) };
    });
    const object = this.#isChat ? "chat.completion" : "text_completion";
    return { ...this.#head, object, choices, usage: this.#usage };
  }

  /** @param {any} choice @returns {string} */
  #part(choice) {
    return (this.#isChat ? choice.delta.content : choice.text) ?? "";
  }

  /** @param {any} choice */
  #addChoice(choice) {
    const { index, delta, text, logprobs, token_ids: ids, ...others } = choice;
    if (!this.#choices.has(index)) {
      this.#choices.set(index, { text: "", fields: { index, logprobs: null, finish_reason: null } });
    }
    const known = this.#choices.get(index);
    known.text += this.#part(choice);
    if (logprobs) known.fields.logprobs = joined(known.fields.logprobs ?? {}, logprobs);
    if (ids) append((known.fields.token_ids ??= []), ids);
    for (const [name, value] of Object.entries(others)) {
      if (value !== null) known.fields[name] = value;
    }
  }
}

/**
 * Log probabilities are lists, which go on from chunk to chunk.
 *
 * @param {Record<string, any[]>} known is changed
 * @param {Record<string, any[] | null>} added
 */
function joined(known, added) {
  for (const [name, values] of Object.entries(added)) append((known[name] ??= []), values ?? []);
  return known;
}

/** There is a limit to how many arguments `push` can have. @param {any[]} known is changed @param {any[]} added */
function append(known, added) {
  for (const value of added) known.push(value);
}

/** Of the Responses API, whose last event has the whole answer. @implements {Accumulator} */
export class ResponseAccumulator {
  hasBegun = false;
  isComplete = false;
  text = "";
  /** @type {any} */
  #response = {};
  /** @type {any} */
  #item = null;

  /** Hot: once an event. @param {any} event */
  add(event) {
    if (event.type === "error") throw apiError(event.error ?? event);
    if (event.type === "response.failed" && event.response?.error) throw apiError(event.response.error);
    if (typeof event.type !== "string" || (isDelta(event) && typeof event.delta !== "string")) {
      throw new InvalidAnswer(`the server sent an event that is none: ${JSON.stringify(event).slice(0, 200)}`);
    }
    if (isDelta(event)) {
      this.text += event.delta;
    } else if (event.type === "response.output_item.added") {
      this.#item = event.item;
    } else if (event.response) {
      this.#response = event.response;
      this.isComplete = ["response.completed", "response.incomplete"].includes(event.type);
    }
    this.hasBegun = true;
    return event;
  }

  /** @param {any} event */
  textOf(event) {
    return isDelta(event) ? event.delta : "";
  }

  /** Means nothing: the last event does. */
  end() {}

  answer() {
    if (this.isComplete || this.#item === null) return this.#response;
    const part = { type: "output_text", text: this.text, annotations: [], logprobs: [] };
    return { ...this.#response, output: [{ ...this.#item, content: [part] }] };
  }
}

/** @param {any} event */
function isDelta(event) {
  return event.type === "response.output_text.delta";
}

/**
 * The text of an answer, of its first choice if it has several.
 *
 * @param {any} answer
 * @returns {string}
 */
export function textOf(answer) {
  if (answer.object === "response") {
    return answer.output.flatMap((/** @type {any} */ item) => item.content).map((/** @type {any} */ part) => part.text).join("");
  }
  const [first] = answer.choices;
  return first.message ? first.message.content : first.text;
}
