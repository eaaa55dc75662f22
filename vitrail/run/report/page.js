"use strict";
// Opens cells of the confusion matrix in place and sorts tables; the page also works without it.
document.documentElement.classList.add("js");

function showPanel(panel) {
  for (const other of panel.parentElement.querySelectorAll(".panel.open")) other.classList.remove("open");
  for (const link of document.querySelectorAll("a[aria-current]")) link.removeAttribute("aria-current");
  panel.classList.add("open");
  for (const link of document.querySelectorAll(`a[href="#${panel.id}"]`)) link.setAttribute("aria-current", "true");
}

function showPanelOf(hash) {
  const panel = /^#(train|val)-\d+-\d+$/.test(hash) && document.getElementById(hash.slice(1));
  if (panel) showPanel(panel);
  return panel;
}

document.addEventListener("click", (event) => {
  const link = event.target.closest("a.cell");
  if (!link) return;
  const panel = showPanelOf(link.getAttribute("href"));
  if (!panel) return;
  event.preventDefault();
  history.replaceState(null, "", link.getAttribute("href"));
  panel.scrollIntoView({ block: "nearest" });
});
window.addEventListener("hashchange", () => showPanelOf(location.hash));
showPanelOf(location.hash);

for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
      const byText = (a, b) => key(a).localeCompare(key(b), undefined, { numeric: true });
      const byNumber = (a, b) => Number(key(a)) - Number(key(b));
      const rows = [...table.tBodies[0].rows];
      rows.sort(rows.every((row) => row.cells[column].dataset.value) ? byNumber : byText);
      if (down) rows.reverse();
      table.tBodies[0].append(...rows);
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
    });
  });
}
