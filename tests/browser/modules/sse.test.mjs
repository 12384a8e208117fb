import assert from "node:assert/strict";
import test from "node:test";
import { EventParser } from "../../../clients/web/public/js/sse.js";

const STREAM = ': ping\n\ndata: {"a":"é😀"}\r\n\r\nevent: x\ndata:one\ndata: two\r\rid: 3\n\ndata\n\ndata: [DONE]\n\n';
const EVENTS = [
  { data: '{"a":"é😀"}', id: "" },
  { data: "one\ntwo", id: "" },
  { data: "", id: "3" },
  { data: "[DONE]", id: "3" },
];

test("events come out whole wherever the text is cut", () => {
  for (let first = 0; first <= STREAM.length; first += 1) {
    for (let second = first; second <= STREAM.length; second += 1) {
      const parser = new EventParser();
      const pieces = [STREAM.slice(0, first), STREAM.slice(first, second), STREAM.slice(second)];
      assert.deepEqual(pieces.flatMap((piece) => parser.push(piece)), EVENTS, `${first} ${second}`);
    }
  }
});

test("an event comes out with its last line end and not before", () => {
  const parser = new EventParser();
  assert.deepEqual(parser.push("data: x\n"), []);
  assert.deepEqual(parser.push("\n"), [{ data: "x", id: "" }]);
});

test("a byte order mark at the start is no data", () => {
  assert.deepEqual(new EventParser().push("\ufeffdata: x\n\n"), [{ data: "x", id: "" }]);
});
