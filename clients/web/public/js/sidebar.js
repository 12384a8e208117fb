/** The list of conversations. */

import { byId, el, iconButton, isComposing } from "./dom.js";
import { dayName } from "./numbers.js";
import { prefer, preferences } from "./preferences.js";

/** @typedef {import("./types.js").Conversation} Conversation */
/** @typedef {{id: string | null, place: number, button: number}} Focus */

const NARROW = matchMedia("(max-width: 760px)");

export class Sidebar {
  #list = byId("conversations", HTMLElement);
  #nav = byId("sidebar", HTMLElement);
  #pane = byId("pane", HTMLElement);
  #toggle = byId("sidebar-toggle", HTMLButtonElement);
  /** @type {string | null} */
  #renamed = null;
  #draw = () => {};
  /** What is drawn, by conversation. @type {Map<string, {look: string, item: HTMLElement}>} */
  #items = new Map();
  #order = "";

  /**
   * @param {object} deeds
   * @param {() => void} deeds.begin
   * @param {(id: string) => void} deeds.open
   * @param {(id: string, title: string) => void} deeds.rename
   * @param {(conversation: Conversation) => void} deeds.remove
   */
  constructor(deeds) {
    this.deeds = deeds;
    byId("new-chat", HTMLButtonElement).addEventListener("click", () => {
      deeds.begin();
      this.closeIfNarrow();
    });
    this.#toggle.addEventListener("click", () => this.show(!this.isShown));
    byId("sidebar-close", HTMLButtonElement).addEventListener("click", () => this.show(false));
    byId("scrim", HTMLElement).addEventListener("click", () => this.show(false));
    this.#nav.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && NARROW.matches) this.show(false);
    });
    NARROW.addEventListener("change", () => this.#apply(!NARROW.matches && preferences().isSidebarShown));
    this.#apply(!NARROW.matches && preferences().isSidebarShown);
  }

  get isShown() {
    return !this.#nav.hidden;
  }

  /** @param {boolean} isShown */
  show(isShown) {
    this.#apply(isShown);
    if (!NARROW.matches) prefer({ isSidebarShown: isShown });
    if (isShown) byId("new-chat", HTMLButtonElement).focus();
    else this.#toggle.focus();
  }

  closeIfNarrow() {
    if (NARROW.matches && this.isShown) this.#apply(false);
  }

  /** @param {boolean} isShown */
  #apply(isShown) {
    this.#nav.hidden = !isShown;
    this.#toggle.setAttribute("aria-expanded", String(isShown));
    this.#toggle.hidden = isShown && !NARROW.matches;
    // On a phone the list lies over the page, which must not be reached beneath it.
    this.#pane.inert = isShown && NARROW.matches;
    byId("scrim", HTMLElement).hidden = !this.#pane.inert;
  }

  /**
   * @param {readonly Conversation[]} conversations
   * @param {string | null} current
   * @param {ReadonlySet<string>} busy  those in which an answer is being made
   * @param {boolean} isSearched  they are those that were looked for
   */
  draw(conversations, current, busy, isSearched) {
    this.#draw = () => this.draw(conversations, current, busy, isSearched);
    const focus = this.#focus();
    // What is being typed is not drawn away.
    if (this.#renamed !== null && this.#list.querySelector("input")) return;
    const now = new Date();
    /** @type {Map<string, HTMLElement[]>} */
    const days = new Map();
    const before = this.#items;
    this.#items = new Map();
    for (const each of conversations) {
      const look = JSON.stringify([each.title, each.id === current, busy.has(each.id)]);
      const kept = before.get(each.id);
      const item = kept?.look === look ? kept.item : this.#item(each, each.id === current, busy.has(each.id));
      this.#items.set(each.id, { look, item });
      const day = dayName(each.updatedAt, now);
      const items = days.get(day);
      if (items) items.push(item);
      else days.set(day, [item]);
    }
    const hint = isSearched ? "No conversation has that in it." : "Conversations are listed here.";
    const order = JSON.stringify([hint, [...days].map(([day, items]) => [day, items.map((item) => item.dataset.conversation)])]);
    if (order === this.#order) {
      // Of hundreds of conversations, one or two look different now.
      for (const [id, { item }] of this.#items) if (before.get(id)?.item !== item) before.get(id)?.item.replaceWith(item);
      this.#giveFocus(focus);
      return;
    }
    this.#order = order;
    const groups = [...days].map(([day, items]) =>
      el("section", {}, el("h2", {}, day), el("ul", { role: "list" }, ...items)),
    );
    const nothing = el("p", { class: "hint" }, hint);
    this.#list.replaceChildren(...(groups.length ? groups : [nothing]));
    this.#giveFocus(focus);
  }

  /** @param {Focus | null} focus */
  #giveFocus(focus) {
    if (!focus || this.#list.contains(document.activeElement)) return;
    const items = [...this.#list.querySelectorAll("[data-conversation]")];
    // Of one that was deleted, it goes to the one that has its place.
    const item = items.find((each) => each.getAttribute("data-conversation") === focus.id) ?? items[focus.place] ?? items.at(-1);
    const button = item ? item.querySelectorAll("button")[focus.button] : byId("new-chat", HTMLButtonElement);
    button?.focus();
  }

  /** @returns {Focus | null} where in the list the focus is */
  #focus() {
    const focused = document.activeElement;
    const item = focused?.closest("[data-conversation]");
    if (!focused || !item || !this.#list.contains(item)) return null;
    return {
      id: item.getAttribute("data-conversation"),
      place: [...this.#list.querySelectorAll("[data-conversation]")].indexOf(item),
      button: Math.max(0, [...item.querySelectorAll("button")].findIndex((each) => each === focused)),
    };
  }

  /** @param {Conversation} conversation @param {boolean} isCurrent @param {boolean} isBusy */
  #item(conversation, isCurrent, isBusy) {
    const open = () => {
      this.deeds.open(conversation.id);
      this.closeIfNarrow();
    };
    const title = el("button", { type: "button", class: "conversation", dir: "auto", click: open }, conversation.title);
    title.title = conversation.title;
    if (isCurrent) title.setAttribute("aria-current", "page");
    const rename = iconButton("edit", `Rename ${conversation.title}`, () => this.#rename(conversation, item));
    const remove = iconButton("trash", `Delete ${conversation.title}`, () => this.deeds.remove(conversation));
    const live = isBusy ? el("span", { class: "live", role: "img", "aria-label": "being answered" }) : null;
    const item = el("li", { "data-conversation": conversation.id }, title, live, rename, remove);
    item.classList.toggle("is-current", isCurrent);
    return item;
  }

  /** @param {Conversation} conversation @param {HTMLElement} item */
  #rename(conversation, item) {
    this.#renamed = conversation.id;
    // What stands there now is no item any more, and is drawn anew.
    const drawn = this.#items.get(conversation.id);
    if (drawn) drawn.look = "";
    const input = el("input", { type: "text", "aria-label": "New name", maxlength: "200", dir: "auto" });
    input.value = conversation.title;
    /** @param {boolean} isWanted */
    const end = (isWanted) => {
      if (this.#renamed === null) return;
      this.#renamed = null;
      const title = input.value.trim();
      if (isWanted && title && title !== conversation.title) this.deeds.rename(conversation.id, title);
      this.#draw();
      const again = this.#list.querySelector(`[data-conversation="${conversation.id}"] button`);
      if (again instanceof HTMLElement) again.focus();
    };
    input.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (isComposing(event)) return;
      if (event.key === "Enter") end(true);
      if (event.key === "Escape") end(false);
    });
    input.addEventListener("blur", () => end(true));
    item.replaceChildren(input);
    input.select();
  }
}
