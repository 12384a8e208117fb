/** The dashboard: puts its parts together. */

import { ChartView } from "./chart_view.js";
import { CHARTS } from "./charts.js";
import { byId } from "./dom.js";
import { History } from "./history.js";
import { askKey } from "./key_dialog.js";
import { notice, unreadyNotice } from "./notices.js";
import { showLinks } from "./pages.js";
import { drawProcesses } from "./processes_view.js";
import { models } from "./server.js";
import { ago } from "./units.js";
import { watch } from "./watching.js";

const SPAN_S = 300;

const banner = byId("banner", HTMLElement);
const moment = byId("moment", HTMLElement);
const history = new History(SPAN_S);
/** @type {number | null} */
let lookedAt = null;
let isLive = false;
let isDrawPending = false;

const views = CHARTS.map((chart) => new ChartView(chart, history, look));
byId("charts", HTMLElement).replaceChildren(...views.map(({ element }) => element));

/** @param {number | null} ageS */
function look(ageS) {
  if (ageS === lookedAt) return;
  lookedAt = ageS;
  changed();
}

function changed() {
  if (isDrawPending) return;
  isDrawPending = true;
  requestAnimationFrame(draw);
}

function draw() {
  isDrawPending = false;
  for (const view of views) view.draw(lookedAt);
  moment.textContent = lookedAt === null ? (isLive ? "Live" : "Not connected") : ago(lookedAt);
  moment.classList.toggle("is-past", lookedAt !== null);
  moment.classList.toggle("is-live", lookedAt === null && isLive);
  if (history.newest) drawProcesses(byId("processes", HTMLTableSectionElement), history.newest["processes"]);
}

/** @param {import("./history.js").Snapshot} snapshot */
function show(snapshot) {
  if (!isLive) {
    isLive = true;
    showModel();
  }
  banner.replaceChildren(...(snapshot["engine"].up ? [] : [notice("clock", "There is no engine at the moment.", [])]));
  history.add(snapshot);
  changed();
}

/** @param {Node} shown  why there are no numbers */
function explain(shown) {
  isLive = false;
  banner.replaceChildren(shown);
  changed();
}

/** Its name needs a key even where the numbers are open; then it is left out. */
function showModel() {
  models().then(
    ([model]) => {
      byId("model", HTMLElement).textContent = model?.id ?? "";
    },
    () => {},
  );
}

async function anotherKey() {
  if (await askKey()) return;
  await new Promise((resolve) => {
    const enter = { label: "Enter key", click: () => resolve(undefined) };
    explain(notice("key", "This server shows its numbers to those who have a key.", [enter]));
  });
}

addEventListener("unhandledrejection", (event) => {
  const text = `Something went wrong on this page (${event.reason?.message ?? event.reason}). Loading it again may help.`;
  explain(notice("warning", text, [{ label: "Load again", click: () => location.reload() }]));
});
showLinks();
draw();
watch({ show, wait: (status) => explain(unreadyNotice(status, [])), askKey: anotherKey }, new AbortController().signal);
