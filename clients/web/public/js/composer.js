/** Where messages are written, sent, and answers stopped. */

import { byId, isComposing } from "./dom.js";

const MAX_HEIGHT_PX = 240;
// More than fits into that height, on any screen.
const LONG_CHARS = 10_000;

export class Composer {
  #form = byId("composer", HTMLFormElement);
  #text = byId("prompt", HTMLTextAreaElement);
  #send = byId("send", HTMLButtonElement);
  #stop = byId("stop", HTMLButtonElement);
  #isAnswering = false;

  /**
   * @param {object} deeds
   * @param {(text: string) => void} deeds.send
   * @param {() => void} deeds.stop
   * @param {() => void} deeds.editLast
   */
  constructor(deeds) {
    this.deeds = deeds;
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    this.#stop.addEventListener("click", () => deeds.stop());
    this.#text.addEventListener("input", () => this.#fit());
    this.#text.addEventListener("keydown", (event) => {
      if (isComposing(event)) return;
      if (event.key === "Enter" && !event.shiftKey) {
        event.preventDefault();
        this.#submit();
      } else if (event.key === "ArrowUp" && this.#text.value === "" && !this.#isAnswering) {
        event.preventDefault();
        deeds.editLast();
      }
    });
    document.addEventListener("keydown", (event) => {
      if (isComposing(event) || event.ctrlKey || event.metaKey || event.altKey) return;
      const isTyping = event.target instanceof Element && event.target.closest("input, textarea, select, dialog");
      if (event.key === "Escape" && this.#isAnswering && !document.querySelector("dialog[open]")) deeds.stop();
      if (event.key === "/" && !isTyping) {
        event.preventDefault();
        this.focus();
      }
    });
    this.#fit();
  }

  focus() {
    this.#text.focus();
  }

  /** @param {string} text */
  fill(text) {
    this.#text.value = text;
    this.#fit();
    this.focus();
  }

  /** @param {boolean} isAnswering */
  draw(isAnswering) {
    if (isAnswering === this.#isAnswering) return;
    const hadFocus = this.#form.contains(document.activeElement);
    this.#isAnswering = isAnswering;
    this.#send.hidden = isAnswering;
    this.#stop.hidden = !isAnswering;
    // The button that had it is gone.
    if (hadFocus) this.focus();
  }

  #submit() {
    const text = this.#text.value.trim();
    if (!text || this.#isAnswering) return;
    this.#text.value = "";
    this.#fit();
    this.deeds.send(text);
  }

  #fit() {
    // To measure a whole document that was pasted takes seconds.
    const isLong = this.#text.value.length > LONG_CHARS;
    if (!isLong) this.#text.style.height = "auto";
    this.#text.style.height = `${isLong ? MAX_HEIGHT_PX : Math.min(this.#text.scrollHeight, MAX_HEIGHT_PX)}px`;
    this.#send.disabled = this.#text.value.trim() === "";
  }
}
