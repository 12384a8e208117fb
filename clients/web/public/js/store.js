/**
 * Where conversations are kept: IndexedDB, which all tabs share.
 *
 * Each message is a record of its own and has one writer. What a conversation itself says (title, settings) is
 * changed field by field within a transaction. So no tab writes what it has not changed, and each is told what the
 * others did.
 */

import { conversationOf, messageOf } from "./records.js";

/** @typedef {import("./types.js").Conversation} Conversation */
/** @typedef {import("./types.js").Message} Message */
/** @typedef {"conversations" | "messages"} TableName */

const NAME = "streamserve";
const VERSION = 1;
// Messages that are read at a time where all are looked at.
const BATCH = 100;

/** @returns {string} 128 random bits (crypto.randomUUID is there on HTTPS only) */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/**
 * @template T
 * @param {IDBRequest<T>} request
 * @returns {Promise<T>}
 */
function result(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/**
 * @param {IDBTransaction} transaction
 * @returns {Promise<void>} rejects if it is not committed, for lack of room as a rule
 */
function committed(transaction) {
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onabort = () => reject(transaction.error);
  });
}

/** @returns {Promise<IDBDatabase>} */
async function open() {
  const request = indexedDB.open(NAME, VERSION);
  request.onupgradeneeded = () => {
    request.result.createObjectStore("conversations", { keyPath: "id" });
    const messages = request.result.createObjectStore("messages", { keyPath: "id" });
    messages.createIndex("conversation", "conversation");
  };
  return result(request);
}

/**
 * What the browser does not take, because it keeps nothing or has no room, is held here while the page is open, and
 * read as if it were kept.
 */
export class Store {
  #database;
  #tellKept;
  #channel = new BroadcastChannel(NAME);
  /** @type {{conversations: Map<string, Conversation>, messages: Map<string, Message>}} */
  #held = { conversations: new Map(), messages: new Map() };

  /**
   * @param {IDBDatabase | null} database
   * @param {(error: unknown) => void} tellKept  is told why something is not kept; null when all is
   */
  constructor(database, tellKept) {
    this.#database = database;
    this.#tellKept = tellKept;
    // A newer page in another tab may want to change the form of what is kept.
    if (database) database.onversionchange = () => database.close();
  }

  /** @param {(error: unknown) => void} tellKept  is told why something is not kept; null when all is */
  static async open(tellKept) {
    try {
      return new Store(await open(), tellKept);
    } catch (error) {
      tellKept(error);
      return new Store(null, tellKept);
    }
  }

