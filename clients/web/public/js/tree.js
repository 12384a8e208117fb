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
    path.unshift(at);
    at = at.parent === null ? undefined : messages.get(at.parent);
  }
  return path;
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
  /** @type {{depth: number, message: Message} | null} */
  let best = null;
  for (const message of messages.values()) {
    const path = pathTo(messages, message.id);
    if (from !== null && !path.some((each) => each.id === from)) continue;
    // A question and its answer may be of the same millisecond.
    const order = best ? message.createdAt - best.message.createdAt || path.length - best.depth : 1;
    if (order > 0 || (order === 0 && best && message.id > best.message.id)) best = { depth: path.length, message };
  }
  return best ? best.message.id : from;
}
