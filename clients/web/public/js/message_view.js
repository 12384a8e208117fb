/** One message on the page. */

import { announce } from "./announcer.js";
import { chancesView } from "./chances_view.js";
import { copyButton, el, icon, iconButton, isComposing } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { endNotice, RECONNECTING, waitingNotice } from "./notices.js";
import { speedParts } from "./numbers.js";

/** @typedef {import("./types.js").Message} Message */

/**
 * What can be done with a message.
 *
 * @typedef {object} Deeds
 * @property {(message: Message, text: string) => void} resend
 * @property {(message: Message) => void} regenerate
 * @property {(message: Message) => void} resume
 * @property {(message: Message) => void} retryNow
 * @property {(message: Message, step: -1 | 1) => void} turn  to another version
 * @property {() => void} redraw  soon
 */

/**
 * @typedef {object} Place  what a message is among others
 * @property {number} index  among its versions
 * @property {number} count
 * @property {import("./answering.js").Waiting | null} waiting
 * @property {boolean} isLast
 * @property {boolean} isBusy  an answer of the conversation is being made
 */

// A question of more characters is shown by its beginning; of two of them one may be half of an emoji.
const LONG_CHARS = 8000;
const BEGINNING_CHARS = 4000;
const HALF_CHARACTER = /[\ud800-\udbff]$/;

class MessageView {
  #versions = el("span", { class: "versions" });
  #drawnVersions = "";

