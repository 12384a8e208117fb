/** Asks for the key of a server that wants one. */

import { byId } from "./dom.js";
import { key } from "./server.js";

/** @type {Promise<boolean> | null} */
let asking = null;

/**
 * Answers that fail at the same time share one question.
 *
 * @returns {Promise<boolean>} whether there is a key now
 */
export function askKey() {
  asking ??= ask().finally(() => {
    asking = null;
  });
  return asking;
}

/** @returns {Promise<boolean>} */
function ask() {
  const dialog = byId("key-dialog", HTMLDialogElement);
  const input = byId("key", HTMLInputElement);
  byId("key-wrong", HTMLElement).hidden = key.value === "";
  input.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener(
      "close",
      () => {
        const given = input.value.trim();
        const isGiven = dialog.returnValue === "use" && given !== "";
        if (isGiven) key.set(given, byId("key-kept", HTMLInputElement).checked);
        resolve(isGiven);
      },
      { once: true },
    );
  });
}
