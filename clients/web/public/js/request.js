/** Requests for answers. */

/** @typedef {import("./types.js").Body} Body */
/** @typedef {import("./types.js").Message} Message */

const NUM_ALTERNATIVES = 5;
const TITLE_CHARS = 60;

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
  if (line.length <= TITLE_CHARS) return line || "New chat";
  let whole = "";
  // In what people take for characters: half an emoji is none.
  for (const { segment } of new Intl.Segmenter().segment(line.slice(0, 2 * TITLE_CHARS))) {
    if (whole.length + segment.length > TITLE_CHARS) break;
    whole += segment;
  }
  const end = whole.lastIndexOf(" ");
  return `${end > TITLE_CHARS / 2 ? whole.slice(0, end) : whole}…`;
}
