/** What stands under an answer that is not as it should be, and what can be done about it. */

import { el, icon } from "./dom.js";

/** @typedef {import("./answering.js").Waiting} Waiting */
/** @typedef {import("./types.js").Message} Message */
/** @typedef {{label: string, click: () => void}} Action */

/** @type {Record<string, string>} */
const STATUSES = {
  loading: "The server is starting.",
  restarting: "The server is starting again.",
  draining: "The server is stopping. The answer comes when it is back.",
  stuck: "The model does not respond at the moment.",
  dead: "The model has stopped. The answer comes when the server is back.",
  unreachable: "The server cannot be reached. Trying again until it answers.",
};

export const RECONNECTING = "Reconnecting…";

/**
 * @param {string} symbol
 * @param {string} text
 * @param {Action[]} actions
 * @param {HTMLElement | null} [more]
 */
export function notice(symbol, text, actions, more = null) {
  const buttons = actions.map(({ label, click }) => el("button", { type: "button", class: "button", click }, label));
  const words = el("div", { class: "notice-text" }, el("p", {}, text), more);
  return el("div", { class: `notice is-${symbol}` }, icon(symbol), words, el("div", { class: "notice-actions" }, ...buttons));
}

/**
 * @param {import("./server.js").Status} status
 * @returns {HTMLElement | null} how far a start is
 */
function progress({ progress: told }) {
  if (!told?.stage) return null;
  const share = told.fraction ?? null;
  const bar = el("progress", { max: "1", "aria-label": told.stage });
  if (share !== null) bar.value = share;
  const percent = share === null ? "" : ` ${Math.round(100 * share)} %`;
  return el("div", { class: "notice-progress", "aria-live": "off" }, bar, el("small", {}, `${told.stage}${percent}`));
}

/**
 * @param {import("./server.js").Status} status
 * @param {Action[]} actions
 */
export function unreadyNotice(status, actions) {
  return notice("clock", STATUSES[status.status] ?? STATUSES.unreachable ?? "", actions, progress(status));
}

/**
 * @param {Waiting} waiting
 * @param {Action} retry
 */
export function waitingNotice(waiting, retry) {
  if (waiting.kind === "queue") {
    const dots = el("span", { class: "dots", role: "img", "aria-label": "Waiting for the first word" });
    dots.append(el("i"), el("i"), el("i"));
    return dots;
  }
  if (waiting.kind === "reconnecting") return el("p", { class: "reconnecting" }, icon("again"), RECONNECTING);
  if (waiting.kind === "busy") {
    const text = `The server is busy. Trying again in ${waiting.secondsLeft} s.`;
    return notice("clock", text, [retry]);
  }
  return unreadyNotice(waiting.status, []);
}

/**
 * @param {Message} message
 * @param {{resume: () => void, again: () => void}} offers
 * @returns {HTMLElement | null}
 */
export function endNotice(message, offers) {
  const again = { label: "Try again", click: offers.again };
  const resume = { label: "Continue", click: offers.resume };
  const actions = message.content ? [resume, again] : [again];
  switch (message.state) {
    case "length":
      return notice("info", "The answer came to its greatest length.", [resume]);
    case "stopped":
      return notice("info", "Stopped.", actions);
    case "lost":
      return notice("warning", "The connection was lost before the answer was whole.", actions);
    case "failed":
      return notice("warning", message.problem ?? "The answer failed.", actions);
    default:
      return null;
  }
}
