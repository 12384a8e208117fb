import assert from "node:assert/strict";
import test from "node:test";
import { FIELDS, parsed } from "../../../clients/web/public/js/settings.js";
import { requestBody, titleOf } from "../../../clients/web/public/js/request.js";

const field = (name) => FIELDS.find((each) => each.name === name);

for (const [name, text, value] of [
  ["temperature", "", null],
  ["temperature", " 0 ", 0],
  ["temperature", "0,7", 0.7],
  ["temperature", "2", 2],
  ["top_p", "1", 1],
  ["max_tokens", "100", 100],
  ["seed", "-5", -5],
  ["presence_penalty", "-2", -2],
]) {
  test(`${name} may be ${JSON.stringify(text)}`, () => {
    assert.deepEqual(parsed(field(name), text), { value, problem: null });
  });
}

for (const [name, text, words] of [
  ["temperature", "warm", "a number"],
  ["temperature", "2.1", "at most 2"],
  ["temperature", "-1", "at least 0"],
  ["temperature", "Infinity", "a number"],
  ["top_p", "0", "above 0"],
  ["max_tokens", "0", "at least 1"],
  ["max_tokens", "1.5", "whole"],
  ["seed", "1e300", "at most"],
]) {
  test(`${name} may not be ${text}`, () => {
    const { value, problem } = parsed(field(name), text);
    assert.equal(value, null);
    assert.match(problem, new RegExp(words));
  });
}

const PATH = [
  { role: "user", content: "Hi", id: "1", secret: 1 },
  { role: "assistant", content: "Hel", id: "2" },
];

test("a request says what was said and what was set, and nothing else", () => {
  const settings = { system: "Be kind.", sampling: { temperature: 0, seed: 3 } };
  const body = requestBody("tiny", settings, PATH.slice(0, 1), { wantsChances: false, continuesLast: false });
  assert.deepEqual(body, {
    model: "tiny",
    messages: [
      { role: "system", content: "Be kind." },
      { role: "user", content: "Hi" },
    ],
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    temperature: 0,
    seed: 3,
  });
});

test("an answer is continued within itself", () => {
  const body = requestBody("", { system: "  ", sampling: {} }, PATH, { wantsChances: true, continuesLast: true });
  assert.ok(!("model" in body));
  assert.deepEqual(body.messages.at(-1), { role: "assistant", content: "Hel" });
  assert.equal(body.continue_final_message, true);
  assert.equal(body.add_generation_prompt, false);
  assert.deepEqual([body.logprobs, body.top_logprobs], [true, 5]);
});

test("a conversation is called by its first words", () => {
  assert.equal(titleOf("  Why is the\tsky blue?\nAnd the sea?"), "Why is the sky blue?");
  assert.equal(titleOf("x".repeat(100)), `${"x".repeat(60)}…`);
  assert.equal(titleOf(`${"word ".repeat(30)}`), `${"word ".repeat(12).trim()}…`);
});
