// Runs before the page is drawn, so that it never shows in the wrong colours first; hence no module.
"use strict";
{
  const NAME = "streamserve.theme";
  const THEMES = ["system", "light", "dark"];
  const root = document.documentElement;
  const kept = () => {
    try {
      return localStorage.getItem(NAME);
    } catch {
      return null;
    }
  };
  /** @param {string | null} chosen */
  const apply = (chosen) => {
    root.dataset.theme = THEMES.find((each) => each === chosen) ?? "system";
    for (const each of document.querySelectorAll("[data-theme-name]")) {
      each.textContent = { system: "System", light: "Light", dark: "Dark" }[root.dataset.theme] ?? "";
    }
  };
  apply(kept());
  addEventListener("storage", () => apply(kept()));
  addEventListener("DOMContentLoaded", () => {
    apply(kept());
    document.getElementById("theme")?.addEventListener("click", () => {
      const next = THEMES[(THEMES.indexOf(root.dataset.theme ?? "") + 1) % THEMES.length] ?? "system";
      try {
        localStorage.setItem(NAME, next);
      } catch {
        // It holds for as long as the page is open.
      }
      apply(next);
    });
  });
}
