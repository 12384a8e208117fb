/** Markdown that grows, cut into blocks that later text cannot change and the one that it can. */

import { Marked } from "../vendor/marked.js";

/** @typedef {import("../vendor/marked.js").Token} Token */

// Tags that models write within Markdown and that do no more than format. All other HTML is shown as it is written.
const PLAIN_TAG = /^<\/?(?:br|kbd|mark|sub|sup|u)\s*\/?>$/i;

/** @param {string} text */
function escaped(text) {
  return text.replace(/[&<>"']/g, (character) => `&#${character.charCodeAt(0)};`);
}

export const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text, block }) => {
      if (PLAIN_TAG.test(text.trim())) return text;
      return block ? `<p>${escaped(text.trim()).replaceAll("\n", "<br>")}</p>` : escaped(text);
    },
    // Nothing is loaded from anywhere because a model says so: an image becomes a link to it.
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
  },
});

/**
 * @param {string} text
 * @returns {string} with the line ends that Markdown is cut at
 */
export function normalized(text) {
  return text.replace(/\r\n?/g, "\n");
}

/**
 * @param {string} text  normalized
 * @returns {{settled: Token[], settledLength: number, live: Token[]}} blocks that are as they will stay, the length of
 *     their text, and those that what comes next may change
 */
export function cut(text) {
  // A line that is not whole may become anything: "3" is a paragraph after a list, "3. x" its next item.
  const tokens = marked.lexer(text.slice(0, text.lastIndexOf("\n") + 1));
  const last = tokens.findLastIndex((token) => token.type !== "space");
  let settled = last > 0 ? tokens.slice(0, last) : [];
  const raw = settled.map((token) => token.raw).join("");
  if (!text.startsWith(raw)) settled = [];
  const settledLength = settled.length ? raw.length : 0;
  return { settled, settledLength, live: [...marked.lexer(text.slice(settledLength))] };
}

/**
 * @param {string} text
 * @returns {boolean} whether blocks refer to links that others define, so that none can be drawn by itself
 */
export function hasReferences(text) {
  return /^ {0,3}\[[^\]]+\]:/m.test(text);
}
