"use strict";
// Light and dark, as the system says or as one chooses.
(() => {
  const themes = ["auto", "light", "dark"];
  const root = document.documentElement;
  const kept = {
    read: () => { try { return localStorage.getItem("jshard-theme"); } catch { return null; } },
    write: (theme) => { try { localStorage.setItem("jshard-theme", theme); } catch { /* a page without storage */ } },
  };
  const wear = (theme) => {
    if (theme === "auto") delete root.dataset.theme; else root.dataset.theme = theme;
    document.querySelector("#theme-word").textContent = theme;
    kept.write(theme);
  };
  let theme = themes.includes(kept.read()) ? kept.read() : "auto";
  wear(theme);
  document.querySelector("#theme").addEventListener("click", () => {
    theme = themes[(themes.indexOf(theme) + 1) % themes.length];
    wear(theme);
  });
})();
