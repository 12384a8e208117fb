/**
 * Where conversations are kept: IndexedDB, which all tabs share.
 *
 * Each message is a record of its own and has one writer. What a conversation itself says (title, settings) is
 * changed field by field within a transaction. So no tab writes what it has not changed, and each is told what the
 * others did.
 */

/** @typedef {import("./types.js").Conversation} Conversation */
/** @typedef {import("./types.js").Message} Message */
/** @typedef {"conversations" | "messages"} TableName */

const NAME = "streamserve";
const VERSION = 1;

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

/** @returns {Promise<IDBDatabase>} */
function open() {
  const request = indexedDB.open(NAME, VERSION);
  request.onupgradeneeded = () => {
    request.result.createObjectStore("conversations", { keyPath: "id" });
    const messages = request.result.createObjectStore("messages", { keyPath: "id" });
    messages.createIndex("conversation", "conversation");
  };
  return result(request);
}

export class Store {
  #database;
  #channel = new BroadcastChannel(NAME);

  /** @param {IDBDatabase} database */
  constructor(database) {
    this.#database = database;
    // A newer page in another tab may want to change the form of what is kept.
    database.onversionchange = () => database.close();
  }

  static async open() {
    return new Store(await open());
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
    const all = await result(this.#table("conversations").getAll());
    return all
      .filter((/** @type {Conversation} */ each) => each.deletedAt === null)
      .sort((/** @type {Conversation} */ a, /** @type {Conversation} */ b) => b.updatedAt - a.updatedAt);
  }

  /**
   * @param {string} conversation
   * @returns {Promise<Message[]>}
   */
  messages(conversation) {
    return result(this.#table("messages").index("conversation").getAll(conversation));
  }

  /** @param {Conversation} conversation  a new one */
  async add(conversation) {
    await result(this.#table("conversations", "readwrite").put(conversation));
    this.#tell(conversation.id);
  }

  /**
   * Changes fields of a conversation and leaves the others as whoever wrote them last.
   *
   * @param {string} id
   * @param {Partial<Conversation>} fields
   */
  async change(id, fields) {
    const table = this.#table("conversations", "readwrite");
    const now = await result(table.get(id));
    if (!now) return;
    await result(table.put({ ...now, ...fields }));
    this.#tell(id);
  }

  /**
   * Request and commit are made at once, so they still count when the page is about to go.
   *
   * @param {Message} message  new, or one that this tab writes
   */
  async save(message) {
    const table = this.#table("messages", "readwrite");
    const saved = result(table.put(message));
    table.transaction.commit();
    await saved;
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
    const table = this.#table("messages", "readwrite");
    /** @type {Message | undefined} */
    const now = await result(table.get(id));
    if (now?.state !== "streaming" || now.owner !== before || now.savedAt !== savedAt) return null;
    const claimed = { ...now, owner, savedAt: Date.now() };
    await result(table.put(claimed));
    this.#tell(claimed.conversation);
    return claimed;
  }

  /** @param {number} before  what was deleted earlier than that is gone for good */
  async purge(before) {
    const transaction = this.#database.transaction(["conversations", "messages"], "readwrite");
    const conversations = transaction.objectStore("conversations");
    const messages = transaction.objectStore("messages");
    for (const { id, deletedAt } of await result(conversations.getAll())) {
      if (deletedAt === null || deletedAt >= before) continue;
      conversations.delete(id);
      for (const message of await result(messages.index("conversation").getAllKeys(id))) {
        messages.delete(message);
      }
    }
  }

  /** @param {TableName} name @param {IDBTransactionMode} [mode] */
  #table(name, mode = "readonly") {
    return this.#database.transaction(name, mode).objectStore(name);
  }

  /** @param {string} conversation */
  #tell(conversation) {
    this.#channel.postMessage({ changed: conversation });
  }
}
