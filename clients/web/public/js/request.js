/** Requests for answers. */

/** @typedef {import("./types.js").Body} Body */
/** @typedef {import("./types.js").Message} Message */

const NUM_ALTERNATIVES = 5;

/**
 * @param {string} model
 * @param {{system: string, sampling: import("./types.js").Sampling}} settings
 * @param {readonly Message[]} path  what was said so far
 * @param {{wantsChances: boolean, continuesLast: boolean}} options
 * @returns {Body} of a streamed chat completion; one that continues goes on within the last message
 */
export function requestBody(model, settings, path, { wantsChances, continuesLast }) {
  const system = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  const said = path.map(({ role, content }) => ({ role, content }));
  return {
    ...(model ? { model } : {}),
    messages: [...system, ...said],
    stream: true,
    // So that an answer which is stopped has its count as well.
    stream_options: { include_usage: true, continuous_usage_stats: true },
    ...settings.sampling,
    ...(wantsChances ? { logprobs: true, top_logprobs: NUM_ALTERNATIVES } : {}),
    ...(continuesLast ? { add_generation_prompt: false, continue_final_message: true } : {}),
  };
}

/**
 * @param {string} text  the first question
 * @returns {string} what the conversation is called until somebody gives it a name
 */
export function titleOf(text) {
  const line = text.trim().split("\n", 1)[0]?.replace(/\s+/g, " ") ?? "";
  if (line.length <= 60) return line || "New chat";
  const whole = line.slice(0, 60);
  return `${whole.slice(0, whole.lastIndexOf(" ") > 30 ? whole.lastIndexOf(" ") : 60)}…`;
}
