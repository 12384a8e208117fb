// Vercel's AI SDK against a server: prints what it heard as one JSON object.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const provider = createOpenAICompatible({
  name: "streamserve", baseURL: process.argv[2] + "/v1", apiKey: "none", includeUsage: true,
});
const heard = {};
const common = { temperature: 0, maxOutputTokens: 20, maxRetries: 0 };

const chat = { ...common, model: provider.chatModel("tiny"), prompt: "Tell me about rivers." };
const whole = await generateText(chat);
heard.chat = [whole.text, whole.finishReason, whole.usage.outputTokens];

let text = "";
const stream = streamText({ ...chat, onError: ({ error }) => { heard.error = String(error); } });
for await (const delta of stream.textStream) text += delta;
heard.chatStream = [text, await stream.finishReason, (await stream.usage).outputTokens];

const completion = { ...common, model: provider.completionModel("tiny"), prompt: "Once" };
let continued = "";
for await (const delta of streamText(completion).textStream) continued += delta;
heard.completion = [(await generateText(completion)).text, continued];

const controller = new AbortController();
const long = streamText({ ...chat, maxOutputTokens: 20000, abortSignal: controller.signal });
for await (const _ of long.textStream) {
  controller.abort();
  break;
}

try {
  await generateText({ ...chat, temperature: 9 });
} catch (error) {
  heard.refused = [error.statusCode, JSON.parse(error.responseBody).error.param];
}
console.log(JSON.stringify(heard));
