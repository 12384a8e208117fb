/** A conversation as a file. */

import { el } from "./dom.js";

const MAX_NAME_CHARS = 80;

/**
 * @param {string} title
 * @param {readonly import("./types.js").Message[]} path  from the first message to the last
 * @returns {string} Markdown; what was said in it stays as it was written
 */
export function markdownOf(title, path) {
  const parts = path.map(({ role, model, content }) => {
    const speaker = role === "user" ? "You" : model || "Answer";
    return `## ${speaker}\n\n${content.trim()}\n`;
  });
  return [`# ${title.replace(/\s+/g, " ").trim()}\n`, ...parts].join("\n");
}

/**
 * @param {string} title
 * @returns {string} with nothing in it that some file system takes for something else
 */
export function fileName(title) {
  const name = title.replace(/[\p{C}\p{Z}"*/:<>?\\|]+/gu, " ").replace(/^[. ]+/, "");
  return `${[...name].slice(0, MAX_NAME_CHARS).join("").trim() || "conversation"}.md`;
}

/**
 * Has the browser keep a text where it keeps what it downloads.
 *
 * @param {string} name
 * @param {string} text
 */
export function download(name, text) {
  const href = URL.createObjectURL(new Blob([text], { type: "text/markdown;charset=utf-8" }));
  el("a", { href, download: name }).click();
  // It has been taken up once this turn is over, in some browsers a little later.
  setTimeout(() => URL.revokeObjectURL(href), 60_000);
}
