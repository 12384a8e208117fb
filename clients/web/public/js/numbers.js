/** Numbers for people. */

/**
 * @param {number} ms
 * @returns {string}
 */
export function duration(ms) {
  if (ms < 1000) return `${Math.max(1, Math.round(ms))} ms`;
  return ms < 60_000 ? `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s` : `${Math.round(ms / 60_000)} min`;
}

/**
 * @param {import("./types.js").Speed} speed
 * @returns {string[]} what is said under an answer
 */
export function speedParts(speed) {
  const parts = [`${speed.numTokens} ${speed.numTokens === 1 ? "token" : "tokens"}`];
  if (speed.timedMs > 0 && speed.timedTokens > 0) {
    const rate = (speed.timedTokens * 1000) / speed.timedMs;
    parts.push(`${rate.toFixed(rate < 100 ? 1 : 0)} tokens/s`);
  }
  parts.push(`first after ${duration(speed.firstTokenMs)}`);
  return parts;
}

/**
 * @param {number} logprob
 * @returns {string}
 */
export function percent(logprob) {
  const share = 100 * Math.exp(logprob);
  if (share >= 99.95) return "100 %";
  return share < 0.1 ? "< 0.1 %" : `${share.toFixed(share < 10 ? 1 : 0)} %`;
}

/**
 * @param {number} whenMs
 * @param {Date} now
 * @returns {string} the heading under which a conversation of that time is listed
 */
export function dayName(whenMs, now) {
  const midnight = new Date(now.getFullYear(), now.getMonth(), now.getDate()).getTime();
  if (whenMs >= midnight) return "Today";
  if (whenMs >= midnight - 86_400_000) return "Yesterday";
  return whenMs >= midnight - 7 * 86_400_000 ? "Last 7 days" : "Earlier";
}
