/** Draws Markdown that a model writes: safely, and only what has changed. */

import hljs from "../vendor/highlight.js";
import DOMPurify from "../vendor/purify.js";
import { cut, hasReferences, languageOf, marked, normalized } from "./blocks.js";
import { copyButton, el } from "./dom.js";

/** @typedef {import("../vendor/marked.js").Token} Token */

const ALLOWED = {
  ALLOWED_TAGS: [
    ..."a blockquote br code del em h1 h2 h3 h4 h5 h6 hr input kbd li mark ol p pre strong sub sup".split(" "),
    ..."table tbody td th thead tr u ul".split(" "),
  ],
  ALLOWED_ATTR: ["align", "checked", "class", "disabled", "href", "start", "title", "type"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
};
const COLOURED = { ...ALLOWED, ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"] };
// Colouring takes time in proportion to the code; beyond this, text is better at once than coloured later.
const MAX_COLOURED_CHARS = 60_000;
// So many times as long as a drawing took, nothing is drawn: the page is the reader's for most of the time.
const REST = 3;

/**
 * @param {readonly Token[]} tokens
 * @returns {DocumentFragment} without anything that acts, loads, or looks like the page's own
 */
export function drawn(tokens) {
  const html = marked.parser([...tokens]);
  const fragment = DOMPurify.sanitize(html, { ...ALLOWED, RETURN_DOM_FRAGMENT: true });
  for (const code of fragment.querySelectorAll("pre > code")) dressCode(/** @type {HTMLElement} */ (code));
  for (const link of fragment.querySelectorAll("a")) {
    if (!link.href) link.replaceWith(...link.childNodes);
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const box of fragment.querySelectorAll("input")) {
    box.type = "checkbox";
    box.disabled = true;
    box.setAttribute("aria-label", "done");
  }
  for (const table of fragment.querySelectorAll("table")) {
    const frame = el("div", { class: "table-frame", tabindex: "0", role: "region", "aria-label": "Table" });
    table.replaceWith(frame);
    frame.append(table);
  }
  // Each block has the side of its own first letter (what is in it: markdown.css); code is left to right, whatever it says.
  for (const block of fragment.children) block.setAttribute("dir", block.matches(".code") ? "ltr" : "auto");
  for (const each of fragment.querySelectorAll("[class]")) {
    if (!each.closest(".code")) each.removeAttribute("class");
  }
  return fragment;
}

/** @param {HTMLElement} code */
function dressCode(code) {
  const pre = /** @type {HTMLElement} */ (code.parentElement);
  const language = /^language-(.+)$/.exec(code.className)?.[1] ?? "";
  code.className = "";
  code.textContent = (code.textContent ?? "").replace(/\n$/, "");
  code.dataset.language = language;
  const name = hljs.getLanguage(language)?.name ?? language;
  const head = el("div", { class: "code-head" }, el("span", {}, name.split(",")[0] || "Text"));
  head.append(copyButton(() => code.textContent ?? "", "Copy code"));
  const block = el("div", { class: "code" }, head);
  pre.replaceWith(block);
  pre.dir = "ltr";
  pre.tabIndex = 0;
  pre.setAttribute("role", "region");
  pre.setAttribute("aria-label", name ? `Code in ${name}` : "Code");
  block.append(pre);
}

/** @param {ParentNode} root */
function colourCode(root) {
  for (const each of root.querySelectorAll("code[data-language]")) {
    const code = /** @type {HTMLElement} */ (each);
    const language = code.dataset.language ?? "";
    const text = code.textContent ?? "";
    if (!hljs.getLanguage(language) || text.length > MAX_COLOURED_CHARS) continue;
    const { value } = hljs.highlight(text, { language, ignoreIllegals: true });
    code.replaceChildren(DOMPurify.sanitize(value, { ...COLOURED, RETURN_DOM_FRAGMENT: true }));
  }
}

/**
 * Shows one text, which may grow. Blocks that are settled are drawn once; only the last is drawn anew, and the longer
 * that takes, the more rarely.
 */
export class MarkdownView {
  /** @type {string | null} */
  #given = null;
  #text = "";
  #settledLength = 0;
  #isFinal = false;
  /** @type {ChildNode[]} */
  #live = [];
  #restUntilMs = 0;
  /** @type {number | undefined} */
  #timer;
  // Of settled blocks: those that are there, and those that were told of.
  #numShownChars = 0;
  #numSaidChars = 0;

  /**
   * @param {HTMLElement} root  what is in it belongs to this view
   * @param {object} around
   * @param {(text: string) => void} around.settled  is told each block that will not change any more
   * @param {() => void} around.isDue  called when there is time for what the last update has left
   */
  constructor(root, around) {
    this.root = root;
    this.around = around;
  }

  /**
   * @param {string} given  all of the text
   * @param {boolean} isFinal  nothing will be added
   */
  update(given, isFinal) {
    if (given === this.#given && isFinal === this.#isFinal) return;
    const startedMs = performance.now();
    if (!isFinal && startedMs < this.#restUntilMs) {
      this.#timer ??= setTimeout(() => this.#wake(), this.#restUntilMs - startedMs);
      return;
    }
    this.#given = given;
    const text = normalized(given);
    if (!text.startsWith(this.#text) || (isFinal && hasReferences(text))) this.#clear();
    this.#text = text;
    this.#isFinal = isFinal;
    try {
      this.#grow(text, isFinal);
    } catch {
      // A text that the parser cannot take is still to be read, and the rest of the page to be used.
      this.#clear();
      this.root.append(el("p", { class: "unparsed" }, text));
    }
    const nowMs = performance.now();
    this.#restUntilMs = nowMs + REST * (nowMs - startedMs);
  }

  #wake() {
    this.#timer = undefined;
    this.around.isDue();
  }

  /** @param {string} text @param {boolean} isFinal */
  #grow(text, isFinal) {
    const { settled, settledLength, live } = cut(text.slice(this.#settledLength));
    if (settled.length || isFinal || !this.#growCode(live)) this.#draw(settled, live, isFinal);
    this.#settledLength += settledLength;
  }

  /** @param {Token[]} settled @param {Token[]} live @param {boolean} isFinal */
  #draw(settled, live, isFinal) {
    for (const node of this.#live) node.remove();
    if (settled.length) this.#settle(drawn(settled));
    const fragment = drawn(live);
    if (isFinal) {
      this.#live = [];
      this.#settle(fragment);
    } else {
      this.#live = [...fragment.childNodes];
      this.root.append(fragment);
    }
  }

  /** @param {DocumentFragment} fragment */
  #settle(fragment) {
    colourCode(fragment);
    const said = fragment.textContent?.trim();
    this.root.append(fragment);
    if (!said) return;
    this.#numShownChars += said.length;
    // What is drawn anew from its start was told before.
    if (this.#numShownChars <= this.#numSaidChars) return;
    this.#numSaidChars = this.#numShownChars;
    this.around.settled(said);
  }

  /**
   * Code that is being written is only lengthened: drawing it anew would cost more with each line.
   *
   * @param {Token[]} live
   */
  #growCode(live) {
    const [token] = live;
    if (live.length !== 1 || token?.type !== "code") return false;
    // There are line ends between blocks.
    const [block, ...others] = this.#live.filter((node) => node instanceof Element);
    const code = others.length ? null : block?.querySelector(":scope > pre > code");
    if (!(code instanceof HTMLElement) || code.dataset.language !== languageOf(token.lang ?? "")) {
      return false;
    }
    const shown = code.textContent ?? "";
    if (token.text.startsWith(shown)) code.append(token.text.slice(shown.length));
    else code.textContent = token.text;
    return true;
  }

  #clear() {
    this.root.replaceChildren();
    this.#live = [];
    this.#settledLength = 0;
    this.#numShownChars = 0;
  }
}
