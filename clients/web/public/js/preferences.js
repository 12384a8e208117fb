/** What a user of this browser prefers, for all conversations. */

import { ofBrowser } from "./browser_storage.js";
import { isRecord, samplingOf } from "./records.js";

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

/** @returns {Preferences} whatever is kept under the name */
export function preferences() {
  const kept = parsed();
  const { transport, wantsChances, model, isSidebarShown, system } = kept;
  return {
    transport: transport === "websocket" ? transport : DEFAULTS.transport,
    wantsChances: typeof wantsChances === "boolean" ? wantsChances : DEFAULTS.wantsChances,
    model: typeof model === "string" ? model : DEFAULTS.model,
    isSidebarShown: typeof isSidebarShown === "boolean" ? isSidebarShown : DEFAULTS.isSidebarShown,
    system: typeof system === "string" ? system : DEFAULTS.system,
    sampling: samplingOf(kept.sampling),
  };
}

/** @returns {Record<string, unknown>} */
function parsed() {
  try {
    const kept = JSON.parse(ofBrowser.get(NAME) ?? "{}");
    return isRecord(kept) ? kept : {};
  } catch {
    return {};
  }
}

/** @param {Partial<Preferences>} changed */
export function prefer(changed) {
  ofBrowser.set(NAME, JSON.stringify({ ...preferences(), ...changed }));
}
