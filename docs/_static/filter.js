// A search box above the tables of fidelity.html: rows without all of its words are hidden.
document.addEventListener("DOMContentLoaded", () => {
  if (!location.pathname.endsWith("/fidelity.html")) return;
  const rows = [...document.querySelectorAll("article table tbody tr")];
  const box = Object.assign(document.createElement("input"), { type: "search", placeholder: "Filter the tables" });
  box.setAttribute("aria-label", box.placeholder);
  box.style.cssText = "width: 100%; padding: 0.4em; font: inherit; position: sticky; top: 0; z-index: 1";
  box.addEventListener("input", () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
  });
  document.querySelector("article h1")?.after(box);
});
