/** What can be set for a conversation, and what is a sensible value. */

/**
 * @typedef {object} Field
 * @property {string} name  in requests
 * @property {string} label
 * @property {string} help
 * @property {number} min
 * @property {number} max
 * @property {number} step
 * @property {boolean} [isWhole]
 * @property {boolean} [isAboveMin]  the least value itself is none
 */

/** @type {readonly Field[]} */
export const FIELDS = [
  { name: "temperature", label: "Temperature", help: "0 always takes the likeliest token; more is more varied.", min: 0, max: 2, step: 0.1 },
  { name: "top_p", label: "Top p", help: "Only the likeliest tokens that together have this probability.", min: 0, max: 1, step: 0.05, isAboveMin: true },
  { name: "top_k", label: "Top k", help: "Only so many of the likeliest tokens; 0 is all.", min: 0, max: 2 ** 31 - 1, step: 1, isWhole: true },
  { name: "min_p", label: "Min p", help: "Only tokens with this share of the likeliest one's probability.", min: 0, max: 1, step: 0.05 },
  { name: "max_tokens", label: "Max tokens", help: "The longest answer.", min: 1, max: 2 ** 31 - 1, step: 1, isWhole: true },
  { name: "seed", label: "Seed", help: "The same seed gives the same answer.", min: Number.MIN_SAFE_INTEGER, max: Number.MAX_SAFE_INTEGER, step: 1, isWhole: true },
  { name: "presence_penalty", label: "Presence penalty", help: "Against tokens that the answer has already.", min: -2, max: 2, step: 0.1 },
  { name: "frequency_penalty", label: "Frequency penalty", help: "The same, for each time it has them.", min: -2, max: 2, step: 0.1 },
];

/**
 * @param {Field} field
 * @param {string} text  as it was typed; empty leaves it to the model
 * @returns {{value: number | null, problem: string | null}}
 */
export function parsed(field, text) {
  const typed = text.trim();
  if (typed === "") return { value: null, problem: null };
  const value = Number(typed.replace(",", "."));
  const problem = problemOf(field, value);
  return problem ? { value: null, problem } : { value, problem: null };
}

/** @param {Field} field @param {number} value */
function problemOf(field, value) {
  if (!Number.isFinite(value)) return `${field.label} must be a number.`;
  if (field.isWhole && !Number.isInteger(value)) return `${field.label} must be a whole number.`;
  const least = field.isAboveMin ? `above ${field.min}` : `at least ${field.min}`;
  if (value < field.min || (field.isAboveMin && value === field.min)) return `${field.label} must be ${least}.`;
  if (value > field.max) return `${field.label} must be at most ${field.max}.`;
  return null;
}
