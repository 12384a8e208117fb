/**
 * A conversation is a tree: an edited question or a new answer is a sibling of the old one, and nothing is ever
 * overwritten. So tabs that write at the same time only add to each other.
 */

/** @typedef {import("./types.js").Message} Message */
/** @typedef {Map<string, Message>} Messages */

/** @param {Message} a @param {Message} b */
function byAge(a, b) {
  return a.createdAt - b.createdAt || (a.id < b.id ? -1 : 1);
}

/**
 * @param {Messages} messages
 * @param {string | null} leaf
 * @returns {Message[]} from the first message to `leaf`
 */
export function pathTo(messages, leaf) {
  /** @type {Message[]} */
  const path = [];
  let at = leaf === null ? undefined : messages.get(leaf);
  while (at && path.length <= messages.size) {
    path.push(at);
    at = at.parent === null ? undefined : messages.get(at.parent);
  }
  return path.reverse();
}

/**
 * @param {Messages} messages
 * @returns {Map<string | null, Message[]>} for each message the versions of what follows it, the oldest first
 */
export function versionsByParent(messages) {
  /** @type {Map<string | null, Message[]>} */
  const versions = new Map();
  for (const message of messages.values()) {
    const siblings = versions.get(message.parent);
    if (siblings) siblings.push(message);
    else versions.set(message.parent, [message]);
  }
  for (const siblings of versions.values()) siblings.sort(byAge);
  return versions;
}

/**
 * @param {Messages} messages
 * @param {string | null} from
 * @returns {string | null} the end of the branch through `from` in which something was said last
 */
export function leafUnder(messages, from) {
  const versions = versionsByParent(messages);
  const isStart = (/** @type {Message} */ { id, parent }) =>
    from === null ? parent === null || !messages.has(parent) : id === from;
  // Each message is looked at once, however long the conversation.
  let level = [...messages.values()].filter(isStart);
  /** @type {{depth: number, message: Message} | null} */
  let best = null;
  for (let depth = 0; level.length && depth <= messages.size; depth += 1) {
    for (const message of level) {
      // A question and its answer may be of the same millisecond.
      const order = best ? message.createdAt - best.message.createdAt || depth - best.depth : 1;
      if (order > 0 || (order === 0 && best && message.id > best.message.id)) best = { depth, message };
    }
    level = level.flatMap(({ id }) => versions.get(id) ?? []);
  }
  return best ? best.message.id : from;
}
