import assert from "node:assert/strict";
import test from "node:test";
import { leafUnder, pathTo, versionsByParent } from "../../../clients/web/public/js/tree.js";

/** Messages as [id, parent]; each is younger than the one before. */
function tree(...pairs) {
  return new Map(pairs.map(([id, parent], index) => [id, { id, parent, createdAt: index }]));
}

const ids = (messages) => messages.map((message) => message.id).join("");

// a ─ b ─ c ─ d     and a second answer e to a, edited c as f
const TREE = tree(["a", null], ["b", "a"], ["c", "b"], ["d", "c"], ["e", "a"], ["f", "b"]);

test("a path goes from the first message to its leaf", () => {
  assert.equal(ids(pathTo(TREE, "d")), "abcd");
  assert.equal(ids(pathTo(TREE, "e")), "ae");
  assert.equal(ids(pathTo(TREE, null)), "");
  assert.equal(ids(pathTo(TREE, "nothing")), "");
});

test("a path ends where a message is missing or points in a circle", () => {
  assert.equal(ids(pathTo(tree(["b", "a"], ["c", "b"]), "c")), "bc");
  assert.ok(pathTo(tree(["a", "b"], ["b", "a"]), "a").length <= 3);
  leafUnder(tree(["a", "b"], ["b", "a"]), "a");
});

test("versions are in the order of their making", () => {
  const versions = versionsByParent(TREE);
  assert.deepEqual(["a", "b", null].map((parent) => ids(versions.get(parent))), ["be", "cf", "a"]);
  assert.equal(versions.get("f"), undefined);
});

test("the branch in which something was said last is followed to its end", () => {
  assert.equal(leafUnder(TREE, null), "f");
  assert.equal(leafUnder(TREE, "e"), "e");
  assert.equal(leafUnder(TREE, "b"), "f");
  assert.equal(leafUnder(TREE, "c"), "d");
  assert.equal(leafUnder(new Map(), null), null);
  const sameMoment = tree(["a", null], ["b", "a"], ["c", "b"]);
  for (const message of sameMoment.values()) message.createdAt = 1;
  assert.equal(leafUnder(sameMoment, null), "c");
});

test("what two tabs add at the same time is all there, in the same order for both", () => {
  const [one, two] = [["x", { id: "x", parent: "d", createdAt: 9 }], ["y", { id: "y", parent: "d", createdAt: 9 }]];
  for (const order of [[one, two], [two, one]]) {
    assert.equal(ids(versionsByParent(new Map([...TREE, ...order])).get("d")), "xy");
  }
});

test("a conversation of thousands of messages is no work", () => {
  const many = tree(...Array.from({ length: 20_000 }, (_, index) => [`m${index}`, index ? `m${index - 1}` : null]));
  assert.equal(leafUnder(many, null), "m19999");
  assert.equal(leafUnder(many, "m100"), "m19999");
  assert.equal(pathTo(many, "m19999").length, 20_000);
});

test("a branch whose beginning is missing is still a branch", () => {
  assert.equal(leafUnder(tree(["b", "a"], ["c", "b"]), null), "c");
});
