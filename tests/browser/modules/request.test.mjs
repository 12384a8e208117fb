import assert from "node:assert/strict";
import test from "node:test";
import { titleOf } from "../../../clients/web/public/js/request.js";

test("a title is the first line, as far as it fits", () => {
  assert.equal(titleOf("  Hello\nworld"), "Hello");
  assert.equal(titleOf("a  b\tc"), "a b c");
  assert.equal(titleOf("\n \n"), "New chat");
  assert.equal(titleOf("word ".repeat(40)), `${"word ".repeat(11)}word…`);
  assert.equal(titleOf("x".repeat(200)), `${"x".repeat(60)}…`);
});

test("no title ends within a character", () => {
  const family = "👩‍👩‍👧‍👦";
  for (let before = 40; before < 62; before += 1) {
    const title = titleOf("x".repeat(before) + family.repeat(9));
    assert.ok(title.isWellFormed());
    const shown = title.slice(before, -1);
    assert.equal(shown, family.repeat(shown.length / family.length), String(before));
    assert.ok(title.length <= 61);
  }
});
