/** The messages of a conversation, and where in them the reader is. */

import { el, icon } from "./dom.js";
import { AnswerView, QuestionView } from "./message_view.js";

/** @typedef {import("./types.js").Message} Message */
/** @typedef {import("./message_view.js").Place} Place */

// As close to the end as this counts as being there.
const NEAR_PX = 60;

const SUGGESTIONS = [
  ["Explain", "how a rainbow forms, in three short paragraphs"],
  ["Write", "a Python function that reverses the words of a sentence"],
  ["Compare", "tea and coffee in a small table"],
  ["List", "five ideas for a rainy afternoon"],
];

export class ThreadView {
  /** @type {Map<string, QuestionView | AnswerView>} */
  #views = new Map();
  #list = el("div", { class: "messages" });
  #welcome;
  #isFollowing = true;
  /** Where the reader was last. */
  #seen = { top: 0, height: 0, visible: 0 };

  /**
   * @param {HTMLElement} scroller
   * @param {HTMLButtonElement} toEnd  a button that is shown while there is more below
   * @param {import("./message_view.js").Deeds} deeds
   * @param {(text: string) => void} suggest
   */
  constructor(scroller, toEnd, deeds, suggest) {
    this.scroller = scroller;
    this.toEnd = toEnd;
    this.deeds = deeds;
    this.#welcome = welcome(suggest);
    scroller.append(this.#list, this.#welcome);
    // Whoever scrolls up wants to read there, however fast text comes in.
    scroller.addEventListener("scroll", () => this.#hearScroll(), { passive: true });
    toEnd.addEventListener("click", () => this.follow());
    new ResizeObserver(() => this.#keepUp()).observe(scroller);
  }

  /** Goes to the end, and stays there. */
  follow() {
    this.#isFollowing = true;
    this.#keepUp();
  }

  /** Edits the last question, if there is one. */
  editLast() {
    [...this.#views.values()].findLast((view) => view instanceof QuestionView)?.edit();
  }

  /**
   * @param {readonly Message[]} path
   * @param {(message: Message) => Place} placeOf
   */
  draw(path, placeOf) {
    this.#welcome.hidden = path.length > 0;
    const shown = new Set(path.map((message) => message.id));
    for (const [id, view] of this.#views) {
      if (shown.has(id)) continue;
      view.element.remove();
      this.#views.delete(id);
    }
    /** @type {Element | null} */
    let before = null;
    for (const message of path) {
      const view = this.#viewOf(message);
      /** @type {Element | null} */
      const wanted = before ? before.nextElementSibling : this.#list.firstElementChild;
      if (wanted !== view.element) this.#list.insertBefore(view.element, wanted);
      view.update(message, placeOf(message));
      before = view.element;
    }
    this.#keepUp();
  }

  /** @param {Message} message */
  #viewOf(message) {
    let view = this.#views.get(message.id);
    if (!view) {
      view = message.role === "user" ? new QuestionView(message, this.deeds) : new AnswerView(message, this.deeds);
      this.#views.set(message.id, view);
    }
    return view;
  }

  #hearScroll() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    const { top, height, visible } = this.#seen;
    const gap = scrollHeight - scrollTop - clientHeight;
    // Less text or more room moves the place too; a reader is who goes up without either, be it by one line.
    const goesUp = scrollTop < top - 1 && scrollHeight >= height && clientHeight <= visible;
    if (goesUp) this.#isFollowing = gap < 1;
    else if (scrollTop > top && gap < NEAR_PX) this.#isFollowing = true;
    this.#look();
  }

  #keepUp() {
    if (this.#isFollowing) this.scroller.scrollTop = this.scroller.scrollHeight;
    this.#look();
  }

  #look() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    this.#seen = { top: scrollTop, height: scrollHeight, visible: clientHeight };
    const gap = scrollHeight - scrollTop - clientHeight;
    if (gap < 1) this.#isFollowing = true;
    this.toEnd.hidden = this.#isFollowing || gap < NEAR_PX;
  }
}

/** @param {(text: string) => void} suggest */
function welcome(suggest) {
  const cards = SUGGESTIONS.map(([verb = "", rest = ""]) =>
    el("button", { type: "button", class: "card", click: () => suggest(`${verb} ${rest}`) }, el("b", {}, verb), ` ${rest}`),
  );
  const head = el("h2", {}, "What is on your mind?");
  const text = el("p", {}, "Conversations are kept in this browser.");
  return el("div", { class: "welcome" }, icon("stream"), head, text, el("div", { class: "cards" }, ...cards));
}
