/** What the declarations promise is what the code has, and callers can use it so. Only compiled. */

import * as code from "../src/index.js";
import * as declared from "../types/index.js";
import { type ChatChunk, type ChatCompletion, Client, RateLimited, StreamInterrupted, textOf } from "streamserve-client";

// A constructor that is private there cannot be compared.
type Public = Omit<typeof declared, "Stream">;
export const kept: Public = code satisfies { [name in keyof typeof declared]: unknown };

export async function use(client: Client): Promise<string> {
  const stream = client.chat.stream({ messages: [{ role: "user", content: "Hello" }], top_k: 3 });
  for await (const chunk of stream) {
    const typed: ChatChunk = chunk;
    const content: string | null | undefined = typed.choices[0]?.delta.content;
    if (content) break;
  }
  const result: ChatCompletion = await stream.result();
  const answer = await client.completions.create({ prompt: "Once" }, { signal: AbortSignal.timeout(1000) });
  // @ts-expect-error: a field that does not exist
  client.completions.stream({ prompt: "Once", temprature: 1 });
  // @ts-expect-error: the prompt is missing
  client.chat.stream({});
  // @ts-expect-error: streams come from a client
  new declared.Stream();
  try {
    await client.responses.create({ input: "Hello", max_output_tokens: 3 });
  } catch (error) {
    if (error instanceof RateLimited) return `${error.retryAfter ?? 0}`;
    if (error instanceof StreamInterrupted) return error.partialText;
  }
  return textOf(result) + textOf(answer);
}
