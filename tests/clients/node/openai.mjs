// The openai package for node against a server: prints what it heard as one JSON object.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Tell me about rivers." }];
const common = { model: "tiny", max_tokens: 20, temperature: 0 };
const heard = {};

const chat = await client.chat.completions.create({ ...common, messages });
heard.chat = [chat.choices[0].message.content, chat.usage];

let text = "";
let usage = null;
const stream = await client.chat.completions.create({
  ...common, messages, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
heard.chatStream = [text, usage];

const runner = client.chat.completions.stream({ ...common, messages });
heard.chatHelper = await runner.finalContent();

const completion = await client.completions.create({ ...common, prompt: "Once" });
let continued = "";
for await (const chunk of await client.completions.create({ ...common, prompt: "Once", stream: true })) {
  continued += chunk.choices[0].text;
}
heard.completion = [completion.choices[0].text, continued];

const asked = { model: "tiny", input: "Tell me about rivers.", max_output_tokens: 20, temperature: 0 };
const response = await client.responses.create(asked);
let delta = "";
for await (const event of await client.responses.create({ ...asked, stream: true })) {
  if (event.type === "response.output_text.delta") delta += event.delta;
}
heard.response = [response.output_text, delta];

const started = await client.chat.completions.create({ ...common, max_tokens: 20000, messages, stream: true });
for await (const chunk of started) {
  if (chunk.choices[0]?.delta?.content) break;
}
started.controller.abort();

try {
  await client.chat.completions.create({ ...common, messages: [] });
} catch (error) {
  heard.refused = [error.status, error.param, error.code, error instanceof OpenAI.BadRequestError];
}
console.log(JSON.stringify(heard));
