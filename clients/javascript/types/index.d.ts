/** Client for a streamserve server: chats, completions and responses, whole or as they are made. */

export type FinishReason = "stop" | "length" | "abort";

/** One turn of a conversation. What else it has goes to the chat template. */
export interface ChatMessage {
  role: string;
  content?: string | { type: string; text: string }[] | null;
  [member: string]: unknown;
}

export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  total_tokens: number;
  prompt_tokens_details?: { cached_tokens: number };
}

export interface TopLogprob {
  token: string;
  logprob: number;
  bytes: number[];
}

export interface TokenLogprob extends TopLogprob {
  top_logprobs: TopLogprob[];
}

export interface ChatLogprobs {
  content: TokenLogprob[];
}

export interface ChatChoice {
  index: number;
  message: { role: "assistant"; content: string };
  logprobs: ChatLogprobs | null;
  /** Null in a stream that was left early. */
  finish_reason: FinishReason | null;
  stop_reason?: string | number | null;
  token_ids?: number[] | null;
}

export interface ChatCompletion {
  id: string;
  object: "chat.completion";
  created: number;
  model: string;
  choices: ChatChoice[];
  /** Null in a stream that did not come to its end. */
  usage: Usage | null;
  prompt_token_ids?: number[] | null;
  prompt_logprobs?: (Record<string, unknown> | null)[] | null;
}

/** One event of a streamed chat. The last one has the token counts and no choices. */
export interface ChatChunk {
  id: string;
  object: "chat.completion.chunk";
  created: number;
  model: string;
  choices: {
    index: number;
    delta: { role?: "assistant" | null; content?: string | null };
    logprobs?: ChatLogprobs | null;
    finish_reason?: FinishReason | null;
    stop_reason?: string | number | null;
    token_ids?: number[] | null;
  }[];
  usage?: Usage | null;
  prompt_token_ids?: number[] | null;
}

export interface CompletionChoice {
  index: number;
  text: string;
  logprobs: {
    tokens: string[];
    token_logprobs: (number | null)[];
    top_logprobs: (Record<string, number> | null)[];
    text_offset: number[];
  } | null;
  finish_reason: FinishReason | null;
  stop_reason?: string | number | null;
  token_ids?: number[] | null;
  prompt_token_ids?: number[] | null;
  prompt_logprobs?: (Record<string, unknown> | null)[] | null;
}

/** The answer to a completion, or one event of a stream. */
export interface Completion {
  id: string;
  object: "text_completion";
  created: number;
  model: string;
  choices: CompletionChoice[];
  usage?: Usage | null;
}

/** The answer of the Responses API; it has more members, which tell what was asked for. */
export interface Response {
  id: string;
  object: "response";
  created_at: number;
  status: "in_progress" | "completed" | "incomplete" | "cancelled" | "failed";
  model: string;
  output: {
    id: string;
    type: "message";
    status: "in_progress" | "completed" | "incomplete";
    role: "assistant";
    content: { type: "output_text"; text: string; annotations: unknown[]; logprobs: TokenLogprob[] }[];
  }[];
  error: { code: string; message: string } | null;
  incomplete_details: { reason: string } | null;
  usage: {
    input_tokens: number;
    input_tokens_details: Record<string, number>;
    output_tokens: number;
    output_tokens_details: Record<string, number>;
    total_tokens: number;
  } | null;
  [member: string]: unknown;
}

/** One event of a streamed response; what else it has depends on its type. */
export interface ResponseEvent {
  type: string;
  sequence_number: number;
  response?: Response;
  item_id?: string;
  output_index?: number;
  content_index?: number;
  delta?: string;
  text?: string;
  [member: string]: unknown;
}

/** Fields that all endpoints have; the server's docs/api.md says what each means. */
export interface SamplingFields {
  model?: string;
  temperature?: number;
  top_p?: number;
  top_k?: number;
  min_p?: number;
  seed?: number;
  presence_penalty?: number;
  frequency_penalty?: number;
  repetition_penalty?: number;
  logit_bias?: Record<string, number>;
  bad_words?: string[];
  allowed_token_ids?: number[];
  stop?: string | string[];
  stop_token_ids?: number[];
  include_stop_str_in_output?: boolean;
  min_tokens?: number;
  ignore_eos?: boolean;
  skip_special_tokens?: boolean;
  spaces_between_special_tokens?: boolean;
  return_tokens_as_token_ids?: boolean;
  priority?: number;
  max_queue_time?: number;
  cache_salt?: string;
  request_id?: string;
  user?: string;
}

export interface GenerationFields extends SamplingFields {
  n?: number;
  max_tokens?: number;
  /** By default the last chunk of a stream has the token counts. */
  stream_options?: { include_usage?: boolean; continuous_usage_stats?: boolean };
  prompt_logprobs?: number;
  return_token_ids?: boolean;
  truncate_prompt_tokens?: number;
  truncation_side?: "left" | "right";
  add_special_tokens?: boolean;
}

export interface ChatRequest extends GenerationFields {
  messages: ChatMessage[];
  max_completion_tokens?: number;
  logprobs?: boolean;
  top_logprobs?: number;
  add_generation_prompt?: boolean;
  continue_final_message?: boolean;
  chat_template?: string;
  chat_template_kwargs?: Record<string, unknown>;
  documents?: Record<string, unknown>[];
}

export interface CompletionRequest extends GenerationFields {
  prompt: string | number[] | string[] | number[][];
  echo?: boolean;
  logprobs?: number;
  best_of?: number;
}

export interface ResponseRequest extends SamplingFields {
  input: string | Record<string, unknown>[];
  instructions?: string;
  max_output_tokens?: number;
  top_logprobs?: number;
  include?: string[];
  text?: Record<string, unknown>;
  metadata?: Record<string, string>;
  store?: boolean;
  safety_identifier?: string;
  prompt_cache_key?: string;
  chat_template_kwargs?: Record<string, unknown>;
}

