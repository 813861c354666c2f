"use strict";
// Tables become sortable by their headings and can be saved as CSV. Without scripts they stay tables.
(() => {
  const main = document.getElementById("main");
  const words = main.dataset;
  const decimal = words.decimal;
  const group = decimal === "," ? "." : ",";
  const scales = { B: 1, kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12, ns: 1e-9, µs: 1e-6, ms: 1e-3, s: 1 };

  const text = (cell) => cell.textContent.trim().replace(/\s+/g, " ");

  // The first number of a cell, in its unit's base; null when there is none.
  const number = (said) => {
    const plain = said.replace(/−/g, "-").split(group).join("").replace(decimal, ".");
    const found = plain.match(/(-?\d+(?:\.\d+)?)\s*([A-Za-zµ]+)?/);
    return found && Number(found[1]) * (scales[found[2]] ?? 1);
  };

  const order = (a, b) => {
    const [x, y] = [number(a), number(b)];
    if (x !== null && y !== null) return x - y;
    if (x === null && y === null) return a.localeCompare(b, document.documentElement.lang);
    return x === null ? 1 : -1;
  };

  const sort = (table, heading, column) => {
    const down = heading.getAttribute("aria-sort") === "ascending";
    const body = table.tBodies[0];
    const rows = [...body.rows].sort(
      (a, b) => (down ? -1 : 1) * order(text(a.cells[column]), text(b.cells[column])),
    );
    body.append(...rows);
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
  };

  const sortable = (table) => {
    const head = table.tHead?.rows;
    const rows = [...(table.tBodies[0]?.rows ?? [])];
    return (
      head?.length === 1 && rows.length > 2 && table.tBodies.length === 1 &&
      rows.every((row) => row.cells.length === head[0].cells.length) &&
      rows.every((row) => [...row.cells].every((c) => c.rowSpan === 1 && c.colSpan === 1)) &&
      [...head[0].cells].some((_, at) => rows.every((row) => /^[%−-]?\d/.test(text(row.cells[at]))))
    );
  };

  const quoted = (said) => (/[",\n]/.test(said) ? `"${said.replaceAll('"', '""')}"` : said);
  const csv = (table) =>
    [...table.rows].map((row) => [...row.cells].map((c) => quoted(text(c))).join(",")).join("\r\n");

  const save = (table, number) => {
    const link = document.createElement("a");
    const blob = new Blob(["\ufeff", csv(table), "\r\n"], { type: "text/csv" });
    link.href = URL.createObjectURL(blob);
    link.download = `${table.id || `table-${number}`}.csv`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };

  for (const [place, table] of [...main.querySelectorAll("table")].entries()) {
    if (sortable(table)) {
      [...table.tHead.rows[0].cells].forEach((heading, column) => {
        if (!text(heading)) return;
        const button = document.createElement("button");
        button.type = "button";
        button.className = "sort";
        button.title = words.sort;
        button.append(...heading.childNodes);
        button.addEventListener("click", () => sort(table, heading, column));
        heading.append(button);
      });
    }
    const button = document.createElement("button");
    button.type = "button";
    button.className = "csv";
    button.textContent = words.csv;
    button.setAttribute("aria-label", `${words.csv}: ${table.caption ? text(table.caption) : ""}`);
    button.addEventListener("click", () => save(table, place + 1));
    (table.closest(".scroll") ?? table).after(button);
  }
})();
