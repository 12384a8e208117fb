/**
 * What the chat page keeps and passes on.
 *
 * @typedef {Record<string, number>} Sampling  fields of a request that are not the model's own
 *
 * @typedef {object} Conversation
 * @property {string} id
 * @property {string} title
 * @property {string} system  the system prompt; empty is none
 * @property {Sampling} sampling
 * @property {string | null} leaf  the last message of the branch that was looked at last
 * @property {number} createdAt  milliseconds
 * @property {number} updatedAt
 * @property {number | null} deletedAt  deleted ones can be brought back for a while
 *
 * @typedef {"streaming" | "done" | "length" | "stopped" | "lost" | "failed"} AnswerState
 *
 * @typedef {object} Speed
 * @property {number} firstTokenMs  from sending to the first text
 * @property {number} numTokens
 * @property {number} timedTokens  those that came after the first, in `timedMs`
 * @property {number} timedMs
 *
 * @typedef {object} TokenChance
 * @property {string} token
 * @property {number} logprob
 * @property {{token: string, logprob: number}[]} top  the likeliest at this place
 *
 * @typedef {object} Message
 * @property {string} id
 * @property {string} conversation
 * @property {string | null} parent  the message before; those with the same parent are versions of each other
 * @property {"user" | "assistant"} role
 * @property {string} content
 * @property {number} createdAt
 * @property {AnswerState} state
 * @property {string} owner  the tab that writes a streaming answer
 * @property {number} savedAt  when it last did
 * @property {string | null} problem  why it failed, in words
 * @property {string} model
 * @property {Speed | null} speed
 * @property {TokenChance[] | null} chances
 * @property {Mark | null} [stream]  what the server makes of it, while it does and can be asked again
 *
 * @typedef {object} Chunk  a chunk of a streamed chat completion
 * @property {{
 *   delta?: {content?: string | null},
 *   finish_reason?: string | null,
 *   logprobs?: {content?: {token: string, logprob: number, top_logprobs: {token: string, logprob: number}[]}[]} | null
 * }[]} choices
 * @property {{completion_tokens: number} | null} [usage]
 * @property {{message: string, code?: string, status?: number, retry_after?: number}} [error]
 *
 * @typedef {object} Mark  how far a stream of the server has been read
 * @property {string} id  of the stream
 * @property {number} after  the last event that came, from 1
 * @property {number} numTokens  of the stream up to it
 * @property {boolean} isKept  the server has said that one can come back to it
 *
 * @typedef {object} StreamEvent
 * @property {string | null} stream  the stream to come back to, if the server keeps it
 * @property {number} number  of the event in it, from 1; 0 for what is none
 * @property {Chunk | null} chunk
 *
 * @typedef {Record<string, unknown>} Body  of a request
 *
 * @typedef {object} Transport  a way to the server
 * @property {(body: Body, requestId: string, signal: AbortSignal) => AsyncGenerator<StreamEvent, void>} begin
 * @property {(mark: Mark, signal: AbortSignal) => AsyncGenerator<StreamEvent, void>} resume
 *   with the events after the mark
 */

export {};
