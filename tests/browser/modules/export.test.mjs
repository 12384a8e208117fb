import assert from "node:assert/strict";
import test from "node:test";
import { fileName, markdownOf } from "../../../clients/web/public/js/export.js";

test("a conversation is Markdown", () => {
  const path = [
    { role: "user", model: "", content: "Hello\n" },
    { role: "assistant", model: "tiny", content: "*Hi.*" },
    { role: "user", model: "", content: "Bye" },
    { role: "assistant", model: "", content: "" },
  ];
  assert.equal(
    markdownOf("One\n two", path),
    "# One two\n\n## You\n\nHello\n\n## tiny\n\n*Hi.*\n\n## You\n\nBye\n\n## Answer\n\n\n",
  );
});

test("names are such as every file system takes", () => {
  assert.equal(fileName("Tea: or/and \\coffee?\n*now*"), "Tea or and coffee now.md");
  assert.equal(fileName("../../etc"), "etc.md");
  assert.equal(fileName("\u202e\u0000 "), "conversation.md");
  assert.equal(fileName("日本".repeat(100)), `${"日本".repeat(40)}.md`);
  assert.equal(fileName("😀".repeat(100)), `${"😀".repeat(80)}.md`);
});
