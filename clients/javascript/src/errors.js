/**
 * Everything that this package throws on purpose.
 *
 * ClientError
 * ├── ConnectionFailed       no answer: nobody listens, or the connection broke before anything of it had come
 * ├── AnswerTimeout          no answer within timeouts.answer
 * ├── StreamInterrupted      a stream broke off and cannot be gone on with; has what had come by then
 * ├── InvalidAnswer          what came is not an answer of this API
 * └── APIError               the server says what is wrong: status, type, code, param, message
 *     ├── BadRequest             400, 413, 422 and what else is the caller's fault
 *     ├── AuthenticationFailed   401
 *     ├── PermissionDenied       403
 *     ├── NotFound               404
 *     ├── RateLimited            429
 *     └── ServerFailed           500 and above
 *         └── ServiceUnavailable     503
 */

export class ClientError extends Error {
  /** @param {string} message @param {ErrorOptions} [options] */
  constructor(message, options) {
    super(message, options);
    this.name = new.target.name;
  }
}

export class ConnectionFailed extends ClientError {}

export class AnswerTimeout extends ClientError {}

export class InvalidAnswer extends ClientError {}

export class StreamInterrupted extends ClientError {
  /**
   * @param {string} message what broke the stream
   * @param {string} partialText what had come of the first choice
   * @param {any} partialAnswer what had come, in the form of a whole answer
   * @param {ErrorOptions} [options]
   */
  constructor(message, partialText, partialAnswer, options) {
    super(message, options);
    this.partialText = partialText;
    this.partialAnswer = partialAnswer;
  }
}

/**
 * @typedef {object} ErrorDetails
 * @property {number | null} [status] of HTTP; null for the error of a stream that had begun, over SSE
 * @property {string | null} [type]
 * @property {string | null} [code]
 * @property {string | null} [param]
 * @property {number | null} [retryAfter] in milliseconds
 * @property {string | null} [requestId]
 */

export class APIError extends ClientError {
  /** @param {string} message @param {ErrorDetails} [details] */
  constructor(message, { status = null, type = null, code = null, param = null, retryAfter = null, requestId = null } = {}) {
    super(message);
    this.status = status;
    this.type = type;
    this.code = code;
    this.param = param;
    this.retryAfter = retryAfter;
    this.requestId = requestId;
  }
}

export class BadRequest extends APIError {}

export class AuthenticationFailed extends APIError {}

export class PermissionDenied extends APIError {}

export class NotFound extends APIError {}

export class RateLimited extends APIError {}

export class ServerFailed extends APIError {}

export class ServiceUnavailable extends ServerFailed {}

/** @type {Record<number, typeof APIError>} */
const OF_STATUS = {
  401: AuthenticationFailed, 403: PermissionDenied, 404: NotFound, 429: RateLimited, 503: ServiceUnavailable,
};
/** In a stream that has begun there is no status. @type {Record<string, typeof APIError>} */
const OF_TYPE = {
  invalid_request_error: BadRequest, rate_limit_error: RateLimited, service_unavailable_error: ServiceUnavailable,
};

/**
 * The error for an error object of the server.
 *
 * @param {any} error the object behind `error` in a body, an event or a message; proxies send anything here
 * @param {ErrorDetails} [details] what is known besides
 */
export function apiError(error, details = {}) {
  const fields = typeof error === "object" && error !== null ? error : { message: error };
  const { status = null } = details;
  const type = textOrNull(fields.type);
  const kind = status === null
    ? OF_TYPE[type ?? ""] ?? ServerFailed
    : OF_STATUS[status] ?? (status >= 500 ? ServerFailed : BadRequest);
  const answered = status === null ? "the server told of an error" : `the server answered ${status}`;
  const message = String(fields.message || answered);
  return new kind(message, { ...details, type, code: textOrNull(fields.code), param: textOrNull(fields.param) });
}

/** @param {any} value */
function textOrNull(value) {
  return value === null || value === undefined ? null : String(value);
}
