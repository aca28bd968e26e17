// The live panel. Whatever a rank is the author of is set as textContent: it cannot become markup.

const COLUMNS = [
  ["rank", "rank", "4em"],
  ["device", "device", "6em"],
  ["state", "state", "11em"],
  ["last", "last output", "auto"],
  ["result", "value or failure", "30%"],
];

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// A second view of the panel, opened later, starts from the model: so the model is what takes the deltas.
function initialize({ model }) {
  const merge = () => {
    const { header, notes, rows, removed } = model.get("delta");
    if (!rows) return;
    const merged = { ...model.get("rows"), ...rows };
    for (const rank of removed) delete merged[rank];
    model.set("header", header);
    if (notes) model.set("notes", notes);
    model.set("rows", merged);
  };
  model.on("change:delta", merge);
  merge();
  return () => model.off("change:delta", merge);
}

function stateCell(cell, state, icon, phase) {
  const sign = element("span", `nblaunch-icon nblaunch-${state}`, icon);
  sign.setAttribute("aria-hidden", "true");
  const word = state === "STARTING" && phase ? `${state} (${phase})` : state;
  cell.replaceChildren(sign, document.createTextNode(word));
}

function drawHead(head, header) {
  const word = element("strong");
  stateCell(word, header.state ?? "", header.icon ?? "", "");
  const said = [header.what, header.node, header.restarts, header.logs].filter(Boolean);
  head.title = header.magic ?? "";
  head.replaceChildren(word, ...said.map((text) => element("span", "", text)));
}

function drawNotes(region, notes) {
  // What a reader has folded stays folded, as long as it is the same note.
  const folded = new Map([...region.children].map((each) => [each.dataset.title, each.open]));
  region.replaceChildren(
    ...notes.map(({ title, text, open }) => {
      if (!text) return element("div", "", title);
      const note = element("details");
      note.dataset.title = title;
      note.open = folded.get(title) ?? open;
      note.append(element("summary", "", title), element("pre", "nblaunch-note", text));
      return note;
    }),
  );
}

function makeRow() {
  const line = element("tr");
  line.tabIndex = 0;
  line.setAttribute("aria-expanded", "false");
  for (const [name] of COLUMNS) {
    line.append(element("td", name === "last" || name === "result" ? "nblaunch-text" : ""));
  }
  return line;
}

function drawRow(line, row) {
  COLUMNS.forEach(([name], index) => {
    const cell = line.cells[index];
    if (name === "state") stateCell(cell, row.state, row.icon, row.phase);
    else if (cell.textContent !== String(row[name])) cell.textContent = row[name];
  });
}

function toggle(line) {
  line.setAttribute("aria-expanded", String(line.getAttribute("aria-expanded") !== "true"));
}

function onKey(event) {
  const line = event.target.closest("tbody tr");
  if (!line) return;
  const next = { ArrowDown: line.nextElementSibling, ArrowUp: line.previousElementSibling }[event.key];
  if (next) next.focus();
  else if (event.key === "Enter" || event.key === " ") toggle(line);
  else return;
  event.preventDefault();
  event.stopPropagation();
}

function render({ model, el }) {
  const panel = element("div", "nblaunch-panel");
  const head = element("div", "nblaunch-head");
  const region = element("div", "nblaunch-ranks");
  const table = element("table");
  const names = element("tr");
  for (const [, title, width] of COLUMNS) {
    const cell = element("th", "", title);
    cell.scope = "col";
    cell.style.width = width;
    names.append(cell);
  }
  const body = table.createTBody();
  table.createTHead().append(names);
  region.append(table);
  const aside = element("div", "nblaunch-notes");
  panel.append(head, aside, region);
  el.append(panel);

  const drawn = new Map();
  const known = {};
  const draw = () => {
    const rows = model.get("rows");
    for (const [rank, { line }] of drawn) {
      if (rank in rows) continue;
      line.remove();
      drawn.delete(rank);
    }
    for (const rank of Object.keys(rows).sort((one, other) => one - other)) {
      const row = drawn.get(rank) ?? { line: body.appendChild(makeRow()) };
      // Only what a delta brought is a new object.
      if (row.row !== rows[rank]) drawRow(row.line, rows[rank]);
      row.row = rows[rank];
      drawn.set(rank, row);
    }
    drawHead(head, model.get("header"));
    if (known.notes !== model.get("notes")) drawNotes(aside, (known.notes = model.get("notes")));
  };
  body.addEventListener("click", (event) => {
    const line = event.target.closest("tr");
    if (line && !String(getSelection())) toggle(line);
  });
  body.addEventListener("keydown", onKey);
  model.on("change:rows", draw);
  draw();
  return () => model.off("change:rows", draw);
}

export default { initialize, render };