/** How long to wait, in milliseconds; null is for ever. There is no limit to an answer as a whole. */
export interface Timeouts {
  /** Until a WebSocket is open; `fetch` has no such limit. 10,000 by default. */
  connect: number | null;
  /** Until an answer begins; null by default. One in one piece begins when it is complete. */
  answer: number | null;
  /** Of silence in a stream that has begun. 60,000 by default; the server fills silence. */
  idle: number | null;
}

/**
 * Answers 429 and 503, and lost connections, are tried again as long as nothing of the answer has come. A stream that
 * breaks off later is gone on with where it stopped, if the server can do that.
 */
export interface Retries {
  /** Tries after the first one; 5 by default, 0 for none. */
  maxRetries: number;
  /** Wait after the first failure, in milliseconds, at most; it doubles with each one. 500 by default. */
  firstDelay: number;
  /** Longest wait. If the server names a longer time, the error is thrown instead. 60,000 by default. */
  maxDelay: number;
  /**
   * Time without anything of a stream, in milliseconds, from when it broke off until it is given up; 60,000 by default.
   * With 0 streams end with their connections, also on the server.
   */
  resume: number;
  /** A number from 0 to 1. */
  chance: () => number;
}

export interface ClientOptions {
  /** Where the server wants one. */
  apiKey?: string;
  /** `sse` (the default) is HTTP, with a connection for each stream; `websocket` has all over one connection. */
  transport?: "sse" | "websocket";
  timeouts?: Partial<Timeouts>;
  retries?: Partial<Retries>;
  /** Sends the requests over HTTP. */
  fetch?: (request: Request) => Promise<globalThis.Response>;
  /** Where there is no global one: Node before version 22. */
  WebSocket?: typeof globalThis.WebSocket;
  /** Waits between two tries. */
  sleep?: (milliseconds: number, signal: AbortSignal) => Promise<void>;
}

export interface RequestOptions {
  /** Ends the generation; what waits for it is rejected with the signal's reason. */
  signal?: AbortSignal;
}

/**
 * An answer as it is made. The request is made when the first chunk is asked for. Leaving a `for await` loop, and
 * `close`, end the generation on the server.
 */
export class Stream<Chunk, Answer> implements AsyncIterable<Chunk> {
  private constructor();
  [Symbol.asyncIterator](): AsyncGenerator<Chunk, void, void>;
  /** What has come so far of the first choice. */
  get text(): string;
  /** The rest of the first choice's text, piece by piece. */
  texts(): AsyncGenerator<string, void, void>;
  /** The whole answer, once the rest has come. Of a stream that was left or closed, what had come. */
  result(): Promise<Answer>;
  /** Ends the generation, if it has not come to its end. Who waits for a chunk gets no more. */
  close(): void;
}

export interface Endpoint<Body, Chunk, Answer> {
  /** The answer in one piece. */
  create(body: Body, options?: RequestOptions): Promise<Answer>;
  /** The answer as it is made. */
  stream(body: Body, options?: RequestOptions): Stream<Chunk, Answer>;
}

/** A streamserve server. */
export class Client {
  /**
   * @param url of the server, with or without `/v1` behind it
   * @throws TypeError if that is no address of a web server
   */
  constructor(url: string, options?: ClientOptions);
  readonly chat: Endpoint<ChatRequest, ChatChunk, ChatCompletion>;
  readonly completions: Endpoint<CompletionRequest, Completion, Completion>;
  readonly responses: Endpoint<ResponseRequest, ResponseEvent, Response>;
  /** Ends an answer that is being made, from anywhere: its text so far stands, with the reason `abort`. */
  cancel(answerId: string): Promise<void>;
  /** Closes the WebSocket, if there is one, and so ends what is being made over it. */
  close(): void;
}

/** The text of an answer, of its first choice if it has several. */
export function textOf(answer: ChatCompletion | Completion | Response): string;

/** Base of all errors that this package throws on purpose. */
export class ClientError extends Error {
  constructor(message: string, options?: ErrorOptions);
}

/** There was no connection, or it broke before anything of the answer had come. */
export class ConnectionFailed extends ClientError {}

/** The answer did not begin in time. */
export class AnswerTimeout extends ClientError {}

/** What came is not an answer of this API. */
export class InvalidAnswer extends ClientError {}

/** A stream broke off before its end, and the server does not give the rest. */
export class StreamInterrupted extends ClientError {
  constructor(
    message: string,
    partialText: string,
    partialAnswer: ChatCompletion | Completion | Response,
    options?: ErrorOptions,
  );
  /** What had come of the first choice. */
  readonly partialText: string;
  /** What had come, in the form of a whole answer. */
  readonly partialAnswer: ChatCompletion | Completion | Response;
}

/** The server's error object. */
export class APIError extends ClientError {
  constructor(message: string, details?: Partial<Omit<APIError, keyof Error>>);
  /** Of HTTP; null for the error of a stream that had begun, over SSE. */
  readonly status: number | null;
  readonly type: string | null;
  readonly code: string | null;
  /** The field at fault, if it is one. */
  readonly param: string | null;
  /** Milliseconds after which the server says that another try makes sense. */
  readonly retryAfter: number | null;
  /** What the server calls the request in its log, where it says so. */
  readonly requestId: string | null;
}

export class BadRequest extends APIError {}
export class AuthenticationFailed extends APIError {}
export class PermissionDenied extends APIError {}
export class NotFound extends APIError {}
export class RateLimited extends APIError {}
export class ServerFailed extends APIError {}
export class ServiceUnavailable extends ServerFailed {}
