/** The conversation that is open in this tab, and all answers that this tab is making. */

import { Answering } from "./answering.js";
import { requestBody, titleOf } from "./request.js";
import { newId } from "./store.js";
import { STALE_MS, Tab } from "./tab.js";
import { leafUnder, pathTo, versionsByParent } from "./tree.js";

/** @typedef {import("./types.js").Conversation} Conversation */
/** @typedef {import("./types.js").Message} Message */

// Far longer than any server keeps a stream that nobody reads.
const FRESH_MS = 3_600_000;

export class Conversations {
  /** @type {Conversation[]} */
  list = [];
  /** @type {Conversation} */
  current;
  /** @type {Map<string, Message>} */
  messages = new Map();
  /** @type {Map<string, Answering>} */
  #live = new Map();
  /** @type {Set<Conversation>} */
  #unstored = new Set();
  #tab = new Tab();

  /**
   * @param {import("./store.js").Store} store
   * @param {object} around
   * @param {() => {system: string, sampling: import("./types.js").Sampling}} around.defaults  of new ones
   * @param {() => {model: string, wantsChances: boolean}} around.wishes
   * @param {() => import("./types.js").Transport} around.transport
   * @param {() => Promise<boolean>} around.askKey
   * @param {() => void} around.changed
   */
  constructor(store, around) {
    this.store = store;
    this.around = around;
    this.current = this.#draft();
    store.listen({
      changed: (conversation) => this.#hear(conversation),
      stopped: (message) => this.#live.get(message)?.stop(),
    });
    addEventListener("pagehide", () => this.#leave());
    // A page that a browser has put aside and shows again has no connections any more.
    addEventListener("pageshow", ({ persisted }) => persisted && location.reload());
  }

  /** @returns {Conversation} one that nobody has said anything in yet; it is kept once somebody does */
  #draft() {
    const now = Date.now();
    const { system, sampling } = this.around.defaults();
    return { id: newId(), title: "New chat", system, sampling, leaf: null, createdAt: now, updatedAt: now, deletedAt: null };
  }

  get isDraft() {
    return !this.list.some((each) => each.id === this.current.id);
  }

  /** @returns {Message[]} what is shown */
  get path() {
    return pathTo(this.messages, this.current.leaf);
  }

  /** @returns {ReadonlySet<string>} conversations in which this tab makes an answer */
  get busy() {
    return new Set([...this.#live.values()].map((answering) => answering.message.conversation));
  }

  /** @returns {boolean} whether an answer of the open one is being made, here or in another tab */
  get isBusy() {
    return this.path.some((message) => message.state === "streaming");
  }

  /** @param {Message} message */
  waiting(message) {
    return this.#live.get(message.id)?.waiting ?? null;
  }

  /** @param {string | null} id  opened if it is there, once what is kept has been read */
  async load(id) {
    await this.#tab.isHere;
    this.list = await this.store.conversations();
    await this.open(id);
    const since = Date.now() - FRESH_MS;
    for (const each of this.list) if (each.updatedAt > since && each.id !== id) await this.#read(each.id);
  }

  begin() {
    this.current = this.#draft();
    this.messages = new Map();
    this.around.changed();
  }

  /** @param {string | null} id */
  async open(id) {
    const found = this.list.find((each) => each.id === id);
    if (!found) {
      this.begin();
      return;
    }
    const messages = await this.#read(found.id);
    this.current = found;
    this.messages = messages;
    this.current.leaf ??= leafUnder(messages, null);
    this.around.changed();
  }

  /** @param {string} text  @returns {Promise<Set<string>>} those that have it in their title, or in what was said */
  async find(text) {
    const found = await this.store.mentions(text);
    const wanted = text.toLowerCase();
    return new Set(
      this.list.filter(({ id, title }) => found.has(id) || title.toLowerCase().includes(wanted)).map(({ id }) => id),
    );
  }

  /** @param {string} id @param {string} title */
  async rename(id, title) {
    await this.#change(id, { title });
  }

  /** @param {string} id @param {number | null} deletedAt  null brings it back */
  async remove(id, deletedAt) {
    if (deletedAt !== null) {
      for (const answering of this.#live.values()) {
        if (answering.message.conversation === id) answering.stop();
      }
    }
    await this.store.change(id, { deletedAt });
    this.list = await this.store.conversations();
    if (deletedAt !== null && id === this.current.id) this.begin();
    this.around.changed();
  }

  /** @param {{system: string, sampling: import("./types.js").Sampling}} settings */
  async configure(settings) {
    Object.assign(this.current, settings);
    if (!this.isDraft) await this.#change(this.current.id, settings);
  }

  /** @param {string} text @param {string | null} [parent]  what it follows; the last message by default */
  async send(text, parent = this.current.leaf) {
    const { current } = this;
    if (this.isDraft) {
      current.title = titleOf(text);
      this.list = [current, ...this.list];
      this.#unstored.add(current);
      const stored = this.store.add(current).finally(() => this.#unstored.delete(current));
      await this.#answer([this.#message("user", parent, text)], stored);
    } else {
      await this.#answer([this.#message("user", parent, text)]);
    }
  }

  /** @param {Message} answer  of which there is to be another version */
  async regenerate(answer) {
    await this.#answer([], Promise.resolve(), answer.parent);
  }

  /**
   * Adds questions and their answer at once, so that nobody sees one without the other, and has the answer made.
   *
   * @param {Message[]} questions
   * @param {Promise<void>} [before]  what has to be stored first
   * @param {string | null} [parent]  what is answered
   */
  async #answer(questions, before = Promise.resolve(), parent = questions.at(-1)?.id ?? null) {
    for (const question of questions) this.messages.set(question.id, question);
    const body = this.#body(pathTo(this.messages, parent), false);
    const answer = this.#message("assistant", parent, "");
    answer.state = "streaming";
    this.messages.set(answer.id, answer);
    const { id } = this.current;
    const fields = { leaf: answer.id, updatedAt: answer.createdAt };
    Object.assign(this.current, fields);
    const run = this.#run(answer, body);
    await before;
    await Promise.all([...questions, answer].map((message) => this.store.save({ ...message })));
    await this.#change(id, fields);
    await run;
  }

  /** @param {Message} answer  goes on where it stopped */
  async resume(answer) {
    answer.owner = this.#tab.id;
    await this.#run(answer, this.#body(pathTo(this.messages, answer.id), true));
  }

  /** @param {Message} message @param {-1 | 1} step */
  async turn(message, step) {
    const versions = versionsByParent(this.messages).get(message.parent) ?? [];
    const version = versions[versions.indexOf(message) + step];
    if (!version) return;
    this.current.leaf = leafUnder(this.messages, version.id);
    this.around.changed();
    await this.store.change(this.current.id, { leaf: this.current.leaf });
  }

  /** Ends the answer that is shown being made, whichever tab makes it. */
  stop() {
    for (const { id, state } of this.path) {
      if (state !== "streaming") continue;
      const own = this.#live.get(id);
      if (own) own.stop();
      else this.store.askToStop(id);
    }
  }

  /** @param {Message} message */
  retryNow(message) {
    this.#live.get(message.id)?.retryNow();
  }

  /** @param {Message[]} path @param {boolean} continuesLast */
  #body(path, continuesLast) {
    const { model, wantsChances } = this.around.wishes();
    return requestBody(model, this.current, path, { wantsChances, continuesLast });
  }

  /** @param {"user" | "assistant"} role @param {string | null} parent @param {string} content @returns {Message} */
  #message(role, parent, content) {
    const now = Date.now();
    return {
      id: newId(),
      conversation: this.current.id,
      parent,
      role,
      content,
      createdAt: now,
      state: "done",
      owner: this.#tab.id,
      savedAt: now,
      problem: null,
      model: this.around.wishes().model,
      speed: null,
      chances: null,
    };
  }