  /**
   * @param {object} heard  what other tabs say
   * @param {(conversation: string) => void} heard.changed
   * @param {(message: string) => void} heard.stopped  the answer is not wanted any more
   */
  listen(heard) {
    this.#channel.onmessage = ({ data }) => {
      if ("changed" in data) heard.changed(data.changed);
      else heard.stopped(data.stopped);
    };
  }

  /** @param {string} message  an answer that another tab makes */
  askToStop(message) {
    this.#channel.postMessage({ stopped: message });
  }

  /** @returns {Promise<Conversation[]>} those that are not deleted, the latest first */
  async conversations() {
    const kept = await this.#read(() => this.#table("conversations").getAll());
    const all = new Map(kept.map(conversationOf).flatMap((each) => (each ? [[each.id, each]] : [])));
    for (const each of this.#held.conversations.values()) all.set(each.id, { ...each });
    return [...all.values()].filter((each) => each.deletedAt === null).sort((a, b) => b.updatedAt - a.updatedAt);
  }

  /**
   * @param {string} conversation
   * @returns {Promise<Message[]>}
   */
  async messages(conversation) {
    const kept = await this.#read(() => this.#table("messages").index("conversation").getAll(conversation));
    const all = new Map(kept.map(messageOf).flatMap((each) => (each ? [[each.id, each]] : [])));
    for (const each of this.#held.messages.values()) {
      if (each.conversation === conversation) all.set(each.id, { ...each });
    }
    return [...all.values()];
  }

  /**
   * @param {string} text
   * @returns {Promise<Set<string>>} conversations in which somebody has said it, in large letters or small
   */
  async mentions(text) {
    const wanted = text.toLowerCase();
    /** @type {Set<string>} */
    const found = new Set();
    /** @param {readonly unknown[]} kept */
    const look = (kept) => {
      for (const message of kept.map(messageOf)) {
        if (message && !found.has(message.conversation) && message.content.toLowerCase().includes(wanted)) {
          found.add(message.conversation);
        }
      }
    };
    look([...this.#held.messages.values()]);
    let after = "";
    for (;;) {
      // All at once they may be more than there is memory for.
      const kept = await this.#read(() => this.#table("messages").getAll(IDBKeyRange.lowerBound(after, true), BATCH));
      look(kept);
      if (kept.length < BATCH) return found;
      after = kept.at(-1).id;
    }
  }

  /** @param {Conversation} conversation  a new one */
  async add(conversation) {
    await this.#write(this.#held.conversations, { ...conversation }, () => {
      const table = this.#table("conversations", "readwrite");
      table.put(conversation);
      return committed(table.transaction);
    });
    this.#tell(conversation.id);
  }

  /**
   * Changes fields of a conversation and leaves the others as whoever wrote them last.
   *
   * @param {string} id
   * @param {Partial<Conversation>} fields
   */
  async change(id, fields) {
    const held = this.#held.conversations.get(id);
    const [kept = held] = held ? [] : await this.#read(async () => [conversationOf(await result(this.#table("conversations").get(id)))]);
    if (!kept) return;
    await this.#write(this.#held.conversations, { ...kept, ...fields }, async () => {
      const table = this.#table("conversations", "readwrite");
      const done = committed(table.transaction);
      const now = held ?? (await result(table.get(id)));
      if (now) table.put({ ...now, ...fields });
      await done;
    });
    this.#tell(id);
  }

  /**
   * Request and commit are made at once, so they still count when the page is about to go.
   *
   * @param {Message} message  new, or one that this tab writes
   */
  async save(message) {
    await this.#write(this.#held.messages, { ...message }, () => {
      const table = this.#table("messages", "readwrite");
      table.put(message);
      table.transaction.commit();
      return committed(table.transaction);
    });
    this.#tell(message.conversation);
  }

  /**
   * Makes an unfinished answer this tab's own, if it is as it was when it was looked at: of several tabs one does so.
   *
   * @param {Message} seen
   * @param {string} owner
   * @returns {Promise<Message | null>} null if another one was faster
   */
  async claim({ id, owner: before, savedAt }, owner) {
    const [claimed] = await this.#read(async () => {
      const table = this.#table("messages", "readwrite");
      const done = committed(table.transaction);
      const now = messageOf(await result(table.get(id)));
      if (now?.state !== "streaming" || now.owner !== before || now.savedAt !== savedAt) return [];
      const mine = { ...now, owner, savedAt: Date.now() };
      table.put(mine);
      await done;
      return [mine];
    });
    if (claimed) this.#tell(claimed.conversation);
    return claimed ?? null;
  }

  /** @param {number} before  what was deleted earlier than that is gone for good */
  async purge(before) {
    for (const [id, { deletedAt }] of this.#held.conversations) {
      if (deletedAt !== null && deletedAt < before) this.#held.conversations.delete(id);
    }
    await this.#read(async () => {
      const transaction = this.#open().transaction(["conversations", "messages"], "readwrite");
      const conversations = transaction.objectStore("conversations");
      const messages = transaction.objectStore("messages");
      for (const { id, deletedAt } of await result(conversations.getAll())) {
        if (typeof deletedAt !== "number" || deletedAt >= before) continue;
        conversations.delete(id);
        for (const message of await result(messages.index("conversation").getAllKeys(id))) messages.delete(message);
      }
      return [];
    });
  }

  /** @returns {IDBDatabase} */
  #open() {
    if (!this.#database) throw new Error("This browser keeps nothing for the page.");
    return this.#database;
  }

  /** @param {TableName} name @param {IDBTransactionMode} [mode] */
  #table(name, mode = "readonly") {
    return this.#open().transaction(name, mode).objectStore(name);
  }

  /**
   * @template T
   * @param {() => IDBRequest<T[]> | Promise<T[]>} read
   * @returns {Promise<T[]>} nothing, where nothing is kept
   */
  async #read(read) {
    try {
      const found = read();
      return await (found instanceof IDBRequest ? result(found) : found);
    } catch {
      return [];
    }
  }

  /**
   * @template {{id: string}} T
   * @param {Map<string, T>} held
   * @param {T} record
   * @param {() => Promise<void>} write
   */
  async #write(held, record, write) {
    try {
      await write();
      held.delete(record.id);
      await this.#writeHeld();
    } catch (error) {
      held.set(record.id, record);
      this.#tellKept(error);
    }
  }

  /** There was room just now, so there may be for what found none before. */
  async #writeHeld() {
    const { conversations, messages } = this.#held;
    if (!conversations.size && !messages.size) return;
    const transaction = this.#open().transaction(["conversations", "messages"], "readwrite");
    const done = committed(transaction);
    const written = /** @type {const} */ ([
      ["conversations", conversations, [...conversations.values()]],
      ["messages", messages, [...messages.values()]],
    ]);
    for (const [name, , records] of written) {
      for (const record of records) transaction.objectStore(name).put(record);
    }
    try {
      await done;
    } catch {
      return;
    }
    // Those that have changed since are other records, which have their own way here.
    for (const [, held, records] of written) {
      for (const record of records) if (held.get(record.id) === record) held.delete(record.id);
    }
    if (!conversations.size && !messages.size) this.#tellKept(null);
  }

  /** @param {string} conversation */
  #tell(conversation) {
    this.#channel.postMessage({ changed: conversation });
  }
}
