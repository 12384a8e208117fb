/** What was kept by another version of the page, or by somebody else, made into what this one can show. */

/** @typedef {import("./types.js").Conversation} Conversation */
/** @typedef {import("./types.js").Message} Message */
/** @typedef {import("./types.js").Sampling} Sampling */

const STATES = ["streaming", "done", "length", "stopped", "lost", "failed"];

/** @param {unknown} value @param {string} otherwise */
function text(value, otherwise) {
  return typeof value === "string" ? value : otherwise;
}

/** @param {unknown} value */
function moment(value) {
  return typeof value === "number" && Number.isFinite(value) ? value : 0;
}

/** @param {unknown} value @returns {value is Record<string, unknown>} */
export function isRecord(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** @param {unknown} value @returns {Sampling} */
export function samplingOf(value) {
  if (!isRecord(value)) return {};
  /** @type {Sampling} */
  const sampling = {};
  for (const [name, each] of Object.entries(value)) {
    if (typeof each === "number" && Number.isFinite(each)) sampling[name] = each;
  }
  return sampling;
}

/** @param {unknown} kept @returns {Conversation | null} null if it is none */
export function conversationOf(kept) {
  if (!isRecord(kept) || typeof kept.id !== "string") return null;
  return {
    ...kept,
    id: kept.id,
    title: text(kept.title, "New chat"),
    system: text(kept.system, ""),
    sampling: samplingOf(kept.sampling),
    leaf: typeof kept.leaf === "string" ? kept.leaf : null,
    createdAt: moment(kept.createdAt),
    updatedAt: moment(kept.updatedAt),
    deletedAt: typeof kept.deletedAt === "number" ? kept.deletedAt : null,
  };
}

/** @param {unknown} kept @returns {Message | null} null if it is none */
export function messageOf(kept) {
  if (!isRecord(kept) || typeof kept.id !== "string" || typeof kept.conversation !== "string") return null;
  const { role, state, speed, chances, stream } = kept;
  if (role !== "user" && role !== "assistant") return null;
  const isTimed = isRecord(speed) && ["firstTokenMs", "numTokens", "timedTokens", "timedMs"].every((name) => name in speed);
  return {
    ...kept,
    id: kept.id,
    conversation: kept.conversation,
    parent: typeof kept.parent === "string" ? kept.parent : null,
    role,
    content: text(kept.content, ""),
    createdAt: moment(kept.createdAt),
    state: /** @type {Message["state"]} */ (STATES.find((each) => each === state) ?? "done"),
    owner: text(kept.owner, ""),
    savedAt: moment(kept.savedAt),
    problem: typeof kept.problem === "string" ? kept.problem : null,
    model: text(kept.model, ""),
    speed: isTimed ? /** @type {Message["speed"]} */ (/** @type {unknown} */ (speed)) : null,
    chances: Array.isArray(chances) ? chances.filter(isChance) : null,
    stream: isMark(stream) ? /** @type {Message["stream"]} */ (/** @type {unknown} */ (stream)) : null,
  };
}

/** @param {unknown} value */
function isMark(value) {
  return isRecord(value) && typeof value.id === "string" && ["after", "numTokens"].every((name) => typeof value[name] === "number");
}

/** @param {unknown} value @returns {boolean} */
function isChance(value) {
  return isRecord(value) && isToken(value) && Array.isArray(value.top) && value.top.every(isToken);
}

/** @param {unknown} value */
function isToken(value) {
  return isRecord(value) && typeof value.token === "string" && typeof value.logprob === "number";
}