  /** @param {Message} message @param {import("./types.js").Body | null} body */
  async #run(message, body) {
    const answering = new Answering({
      message,
      body,
      transport: this.around.transport(),
      askKey: this.around.askKey,
      changed: this.around.changed,
      save: () => this.#save(message),
    });
    this.#live.set(message.id, answering);
    try {
      await answering.run();
    } finally {
      this.#live.delete(message.id);
      this.around.changed();
    }
  }

  /** @param {Message} message */
  #save(message) {
    message.savedAt = Date.now();
    return this.store.save({ ...message });
  }

  /** @param {string} id @param {Partial<Conversation>} fields */
  async #change(id, fields) {
    const listed = this.list.find((each) => each.id === id);
    if (listed) Object.assign(listed, fields);
    this.list.sort((a, b) => b.updatedAt - a.updatedAt);
    this.around.changed();
    await this.store.change(id, fields);
  }

  /** @param {string} id @returns {Promise<Map<string, Message>>} what is kept, and what this tab is adding to it */
  async #read(id) {
    const messages = new Map((await this.store.messages(id)).map((message) => [message.id, message]));
    for (const [key, message] of messages) {
      const own = message.owner === this.#tab.id ? this.messages.get(key) : undefined;
      const newer = this.#live.get(key)?.message ?? own;
      if (newer) messages.set(key, newer);
      else if (message.state !== "streaming") continue;
      else if (!(await this.#tab.isGone(message.owner, message.savedAt))) setTimeout(() => this.#hear(id), STALE_MS + 1000);
      else if (message.stream) this.#takeUp(message);
      else message.state = "lost";
    }
    return messages;
  }

  /** @param {Message} left  an answer whose page is gone, and whose stream may go on */
  async #takeUp(left) {
    const message = await this.store.claim(left, this.#tab.id);
    if (!message?.stream) return;
    message.stream.isKept = true;
    if (message.conversation === this.current.id) this.messages.set(message.id, message);
    await this.#run(message, null);
  }

  /** @param {string} id  what another tab has changed */
  async #hear(id) {
    const list = [...this.#unstored, ...(await this.store.conversations())];
    for (const answering of this.#live.values()) {
      if (!list.some((each) => each.id === answering.message.conversation)) answering.stop();
    }
    const { leaf } = this.current;
    const isOpen = id === this.current.id;
    const messages = isOpen ? await this.#read(id) : null;
    this.list = list;
    const stored = list.find((each) => each.id === this.current.id);
    if (messages && isOpen && id === this.current.id) {
      if (!stored) return this.begin();
      // Each tab looks at the branch that it has chosen, and follows what is added to its end.
      this.current = { ...stored, leaf: leafUnder(messages, leaf) };
      this.list = list.map((each) => (each.id === id ? this.current : each));
      // What this tab has added meanwhile may not have been stored when they were read.
      for (const [key, message] of this.messages) {
        if (!messages.has(key) && message.owner === this.#tab.id) messages.set(key, message);
      }
      this.messages = messages;
    }
    this.around.changed();
  }

  /** The page goes away. Its answers go with it, or can be taken up by the next page. */
  #leave() {
    for (const { message } of this.#live.values()) {
      this.store.save({ ...message, state: message.stream ? "streaming" : "lost", savedAt: 0 });
    }
  }
}
