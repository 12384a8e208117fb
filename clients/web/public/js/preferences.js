/** What a user of this browser prefers, for all conversations. */

const NAME = "streamserve.preferences";

/**
 * @typedef {object} Preferences
 * @property {"sse" | "websocket"} transport
 * @property {boolean} wantsChances  ask for the probabilities of tokens
 * @property {string} model
 * @property {boolean} isSidebarShown
 * @property {string} system  of new conversations
 * @property {import("./types.js").Sampling} sampling  of new conversations
 */

/** @type {Preferences} */
const DEFAULTS = {
  transport: "sse",
  wantsChances: false,
  model: "",
  isSidebarShown: true,
  system: "",
  sampling: {},
};

/** @returns {Preferences} */
export function preferences() {
  try {
    return { ...DEFAULTS, ...JSON.parse(localStorage.getItem(NAME) ?? "{}") };
  } catch {
    return { ...DEFAULTS };
  }
}

/** @param {Partial<Preferences>} changed */
export function prefer(changed) {
  localStorage.setItem(NAME, JSON.stringify({ ...preferences(), ...changed }));
}
