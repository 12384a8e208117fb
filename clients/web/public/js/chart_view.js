/** One chart of the dashboard: the newest numbers, and their lines. */

import { el, svg } from "./dom.js";
import { across, HEIGHT, niceTop, path, WIDTH } from "./lines.js";
import { ago } from "./units.js";

/** @typedef {import("./charts.js").Chart} Chart */
/** @typedef {import("./history.js").History} History */

// By keys, in seconds into the past.
const STEPS_S = new Map([
  ["ArrowLeft", 1],
  ["ArrowDown", 1],
  ["ArrowRight", -1],
  ["ArrowUp", -1],
  ["PageDown", 30],
  ["PageUp", -30],
  ["Home", Infinity],
  ["End", -Infinity],
]);

/** What a chart shows and where it stands, for all charts at once: they look at the same moment. */
export class ChartView {
  /**
   * @param {Chart} chart
   * @param {History} history
   * @param {(ageS: number | null) => void} look  the moment that the user points at; null is the newest
   */
  constructor(chart, history, look) {
    this.chart = chart;
    this.history = history;
    this.look = look;
    this.isFocused = false;
    /** @type {number | null} */
    this.ageS = null;
    const id = chart.title.toLowerCase().replaceAll(" ", "-");
    this.values = chart.lines.map(() => el("dd"));
    this.entries = chart.lines.map(({ name }, index) =>
      el("div", { class: `entry is-line-${index + 1}` }, el("dt", {}, el("i", { "aria-hidden": "true" }), name), this.values[index] ?? null),
    );
    this.top = el("span", { class: "top", "aria-hidden": "true" });
    this.start = el("span");
    this.area = svg("path", { class: "area is-line-1" });
    this.lines = chart.lines.map((_, index) => svg("path", { class: `line is-line-${index + 1}` }));
    this.cursor = svg("path", { class: "cursor" });
    const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
    // The first line lies above the others.
    drawing.append(svg("path", { class: "grid", d: `M0 50H${WIDTH}` }), this.area, this.cursor, ...this.lines.toReversed());
    this.plot = this.#plot(drawing, id);
    const head = el("header", {}, el("h2", { id }, chart.title), el("small", {}, chart.note));
    const axis = el("div", { class: "axis", "aria-hidden": "true" }, this.start, el("span", {}, "now"));
    this.element = el("div", { class: "chart", role: "group", "aria-labelledby": id }, head, el("dl", {}, ...this.entries), this.plot, axis);
  }

  /**
   * @param {SVGElement} drawing
   * @param {string} id
   */
  #plot(drawing, id) {
    return el(
      "div",
      {
        class: "plot",
        role: "slider",
        tabindex: "0",
        "aria-labelledby": id,
        "aria-valuemin": String(-this.history.spanS),
        "aria-valuemax": "0",
        keydown: (/** @type {KeyboardEvent} */ event) => this.#press(event),
        focus: () => (this.isFocused = true),
        blur: () => {
          this.isFocused = false;
          this.look(null);
        },
        pointermove: (/** @type {PointerEvent} */ event) => {
          const box = this.plot.getBoundingClientRect();
          this.look(this.history.spanS * Math.min(1, Math.max(0, 1 - (event.clientX - box.left) / box.width)));
        },
        pointerleave: () => this.look(null),
        pointercancel: () => this.look(null),
      },
      this.top,
      drawing,
    );
  }

  /** @param {KeyboardEvent} event */
  #press(event) {
    const stepS = event.key === "Escape" ? -Infinity : STEPS_S.get(event.key);
    if (stepS === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    const ageS = Math.min(this.history.spanS, Math.max(0, Math.round((this.ageS ?? 0) + stepS)));
    this.look(ageS === 0 ? null : ageS);
  }

  /** @param {number | null} ageS  the moment whose numbers are shown; null is the newest */
  draw(ageS) {
    const isMoved = ageS !== this.ageS;
    this.ageS = ageS;
    const { chart, history } = this;
    const shown = ageS === null ? history.newest : history.near(ageS);
    const texts = chart.lines.map(({ value }) => chart.unit(shown ? value(shown) : null));
    const all = chart.lines.map(({ value }) => history.points(value));
    const greatest = Math.max(chart.least, ...all.flat().map(({ value }) => value ?? 0));
    const top = Math.min(chart.most ?? Infinity, niceTop(greatest));
    this.top.textContent = chart.unit(top);
    this.start.textContent = `−${history.spanS / 60} min`;
    all.forEach((points, index) => {
      const isHidden = chart.lines[index]?.isOptional === true && points.every(({ value }) => value === null);
      this.entries[index]?.toggleAttribute("hidden", isHidden);
      const value = this.values[index];
      if (value) value.textContent = texts[index] ?? "";
      this.lines[index]?.setAttribute("d", path(points, history.spanS, top, false));
    });
    this.area.setAttribute("d", path(all[0] ?? [], history.spanS, top, true));
    this.cursor.setAttribute("d", ageS === null ? "" : `M${across(ageS, history.spanS)} 0V${HEIGHT}`);
    // A screen reader says each change of the control that has the focus: only those that the user makes.
    if (isMoved || !this.isFocused) this.#describe(texts);
  }

  /** @param {string[]} texts */
  #describe(texts) {
    const named = this.chart.lines.map(({ name }, index) => `${name} ${texts[index]}`);
    const shown = named.filter((_, index) => !this.entries[index]?.hasAttribute("hidden"));
    this.plot.setAttribute("aria-valuemin", String(-this.history.spanS));
    this.plot.setAttribute("aria-valuenow", String(-Math.round(this.ageS ?? 0)));
    this.plot.setAttribute("aria-valuetext", `${ago(this.ageS ?? 0)}: ${shown.join(", ")}`);
  }
}
