/** Client for a streamserve server: chats, completions and responses, whole or as they are made. */

export { textOf } from "./accumulators.js";
export { Client, Stream } from "./client.js";
export {
  AnswerTimeout, APIError, AuthenticationFailed, BadRequest, ClientError, ConnectionFailed, InvalidAnswer, NotFound,
  PermissionDenied, RateLimited, ServerFailed, ServiceUnavailable, StreamInterrupted,
} from "./errors.js";
