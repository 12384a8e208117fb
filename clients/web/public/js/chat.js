/** The chat page: puts its parts together. */

import { Conversations } from "./conversations.js";
import { Composer } from "./composer.js";
import { byId, el } from "./dom.js";
import { askKey } from "./key_dialog.js";
import { notice, unreadyNotice } from "./notices.js";
import { download, fileName, markdownOf } from "./export.js";
import { showLinks } from "./pages.js";
import { prefer, preferences } from "./preferences.js";
import { models, Problem, untilReady } from "./server.js";
import { Search } from "./search.js";
import { SettingsView } from "./settings_view.js";
import { Sidebar } from "./sidebar.js";
import { Store } from "./store.js";
import { ThreadView } from "./thread_view.js";
import { toast } from "./toast.js";
import { overSse } from "./transport_sse.js";
import { webSocketTransport } from "./transport_websocket.js";
import { versionsByParent } from "./tree.js";

// How long a deleted conversation can be brought back.
const DELETED_MS = 60_000;

const banner = byId("banner", HTMLElement);
const picker = byId("model", HTMLSelectElement);
const overWebSocket = webSocketTransport();

/** @returns {string | null} the conversation that the address names */
function addressed() {
  return location.hash.startsWith("#/") ? location.hash.slice(2) : null;
}

/** @param {string | null} id */
function setAddress(id) {
  if (id === addressed()) return;
  history.pushState(null, "", id === null ? location.pathname + location.search : `#/${id}`);
}

/** @param {Store} store */
async function start(store) {
  let isDrawPending = false;
  const conversations = new Conversations(store, {
    defaults: preferences,
    wishes: () => ({ model: picker.value, wantsChances: preferences().wantsChances }),
    transport: () => (preferences().transport === "websocket" ? overWebSocket : overSse),
    askKey,
    changed,
  });
  function changed() {
    if (isDrawPending) return;
    isDrawPending = true;
    // Frames do not come while nobody looks, but the text does.
    if (document.hidden) setTimeout(draw, 200);
    else requestAnimationFrame(draw);
  }
  /** @param {string} text */
  const send = (text) => {
    thread.follow();
    conversations.send(text);
  };
  const composer = new Composer({ send, stop: () => conversations.stop(), editLast: () => thread.editLast() });
  const thread = new ThreadView(
    byId("thread", HTMLElement),
    byId("to-end", HTMLButtonElement),
    {
      resend: (message, text) => conversations.send(text, message.parent),
      regenerate: (message) => conversations.regenerate(message),
      resume: (message) => conversations.resume(message),
      retryNow: (message) => conversations.retryNow(message),
      turn: (message, step) => conversations.turn(message, step),
      redraw: changed,
    },
    send,
  );
  const sidebar = new Sidebar({
    begin: () => {
      conversations.begin();
      composer.focus();
    },
    open: async (id) => {
      await conversations.open(id);
      thread.follow();
      composer.focus();
    },
    rename: (id, title) => conversations.rename(id, title),
    remove: async ({ id, title }) => {
      await conversations.remove(id, Date.now());
      setTimeout(() => store.purge(Date.now() - DELETED_MS), DELETED_MS + 1000);
      toast(`“${title}” is deleted.`, "Undo", async () => {
        await conversations.remove(id, null);
        await conversations.open(id);
      });
    },
  });
  new SettingsView({
    current: () => conversations.current,
    change: (settings) => {
      conversations.configure(settings);
      prefer(settings);
    },
  });

  const search = new Search((text) => conversations.find(text), changed);
  const exporter = byId("export", HTMLButtonElement);
  exporter.addEventListener("click", () => {
    const { title } = conversations.current;
    download(fileName(title), markdownOf(title, conversations.path));
  });

  let drawnList = "";
  function draw() {
    isDrawPending = false;
    const { current, list, busy, isBusy } = conversations;
    const { found } = search;
    const listed = found ? list.filter(({ id }) => found.has(id)) : list;
    const isListed = list.map((each) => [each.id, each.title, each.updatedAt]);
    const shown = JSON.stringify([isListed, current.id, [...busy], found && [...found]]);
    if (shown !== drawnList) {
      drawnList = shown;
      sidebar.draw(listed, current.id, busy, found !== null);
      if (found) search.again();
      byId("title", HTMLElement).textContent = current.title;
      document.title = conversations.isDraft ? "streamserve" : `${current.title} · streamserve`;
      setAddress(conversations.isDraft ? null : current.id);
    }
    const path = conversations.path;
    exporter.disabled = path.length === 0;
    const versions = versionsByParent(conversations.messages);
    thread.draw(path, (message) => {
      const siblings = versions.get(message.parent) ?? [];
      return {
        index: siblings.indexOf(message),
        count: siblings.length,
        waiting: conversations.waiting(message),
        isLast: message === path.at(-1),
        isBusy,
      };
    });
    composer.draw(isBusy);
  }

  addEventListener("popstate", () => conversations.open(addressed()));
  byId("skip", HTMLAnchorElement).addEventListener("click", (event) => {
    event.preventDefault();
    composer.focus();
  });
  await store.purge(Date.now() - DELETED_MS);
  await conversations.load(addressed());
  composer.focus();
  await connect();
}

/** Fills the list of models, as soon as the server has one. */
async function connect() {
  for (;;) {
    try {
      const found = await models();
      banner.replaceChildren();
      picker.replaceChildren(...found.map(({ id }) => el("option", { value: id }, id)));
      picker.disabled = found.length < 2;
      if (found.some(({ id }) => id === preferences().model)) picker.value = preferences().model;
      return;
    } catch (error) {
      if (error instanceof Problem && error.status === 401) {
        if (!(await askKey())) await wantKey();
      } else {
        await untilReady(showUnready, new AbortController().signal);
        // Ready says nothing of this one request; do not ask again at once.
        await new Promise((resolve) => setTimeout(resolve, 500));
      }
    }
  }
}

/** @param {import("./server.js").Status} status */
function showUnready(status) {
  const shown = unreadyNotice(status, []);
  // What is put there is read aloud, so it is not put there again because its progress moves.
  if (banner.querySelector("p")?.textContent !== shown.querySelector("p")?.textContent) {
    banner.replaceChildren(shown);
    return;
  }
  banner.querySelector(".notice-progress")?.remove();
  const progress = shown.querySelector(".notice-progress");
  if (progress) banner.querySelector(".notice-text")?.append(progress);
}

/** @returns {Promise<void>} resolves when the user wants to give a key after all */
function wantKey() {
  return new Promise((resolve) => {
    const enter = { label: "Enter key", click: () => resolve() };
    banner.replaceChildren(notice("key", "This server answers those who have a key.", [enter]));
  });
}

addEventListener("unhandledrejection", (event) => {
  const text = `Something went wrong on this page (${event.reason?.message ?? event.reason}). Loading it again may help.`;
  banner.replaceChildren(notice("warning", text, [{ label: "Load again", click: () => location.reload() }]));
});
showLinks();
picker.addEventListener("change", () => prefer({ model: picker.value }));
Store.open((error) => {
  const isFull = error instanceof DOMException && error.name === "QuotaExceededError";
  const text = isFull
    ? "The browser has no more room for this page: what is said now is gone when the page is closed. Delete conversations to make room."
    : "This browser keeps nothing for this page: conversations are gone when it is closed. Allow it to store site data.";
  const place = byId("unkept", HTMLElement);
  // It is read aloud each time it is put there.
  if (error === null) place.replaceChildren();
  else if (place.textContent !== text) place.replaceChildren(notice("warning", text, []));
}).then(start);
