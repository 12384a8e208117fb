import assert from "node:assert/strict";
import test from "node:test";
import { cut, hasReferences, languageOf, lexed, marked, normalized } from "../../../clients/web/public/js/blocks.js";

const DOCUMENTS = [
  "One\ntwo\n\nthree *four* `five`",
  "# Head\n\nText\n===\n\n- a\n- b\n\n  more of b\n\n- c\n\nafter\n\n1. x\n2. y\n   - z\n\n3. w\n",
  "Before\n\n```python\ndef f():\n\n    return 1\n```\n\nafter\n\n~~~\nopen to the end\n\n- no list",
  "| a | b |\n| - | -: |\n| 1 | 2 |\n\n> quote\nlazy\n\n> > deep\n\n---\n\n<div>\n<b>x</b>\n</div>\n\nend",
  "\n\n  leading\n\n\n\n    code\n\n\ttabs\n\n* [ ] task\n* [x] done\n\nlast\\\nline  \nbreak",
];

function html(tokens) {
  return marked.parser([...tokens]);
}

test("a text that grows is drawn in the end as if it had come at once", () => {
  for (const text of DOCUMENTS) {
    for (const step of [1, 2, 3, 7, 20]) {
      let drawn = "";
      let settled = 0;
      let live = [];
      for (let end = 0; ; end += step) {
        const now = text.slice(0, end);
        const blocks = cut(now.slice(settled));
        drawn += html(blocks.settled);
        settled += blocks.settledLength;
        live = blocks.live;
        if (end >= text.length) break;
      }
      assert.equal(drawn + html(live), html(lexed(text)), JSON.stringify([text, step]));
    }
  }
});

test("what is settled is not looked at again", () => {
  const text = "One.\n\nTwo.\n\nThree\nlines";
  const { settled, settledLength, live } = cut(text);
  assert.equal(text.slice(settledLength), "Three\nlines");
  assert.equal(settled.filter((token) => token.type === "paragraph").length, 2);
  assert.deepEqual(live.map((token) => token.raw), ["Three\nlines"]);
  assert.deepEqual(cut(""), { settled: [], settledLength: 0, live: [] });
});

test("HTML is text, but for tags that only format", () => {
  const shown = marked.parse("a <img src=x onerror=alert(1)> b<br>H<sub>2</sub>O <script>alert(1)</script>\n\n<div onclick=x>\n");
  assert.ok(!/<(?!\/?(?:p|br|sub)>)/.test(shown), shown);
  assert.ok(shown.includes("b<br>H<sub>2</sub>O"));
  assert.ok(!marked.parse('<br onclick="alert(1)">').includes("<br "));
});

test("an image is a link", () => {
  const shown = marked.parse('![a "quoted" name](https://example.org/x.png?a="b")');
  assert.ok(!shown.includes("<img"));
  assert.match(shown, /<a href="https:\/\/example\.org\/x\.png[^"]*">/);
});

test("line ends are those of Markdown", () => {
  assert.equal(normalized("a\r\nb\rc\n"), "a\nb\nc\n");
});

test("definitions of links are found", () => {
  assert.ok(hasReferences("see [a]\n\n[a]: https://example.org"));
  assert.ok(!hasReferences("see [a](https://example.org): fine"));
});

test("nothing is too deep or too long to be parsed", () => {
  for (const unit of ["> ", "- ", "1. ", "> 1. ", "*a ", "~a~~b ", "[a](", "**a *b "]) {
    const text = `${unit.repeat(20_000 / unit.length)}x`;
    const shown = html(lexed(text));
    assert.ok(shown.replace(/<[^>]*>/g, "").length > 10_000, unit);
    assert.ok((shown.match(/<(blockquote|ol|ul)>/g) ?? []).length < 50, unit);
  }
  // What people write is far from that.
  const nested = Array.from({ length: 8 }, (_, depth) => `${"  ".repeat(depth)}- *${depth}*`).join("\n");
  assert.equal(html(lexed(nested)), html(marked.lexer(nested)));
});

test("the language of code is the first word behind the fence", () => {
  for (const info of ["python", " Python", "python title=x", "{.python .numberLines}", "{python}"]) {
    assert.equal(languageOf(info), "python");
  }
  assert.deepEqual(["c++", "c#", "objective-c", "", "\"><img>"].map(languageOf), ["c++", "c#", "objective-c", "", ""]);
  assert.ok(!html(lexed('```"><img src=x onerror=1>\nx\n```')).includes("<img"));
});
