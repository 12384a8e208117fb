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

/** A header takes visible ASCII characters only, and no key has others: what is pasted with some is not the key. */
function check() {
  const input = byId("key", HTMLInputElement);
  const isPossible = /^[\x21-\x7e]*$/.test(input.value.trim());
  input.setCustomValidity(isPossible ? "" : "A key has no spaces and no letters with accents. Copy it again.");
}

/** @returns {Promise<boolean>} */
function ask() {
  const dialog = byId("key-dialog", HTMLDialogElement);
  const input = byId("key", HTMLInputElement);
  byId("key-wrong", HTMLElement).hidden = key.value === "";
  input.value = "";
  check();
  dialog.returnValue = "";
  input.addEventListener("input", check);
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
