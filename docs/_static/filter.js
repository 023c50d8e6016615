// A search box above the tables of fidelity.html: rows without all of its words are hidden, and tables without such rows. Names may break
// anywhere, so that all columns fit.
document.addEventListener("DOMContentLoaded", () => {
  if (!location.pathname.endsWith("/fidelity.html")) return;
  const style = document.createElement("style");
  style.textContent =
    "article td, article td code { white-space: normal; overflow-wrap: anywhere; min-width: 6em }" +
    "article td:nth-child(2):nth-last-child(4) { min-width: 15em }";
  document.head.append(style);
  const tables = [...document.querySelectorAll("article table")].map((table) => [table, [...table.tBodies[0].rows]]);
  const box = Object.assign(document.createElement("input"), { type: "search", placeholder: "Filter the tables" });
  box.setAttribute("aria-label", box.placeholder);
  box.style.cssText = "width: 100%; padding: 0.4em; font: inherit; position: sticky; top: 0; z-index: 1";
  box.addEventListener("input", () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const [table, rows] of tables) {
      for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
      table.hidden = rows.every((row) => row.hidden);
    }
  });
  document.querySelector("article h1")?.after(box);
});
