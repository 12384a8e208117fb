/** A server that answers as a test says, and what tests say. */

import { createServer } from "node:http";

export const HEAD = { id: "1", created: 1, model: "tiny" };
export const MESSAGES = [{ role: "user", content: "Hello" }];

/** A chunk of a chat. */
export function chunk(content, more = {}) {
  const delta = content === undefined ? {} : { content };
  const choice = { index: 0, delta, logprobs: null, finish_reason: null, ...more };
  return { ...HEAD, object: "chat.completion.chunk", choices: [choice], usage: null };
}

/** An event of a stream. */
export function event(data) {
  return `data: ${typeof data === "string" ? data : JSON.stringify(data)}\n\n`;
}

export const USAGE = { prompt_tokens: 3, completion_tokens: 2, total_tokens: 5 };
export const WHOLE_STREAM = [
  event(chunk("")), ": ping\n\n", event(chunk("Hel")), event(chunk("lo")),
  event(chunk(undefined, { finish_reason: "stop" })),
  event({ ...HEAD, object: "chat.completion.chunk", choices: [], usage: USAGE }),
  event("[DONE]"),
];

/** Refuses with an error object. */
export function refused(status, code, headers = {}) {
  return (response) => {
    response.writeHead(status, { "Content-Type": "application/json", ...headers });
    response.end(JSON.stringify({ error: { message: "No.", type: "some_error", param: "top_k", code } }));
  };
}

/** Answers in one piece. */
export function whole(document) {
  return (response) => response.writeHead(200, { "Content-Type": "application/json" }).end(JSON.stringify(document));
}

/** Begins a stream. */
export function begin(response) {
  response.writeHead(200, { "Content-Type": "text/event-stream; charset=utf-8" });
}

/** A whole stream of events. */
export function streamed(...events) {
  return (response) => {
    begin(response);
    response.end(events.join(""));
  };
}

/** Some events, then the connection is gone. */
export function broken(...events) {
  return (response) => {
    begin(response);
    response.write(events.join("") || ": ping\n\n", () => response.socket.destroy());
  };
}

/** No answer at all: the connection is closed. */
export function dropped(response) {
  response.socket.destroy();
}

/**
 * Serves `answers`, one for each request; ends with the test.
 *
 * @returns the URL, the requests that came (method, path, headers and body), and `ended()`, the path of the
 *   next stream that is ended on the server, which says that there is none called "over"
 */
export async function serve(test, ...answers) {
  const requests = [];
  const paths = [];
  let onEnded = () => {};
  const server = createServer(async (request, response) => {
    let text = "";
    for await (const piece of request) text += piece;
    const { method, url: path, headers } = request;
    if (method === "DELETE") {
      paths.push(path);
      onEnded();
      (path.endsWith("/over") ? refused(404, "stream_not_found") : whole({}))(response);
      return;
    }
    requests.push({ method, path, headers, body: text && JSON.parse(text) });
    const answer = answers.shift() ?? refused(500, "no_more_answers");
    answer(response);
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  test.after(() => {
    server.closeAllConnections();
    server.close();
  });
  const ended = async () => {
    while (paths.length === 0) await new Promise((resolve) => { onEnded = resolve; });
    return paths.shift();
  };
  return { url: `http://127.0.0.1:${server.address().port}`, requests, ended };
}

/** Options with which no time passes between two tries, and the delays that would have. */
export function patient(more = {}) {
  const delays = [];
  const sleep = async (milliseconds) => { delays.push(milliseconds); };
  return { delays, options: { ...more, sleep, retries: { chance: () => 1, ...more.retries } } };
}

/** All that an iterable gives. */
export async function collect(iterable) {
  const items = [];
  for await (const item of iterable) items.push(item);
  return items;
}
