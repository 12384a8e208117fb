// Runs before the page is drawn, so that it never shows in the wrong colours first; hence no module.
"use strict";
{
  const NAME = "streamserve.theme";
  const THEMES = ["system", "light", "dark"];
  const root = document.documentElement;
  const apply = () => {
    root.dataset.theme = localStorage.getItem(NAME) ?? "system";
    for (const each of document.querySelectorAll("[data-theme-name]")) {
      each.textContent = { system: "System", light: "Light", dark: "Dark" }[root.dataset.theme] ?? "";
    }
  };
  apply();
  addEventListener("storage", apply);
  addEventListener("DOMContentLoaded", () => {
    apply();
    document.getElementById("theme")?.addEventListener("click", () => {
      const next = (THEMES.indexOf(root.dataset.theme ?? "") + 1) % THEMES.length;
      localStorage.setItem(NAME, THEMES[next] ?? "system");
      apply();
    });
  });
}
