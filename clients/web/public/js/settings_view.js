/** The panel with the system prompt, the sampling settings and the transport. */

import { byId, el } from "./dom.js";
import { prefer, preferences } from "./preferences.js";
import { FIELDS, parsed } from "./settings.js";

/** @typedef {{system: string, sampling: import("./types.js").Sampling}} Settings */

export class SettingsView {
  #dialog = byId("settings", HTMLDialogElement);
  #system = byId("system", HTMLTextAreaElement);
  /** @type {Map<string, HTMLInputElement>} */
  #inputs = new Map();

  /**
   * @param {object} deeds
   * @param {() => Settings} deeds.current
   * @param {(settings: Settings) => void} deeds.change
   */
  constructor(deeds) {
    this.deeds = deeds;
    byId("sampling", HTMLElement).append(...FIELDS.map((field) => this.#row(field)));
    byId("settings-open", HTMLButtonElement).addEventListener("click", () => this.#open());
    byId("settings-close", HTMLButtonElement).addEventListener("click", () => this.#dialog.close());
    byId("settings-reset", HTMLButtonElement).addEventListener("click", () => {
      for (const input of this.#inputs.values()) input.value = "";
      this.#system.value = "";
      this.#take();
    });
    this.#dialog.addEventListener("click", (event) => {
      // Only the backdrop is the dialog itself: its content fills it.
      if (event.target === this.#dialog) this.#dialog.close();
    });
    this.#system.addEventListener("input", () => this.#take());
    for (const name of /** @type {const} */ (["sse", "websocket"])) {
      byId(`transport-${name}`, HTMLInputElement).addEventListener("change", () => prefer({ transport: name }));
    }
    const chances = byId("wants-chances", HTMLInputElement);
    chances.addEventListener("change", () => prefer({ wantsChances: chances.checked }));
  }

  #open() {
    const { system, sampling } = this.deeds.current();
    const { transport, wantsChances } = preferences();
    this.#system.value = system;
    for (const { name } of FIELDS) {
      const input = this.#inputs.get(name);
      if (input) input.value = name in sampling ? String(sampling[name]) : "";
    }
    byId(`transport-${transport}`, HTMLInputElement).checked = true;
    byId("wants-chances", HTMLInputElement).checked = wantsChances;
    this.#check();
    this.#dialog.showModal();
  }

  /** @param {import("./settings.js").Field} field */
  #row(field) {
    const id = `field-${field.name}`;
    const input = el("input", {
      id,
      type: "text",
      inputmode: field.isWhole ? "numeric" : "decimal",
      autocomplete: "off",
      placeholder: "auto",
      "aria-describedby": `${id}-help`,
      input: () => this.#take(),
    });
    this.#inputs.set(field.name, input);
    return el(
      "div",
      { class: "field" },
      el("label", { for: id }, field.label),
      input,
      el("small", { id: `${id}-help` }, field.help),
    );
  }

  /** Shows what is wrong, and returns the rest. */
  #check() {
    /** @type {import("./types.js").Sampling} */
    const sampling = {};
    for (const field of FIELDS) {
      const input = this.#inputs.get(field.name);
      if (!input) continue;
      const { value, problem } = parsed(field, input.value);
      input.setAttribute("aria-invalid", String(problem !== null));
      const help = byId(`${input.id}-help`, HTMLElement);
      help.textContent = problem ?? field.help;
      help.classList.toggle("is-problem", problem !== null);
      if (value !== null) sampling[field.name] = value;
    }
    return sampling;
  }

  #take() {
    this.deeds.change({ system: this.#system.value, sampling: this.#check() });
  }
}
