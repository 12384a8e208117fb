/** The three endpoints: where they are, what a request to each looks like, and how its stream adds up. */

import { ChoicesAccumulator, ResponseAccumulator } from "./accumulators.js";

/**
 * @typedef {object} Endpoint
 * @property {string} name on a WebSocket
 * @property {string} path over HTTP
 * @property {string} idPrefix what stands before the request's id in that of the answer
 * @property {boolean} countsOnDemand a stream has token counts only where they are asked for
 * @property {() => import("./accumulators.js").Accumulator} accumulator makes what puts a stream together
 */

/**
 * One request, whatever the transport.
 *
 * @typedef {object} Call
 * @property {string} endpoint its name on a WebSocket
 * @property {string} path over HTTP
 * @property {string} idPrefix what stands before the request's id in that of the answer
 * @property {Record<string, any>} body
 */

/** @type {Endpoint} */
export const CHAT = {
  name: "chat.completions", path: "/v1/chat/completions", idPrefix: "chatcmpl-", countsOnDemand: true,
  accumulator: () => new ChoicesAccumulator(true),
};

/** @type {Endpoint} */
export const COMPLETIONS = {
  name: "completions", path: "/v1/completions", idPrefix: "cmpl-", countsOnDemand: true,
  accumulator: () => new ChoicesAccumulator(false),
};

/** @type {Endpoint} */
export const RESPONSES = {
  name: "responses", path: "/v1/responses", idPrefix: "resp_", countsOnDemand: false,
  accumulator: () => new ResponseAccumulator(),
};

/**
 * A request for an answer in one piece.
 *
 * @param {Endpoint} endpoint
 * @param {object} body
 * @returns {Call}
 */
export function wholeCall(endpoint, body) {
  const { name, path, idPrefix } = endpoint;
  return { endpoint: name, path, idPrefix, body: { ...body } };
}

/**
 * A request for a stream, with token counts unless the caller has said something of that.
 *
 * @param {Endpoint} endpoint
 * @param {object} body
 * @returns {Call}
 */
export function streamCall(endpoint, body) {
  const counts = endpoint.countsOnDemand ? { stream_options: { include_usage: true } } : {};
  return wholeCall(endpoint, { ...counts, ...body, stream: true });
}