  /** @param {Message} message @param {Deeds} deeds @param {string} label */
  constructor(message, deeds, label) {
    this.message = message;
    this.deeds = deeds;
    this.actions = el("div", { class: "message-actions" }, this.#versions);
    this.element = el("article", { class: `message is-${message.role}`, "aria-label": label });
  }

  /** @param {Place} place */
  drawVersions({ index, count, isBusy }) {
    const drawn = `${index}/${count}/${isBusy}`;
    if (drawn === this.#drawnVersions) return;
    this.#drawnVersions = drawn;
    this.#versions.hidden = count < 2;
    const before = iconButton("left", "Version before", () => this.deeds.turn(this.message, -1));
    const after = iconButton("right", "Next version", () => this.deeds.turn(this.message, 1));
    before.disabled = index === 0 || isBusy;
    after.disabled = index === count - 1 || isBusy;
    this.#versions.replaceChildren(before, el("span", {}, `${index + 1} / ${count}`), after);
  }
}

export class QuestionView extends MessageView {
  /** @type {string | null} */
  #shown = null;
  #isWhole = false;
  #text = el("div", { class: "bubble", dir: "auto" });
  #edit = iconButton("edit", "Edit and send again", () => this.edit());

  /** @param {Message} message @param {Deeds} deeds */
  constructor(message, deeds) {
    super(message, deeds, "You");
    this.actions.append(copyButton(() => this.message.content, "Copy question"), this.#edit);
    this.element.append(this.#text, this.actions);
  }

  /** @param {Message} message @param {Place} place */
  update(message, place) {
    this.message = message;
    if (this.#shown !== message.content) {
      this.#shown = message.content;
      this.#isWhole = false;
      this.#drawText();
    }
    this.#edit.disabled = place.isBusy;
    this.drawVersions(place);
  }

  /** What is very long takes the browser long to lay out, and is in the way of the answer: its beginning will do. */
  #drawText() {
    const { content } = this.message;
    if (content.length <= LONG_CHARS) {
      this.#text.textContent = content;
      return;
    }
    const label = this.#isWhole ? "Show less" : `Show all ${content.length.toLocaleString("en")} characters`;
    const click = () => {
      this.#isWhole = !this.#isWhole;
      this.#drawText();
      this.#text.querySelector("button")?.focus();
    };
    const toggle = el("button", { type: "button", class: "button", "aria-expanded": String(this.#isWhole), click }, label);
    const shown = this.#isWhole ? content : `${content.slice(0, BEGINNING_CHARS).replace(HALF_CHARACTER, "")}…`;
    this.#text.replaceChildren(shown, el("div", {}, toggle));
  }

  edit() {
    const area = el("textarea", { "aria-label": "Edit your message", rows: "3" });
    area.value = this.message.content;
    const close = () => {
      this.element.classList.remove("is-edited");
      form.replaceWith(this.#text, this.actions);
      this.#edit.focus();
    };
    const send = () => {
      const text = area.value.trim();
      close();
      if (text) this.deeds.resend(this.message, text);
    };
    const form = el(
      "form",
      { class: "edit" },
      area,
      el(
        "div",
        { class: "edit-actions" },
        el("button", { type: "button", class: "button", click: close }, "Cancel"),
        el("button", { type: "submit", class: "button is-primary" }, "Send"),
      ),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      send();
    });
    area.addEventListener("keydown", (event) => {
      if (isComposing(event)) return;
      if (event.key === "Escape") close();
      else if (event.key === "Enter" && !event.shiftKey) {
        event.preventDefault();
        send();
      } else return;
      event.stopPropagation();
    });
    this.element.classList.add("is-edited");
    this.#text.replaceWith(form);
    this.actions.remove();
    area.style.height = `${Math.min(area.scrollHeight + 4, 400)}px`;
    area.focus();
  }
}

export class AnswerView extends MessageView {
  #text = el("div", { class: "markdown" });
  #below = el("div", { class: "below" });
  #speed = el("p", { class: "speed" });
  #chances = el("div");
  #markdown;
  #drawnBelow = "";
  #wasStreaming = false;
  #wasSeenStreaming = false;
  #told = "";
  #showChances;
  #regenerate = iconButton("again", "Answer again", () => this.deeds.regenerate(this.message));

  /** @param {Message} message @param {Deeds} deeds */
  constructor(message, deeds) {
    super(message, deeds, "Answer");
    this.#showChances = iconButton("chances", "Show probabilities", () => this.#toggleChances());
    this.#showChances.setAttribute("aria-expanded", "false");
    this.#showChances.hidden = true;
    this.#markdown = new MarkdownView(this.#text, {
      settled: (block) => {
        if (this.message.state === "streaming" || this.#wasStreaming) announce(block);
      },
      isDue: deeds.redraw,
    });
    this.actions.append(
      copyButton(() => this.message.content, "Copy answer"),
      this.#regenerate,
      this.#showChances,
      this.#speed,
    );
    const body = el("div", { class: "answer-body" }, this.#text, this.#below, this.actions, this.#chances);
    this.element.append(el("div", { class: "avatar", "aria-hidden": "true" }, icon("stream")), body);
  }

  /** @param {Message} message @param {Place} place */
  update(message, place) {
    this.message = message;
    const isStreaming = message.state === "streaming";
    this.#markdown.update(message.content, !isStreaming);
    this.#wasStreaming = isStreaming;
    this.#wasSeenStreaming ||= isStreaming;
    this.element.classList.toggle("is-streaming", isStreaming && place.waiting === null);
    this.element.setAttribute("aria-busy", String(isStreaming));
    this.actions.hidden = !message.content && (isStreaming || place.count < 2);
    this.#regenerate.disabled = place.isBusy;
    this.#showChances.hidden = isStreaming || !message.chances?.length;
    const said = message.speed ? speedParts(message.speed).join(" · ") : "";
    if (this.#speed.textContent !== said) this.#speed.textContent = said;
    if (isStreaming) this.#chances.replaceChildren();
    this.#drawBelow(message, place);
    this.drawVersions(place);
  }

  /** @param {Message} message @param {Place} place */
  #drawBelow(message, { waiting, isBusy, isLast }) {
    const isOver = isLast && !isBusy;
    const drawn = JSON.stringify([waiting, message.state, message.problem, isOver, message.content === ""]);
    if (drawn === this.#drawnBelow) return;
    this.#drawnBelow = drawn;
    if (waiting?.kind === "reconnecting") announce(RECONNECTING);
    const focused = this.#below.contains(document.activeElement);
    const offers = { resume: () => this.deeds.resume(this.message), again: () => this.deeds.regenerate(this.message) };
    const retry = { label: "Try now", click: () => this.deeds.retryNow(this.message) };
    const shown = waiting ? waitingNotice(waiting, retry) : isOver ? endNotice(message, offers) : null;
    this.#tell(shown, waiting);
    this.#below.replaceChildren(...(shown ? [shown] : []));
    // A countdown draws its button anew each second.
    if (focused && waiting?.kind === "busy") this.#below.querySelector("button")?.focus();
  }

  /**
   * Says once why nothing comes, and why an answer that one has waited for is not whole.
   *
   * @param {Element | null} shown @param {Place["waiting"]} waiting
   */
  #tell(shown, waiting) {
    const text = shown?.querySelector("p")?.textContent ?? "";
    const topic = waiting?.kind === "busy" ? "busy" : text;
    if (topic && topic !== this.#told && this.#wasSeenStreaming) announce(text);
    this.#told = topic;
  }

  #toggleChances() {
    const isShown = this.#chances.hasChildNodes();
    this.#showChances.setAttribute("aria-expanded", String(!isShown));
    if (isShown) this.#chances.replaceChildren();
    else this.#chances.replaceChildren(chancesView(this.message.chances ?? []));
  }
}
