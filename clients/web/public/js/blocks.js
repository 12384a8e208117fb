/** Markdown that grows, cut into blocks that later text cannot change and the one that it can. */

import { Lexer, Marked } from "../vendor/marked.js";

/** @typedef {import("../vendor/marked.js").Token} Token */

// Nobody writes so deep a list, so many quotes in quotes, or so long a line; a model that repeats itself may. What is
// beyond that is shown as it is written: the parser would take seconds, or all of the stack.
const MAX_DEPTH = 24;
const MAX_INLINE_CHARS = 8000;

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
    code: ({ text, lang }) => `<pre><code class="language-${languageOf(lang ?? "")}">${escaped(text)}\n</code></pre>\n`,
    // Nothing is loaded from anywhere because a model says so: an image becomes a link to it.
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
  },
});

class BoundedLexer extends Lexer {
  #depth = 0;

  /** @override @param {string} text @param {Token[]} [tokens] @param {boolean} [isCut] @returns {any} */
  blockTokens(text, tokens = this.tokens, isCut = false) {
    if (this.#depth === MAX_DEPTH) {
      tokens.push({ type: "text", raw: text, text });
      return tokens;
    }
    this.#depth += 1;
    try {
      return super.blockTokens(text, tokens, isCut);
    } finally {
      this.#depth -= 1;
    }
  }

  /** @override @param {string} text @param {Token[]} [tokens] */
  inlineTokens(text, tokens = []) {
    if (text.length <= MAX_INLINE_CHARS) return super.inlineTokens(text, tokens);
    tokens.push({ type: "text", raw: text, text });
    return tokens;
  }
}

/**
 * @param {string} text
 * @returns {Token[]} its blocks
 */
export function lexed(text) {
  return [...new BoundedLexer(marked.defaults).lex(text)];
}

/**
 * @param {string} info  what stands behind the fence of a block of code
 * @returns {string} the language; empty if it names none
 */
export function languageOf(info) {
  return /^[\s{.]*([\w+#.-]+)/.exec(info)?.[1]?.toLowerCase() ?? "";
}

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
  const tokens = lexed(text.slice(0, text.lastIndexOf("\n") + 1));
  const last = tokens.findLastIndex((token) => token.type !== "space");
  let settled = last > 0 ? tokens.slice(0, last) : [];
  const raw = settled.map((token) => token.raw).join("");
  if (!text.startsWith(raw)) settled = [];
  const settledLength = settled.length ? raw.length : 0;
  return { settled, settledLength, live: lexed(text.slice(settledLength)) };
}

/**
 * @param {string} text
 * @returns {boolean} whether blocks refer to links that others define, so that none can be drawn by itself
 */
export function hasReferences(text) {
  return /^ {0,3}\[[^\]]+\]:/m.test(text);
}
