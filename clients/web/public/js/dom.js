/** Small things to build the page with. Text is always text: nothing here reads markup. */

const SVG = "http://www.w3.org/2000/svg";
const COPIED_MS = 1600;

/**
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Record<string, string | boolean | ((event: any) => void)>} [attributes]  functions are listeners
 * @param {...(Node | string | null)} children
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

/**
 * @template {Element} T
 * @param {string} id
 * @param {new () => T} type
 * @returns {T}
 */
export function byId(id, type) {
  const element = document.getElementById(id);
  if (!(element instanceof type)) throw new Error(`The page has no ${type.name} #${id}.`);
  return element;
}

/**
 * @template {keyof SVGElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Record<string, string>} attributes
 * @returns {SVGElementTagNameMap[Tag]}
 */
export function svg(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/**
 * @param {KeyboardEvent} event
 * @returns {boolean} whether the key belongs to an input method that is composing
 */
export function isComposing(event) {
  // Safari says that the composition is over before it tells of the key that ended it; that key has this code.
  return event.isComposing || event.keyCode === 229;
}

/** @param {string} name  of a symbol in the page */
export function icon(name) {
  const drawing = svg("svg", { class: "icon", "aria-hidden": "true" });
  drawing.append(svg("use", { href: `#icon-${name}` }));
  return drawing;
}

/**
 * @param {string} name  of its icon
 * @param {string} label
 * @param {() => void} click
 */
export function iconButton(name, label, click) {
  return el("button", { type: "button", class: "icon-button", "aria-label": label, title: label, click }, icon(name));
}

/**
 * @param {() => string} text
 * @param {string} label
 */
export function copyButton(text, label) {
  const button = iconButton("copy", label, async () => {
    const done = await copy(text());
    button.replaceChildren(icon(done ? "check" : "copy"));
    button.setAttribute("aria-label", done ? "Copied" : "Could not copy");
    setTimeout(() => {
      button.replaceChildren(icon("copy"));
      button.setAttribute("aria-label", label);
    }, COPIED_MS);
  });
  return button;
}

/**
 * @param {string} text
 * @returns {Promise<boolean>} whether it is on the clipboard
 */
async function copy(text) {
  if (navigator.clipboard) {
    return navigator.clipboard.writeText(text).then(
      () => true,
      () => false,
    );
  }
  // Without HTTPS there is the old way only.
  const area = el("textarea", { class: "visually-hidden", "aria-hidden": "true" });
  area.value = text;
  const focused = document.activeElement;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  if (focused instanceof HTMLElement) focused.focus();
  return done;
}
