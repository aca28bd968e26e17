// The live panel. Python draws it in parts, as HTML in which all that a rank wrote is escaped; this script puts what
// has changed in its place. It keeps what is the reader's: focus, selection, scrolling, what is chosen and unfolded.
// HTML that a rank displays comes into a frame in which no script runs.

const [ROWS_SHOWN, LONGEST_PREFIX] = [600, 40];
const [FEW_RANKS, GROUPS_SHOWN] = [64, 8];
const [HELLO_AFTER, HELLO_EVERY] = [200, 3_600_000];
const ASK_EVERY = 1000;
const POINT_AT = "Point at a cell, or use the arrow keys; click, or press Enter, for its output.";

const SKELETON = `<section class="nblaunch-panel" aria-label="Distributed run">
  <div class="nblaunch-head" data-key="head"></div>
  <div class="nblaunch-failure" role="group" aria-label="Failure" data-key="failure"></div>
  <div data-key="attempts"></div><div data-key="hang"></div>
  <div class="nblaunch-present">
    <div class="nblaunch-ranks" role="group" aria-label="Ranks" data-key="ranks"></div>
    <div class="nblaunch-curves" data-key="curves"></div>
    <div class="nblaunch-output"><div class="nblaunch-tools"><span>Output of</span>
      <select class="nblaunch-select" aria-label="Show output of"></select>
      <input class="nblaunch-filter" type="search" placeholder="filter" aria-label="Filter output" spellcheck="false">
      <button type="button" class="nblaunch-button" data-act="follow" aria-label="Follow output">Follow</button>
      <button type="button" class="nblaunch-button" data-act="copy" aria-label="Copy output">Copy</button>
      <span class="nblaunch-hint nblaunch-note" role="status"></span></div>
      <div class="nblaunch-log" role="log" aria-label="Output" aria-live="off" tabindex="0"><div></div></div></div>
    <div class="nblaunch-values" data-key="values"></div>
  </div>
</section>`;

function element(tag, className, textContent = "") {
  return Object.assign(document.createElement(tag), { className, textContent });
}

// Setting what is there already would lose the reader's selection.
function setText(target, text) {
  if (target && target.textContent !== text) target.textContent = text;
}

function setAttribute(target, name, value) {
  if (target.getAttribute(name) !== String(value)) target.setAttribute(name, value);
}

const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

function formatSeconds(seconds) {
  const [hours, minutes, rest] = [seconds / 3600, (seconds / 60) % 60, seconds % 60].map(Math.floor);
  const two = (value) => String(value).padStart(2, "0");
  return `${hours ? `${hours}:${two(minutes)}` : minutes}:${two(rest)}`;
}

// Ranks as Python writes them, "0-2,5", as pairs of the first and the last in a row.
function spans(ranks) {
  const pairs = ranks ? ranks.split(",").map((span) => span.split("-").map(Number)) : [];
  return pairs.map(([first, last = first]) => [first, last]);
}

function numbersOf(ranks) {
  return spans(ranks).flatMap(([first, last]) => Array.from({ length: last - first + 1 }, (_, index) => first + index));
}

// --- patching ------------------------------------------------------------------------------------------

// Attributes that are the reader's once an element is there.
const STATES = ["aria-selected", "aria-expanded", "aria-pressed"];
const OWN = new Set(["open", "hidden", "tabindex", "data-lm-suppress-shortcuts", ...STATES]);

// Into a document of its own, in which nothing is loaded and no script runs.
function parsedAll(parts) {
  const all = parts.map((html) => `<template>${html}</template>`).join("");
  return [...new DOMParser().parseFromString(all, "text/html").querySelectorAll("template")].map(({ content }) => content);
}

const parsed = (html) => parsedAll([html])[0];

function patchAttributes(kept, made) {
  const names = made.getAttributeNames();
  for (const name of names) {
    if (!OWN.has(name)) setAttribute(kept, name, made.getAttribute(name));
  }
  for (const name of kept.getAttributeNames()) {
    if (!OWN.has(name) && !names.includes(name)) kept.removeAttribute(name);
  }
}

// Gives `target` the children of `source`, and keeps what is there already: elements with the same key, and
// else those of the same kind at the same place.
function patch(target, source) {
  const wanted = [...source.childNodes];
  const keys = new Set(wanted.map((made) => made.dataset?.key).filter(Boolean));
  const known = new Map();
  for (const child of [...target.children]) {
    const { key } = child.dataset;
    if (keys.has(key)) known.set(key, child);
    else if (key) child.remove();
  }
  let place = target.firstChild;
  for (const made of wanted) {
    const key = made.dataset?.key;
    const isLike = place?.nodeName === made.nodeName && !place.dataset?.key;
    const kept = key ? known.get(key) : isLike && place;
    if (!kept) {
      target.insertBefore(made, place);
      startFrames(made);
      continue;
    }
    if (kept === place) place = place.nextSibling;
    else target.insertBefore(kept, place);
    patchNode(kept, made, key);
  }
  while (place) [place] = [place.nextSibling, place.remove()];
}

function patchNode(kept, made, key) {
  if (kept.nodeType !== Node.ELEMENT_NODE) {
    setText(kept, made.data);
  } else if (kept.nodeName === "IFRAME") {
    if (kept.dataset.html === made.dataset.html) return;
    kept.dataset.html = made.dataset.html;
    fillFrame(kept);
  } else {
    patchAttributes(kept, made);
    if (key || kept.hasAttribute("data-own")) return;
    if (made.firstElementChild || kept.firstElementChild) patch(kept, made);
    else setText(kept, made.textContent);
  }
}

// --- frames: HTML of a rank, as it would look in the notebook; it runs no script and opens no page ------------

const FRAME_HEAD = `<!doctype html><meta http-equiv='Content-Security-Policy'
  content="default-src 'none'; img-src data: blob: http: https:; style-src 'unsafe-inline'"><style>
  body { margin: 0; background: transparent; } table { border-collapse: collapse; border: none; font-size: inherit; }
  td, th { text-align: right; padding: 2px 8px; border: none; max-width: 30em; } img { max-width: 100%; }
  thead { border-bottom: 1px solid currentcolor; } tbody tr:nth-child(odd) { background: rgba(127, 127, 127, 0.12); }
</style><body>`;

function startFrames(made) {
  const found = made.nodeName === "IFRAME" ? [made] : (made.querySelectorAll?.("iframe") ?? []);
  for (const frame of found) {
    frame.addEventListener("load", () => {
      frame.isLoaded = true;
      fitFrame(frame);
    });
    fillFrame(frame);
  }
}

function fitFrame(frame) {
  const page = frame.contentDocument;
  if (!page?.body) return;
  const { color, colorScheme, fontFamily, fontSize } = getComputedStyle(frame.parentElement ?? frame);
  Object.assign(page.documentElement.style, { color, colorScheme, fontFamily, fontSize });
  frame.style.height = `${Math.min(page.documentElement.scrollHeight + 2, 480)}px`;
}

// What is displayed often, a progress bar in HTML, keeps its frame: a new page would be blank until it is loaded.
// After a reader has followed a link, the frame holds a page out of our reach.
function fillFrame(frame) {
  setAttribute(frame, "sandbox", "allow-same-origin");
  if (frame.isLoaded && frame.contentDocument?.body) {
    const { head, body } = new DOMParser().parseFromString(frame.dataset.html, "text/html");
    frame.contentDocument.body.replaceChildren(...head.childNodes, ...body.childNodes);
    fitFrame(frame);
  } else {
    frame.srcdoc = FRAME_HEAD + frame.dataset.html;
  }
}

// --- the data: everything that the kernel has sent ------------------------------------------

function textOf(row) {
  if (row.text === undefined) {
    const content = /[<&]/.test(row.html) ? parsed(row.html) : null;
    const display = content?.querySelector("img, iframe");
    row.text = display ? display.alt || display.title : (content?.textContent ?? row.html);
    row.isDisplay = Boolean(display);
  }
  return row.text;
}

function prefixOf({ ranks, isGap }) {
  if (isGap) return "";
  const name = `rank${/[-,]/.test(ranks) ? "s" : ""} ${ranks}`;
  return `[${name.length <= LONGEST_PREFIX ? name : plural(numbersOf(ranks).length, "rank")}]`;
}

const lineOf = (row) => `${prefixOf(row)} ${textOf(row)}`.trimStart();

function isOf(row, rank) {
  row.spans ??= spans(row.ranks);
  return row.spans.some(([first, last]) => first <= rank && rank <= last);
}

// The output: rows that several ranks may share, in the order that Python gives them.
class Log {
  constructor() {
    Object.assign(this, { rows: [], byNumber: new Map(), bars: new Map() });
  }

  take({ rows, gone, clear }) {
    if (clear) Object.assign(this, new Log());
    for (const [number, ranks, html, before, isGap] of rows) {
      const row = this.byNumber.get(number) ?? this.add(number, before, isGap);
      row.version += 1;
      if (ranks !== null) Object.assign(row, { ranks, spans: undefined });
      if (html === null) continue;
      // What is drawn anew above the last line of a rank is a progress bar.
      if (row.html !== undefined && row.ranks.length < LONGEST_PREFIX) {
        for (const rank of numbersOf(row.ranks)) this.bars.set(rank, row);
      }
      Object.assign(row, { html, text: undefined });
    }
    for (const number of gone) this.byNumber.delete(number);
    if (gone.length) this.rows = this.rows.filter((row) => this.byNumber.has(row.number));
  }

  add(number, before, isGap) {
    const row = { number, version: 0, isGap: Boolean(isGap) };
    this.byNumber.set(number, row);
    if (before === null) this.rows.push(row);
    else this.rows.splice(this.rows.indexOf(this.byNumber.get(before)) + 1, 0, row);
    return row;
  }

  // The last line of a rank, and a progress bar above it.
  lastOf(rank) {
    const isLast = (row) => !row.isGap && isOf(row, rank) && textOf(row).trim() && !row.isDisplay;
    const last = this.rows.findLast(isLast);
    const bar = this.bars.get(rank);
    const isShown = bar && bar !== last && this.byNumber.get(bar.number) === bar && !bar.isDisplay;
    return [isShown ? textOf(bar).trim() : "", last ? textOf(last).trim() : ""];
  }
}

class Store {
  constructor(whole) {
    Object.assign(this, { listeners: new Set(), parts: {}, log: new Log(), sequence: -1, missed: false });
    this.heard = Boolean(whole?.heard?.includes(PAGE));
    this.drawn = performance.now();
    this.began = this.drawn - (whole?.age ?? 0) * 1000;
    if (whole?.sequence === undefined) return;
    this.sequence = whole.sequence;
    this.parts = { ...whole.parts };
    this.log.take(whole.log);
  }

  // Starts again from everything, unless all of it is known.
  begin(whole) {
    if (whole?.sequence === undefined) return;
    this.heard ||= Boolean(whole.heard?.includes(PAGE));
    if (!this.missed && whole.sequence <= this.sequence) return;
    const { listeners, drawn, heard, model, timers } = this;
    const changed = new Set([...Object.keys(this.parts), ...Object.keys(whole.parts)]);
    Object.assign(this, new Store(whole), { listeners, drawn, heard, model, timers });
    for (const listener of this.listeners) listener(changed);
  }

  take(delta) {
    if (delta?.sequence === undefined || delta.sequence <= this.sequence) return;
    this.missed ||= delta.sequence > this.sequence + 1;
    this.sequence = delta.sequence;
    for (const [key, html] of Object.entries(delta.parts)) {
      if (html === null) delete this.parts[key];
      else this.parts[key] = html;
    }
    if (delta.log) this.log.take(delta.log);
    for (const listener of this.listeners) listener(Object.keys(delta.parts));
  }

  get ranks() {
    const keys = Object.keys(this.parts).filter((key) => /^r\d+$/.test(key));
    return keys.map((key) => Number(key.slice(1))).sort((one, other) => one - other);
  }

  // What a card says in one line.
  lineOf(rank) {
    const parts = [...parsed(this.parts[`r${rank}`]).querySelectorAll("div")];
    const [where = "", ...more] = parts.map((part) => part.textContent);
    return [`rank ${rank}`, where, parsed(this.parts[`u${rank}`] ?? "").textContent, ...more].filter(Boolean).join(" · ");
  }
}

// --- one view of a panel: what its reader has chosen, and the elements that show it ---------------

// Where an arrow key leads from `index`; null for other keys.
function nextIndex(key, index, length, columns) {
  const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns };
  if (key === "Home") return 0;
  if (key === "End") return length - 1;
  if (!(key in steps)) return null;
  const next = index + steps[key];
  return next >= 0 && next < length ? next : index;
}

// How many of these stand side by side.
function inOneLine(elements) {
  const next = elements.findIndex((each) => each.offsetTop !== elements[0].offsetTop);
  return next < 0 ? elements.length : next;
}

const ACTS = {
  stop(view, button) {
    send(view.store, "stop");
    if (button.getAttribute("aria-label") !== "Stop") return;
    setText(view.find(".nblaunch-stopped"), "stopping … press again to end the ranks at once");
  },
  follow: (view) => view.setFollow(!view.follows),
  copy: (view) => view.copy(),
  more: (view) => view.set({ isWhole: !view.isWhole }),
  unfold(view, button) {
    const { key } = button.closest("tbody").dataset;
    if (!view.unfolded.delete(key)) view.unfolded.add(key);
    view.draw();
  },
  log: (view) => view.set({ isLog: !view.isLog }, view.holes.keys()),
  each(view) {
    send(view.store, `lines ${view.byRank ? "off" : "on"}`);
    view.set({ byRank: !view.byRank }, view.holes.keys());
  },
};

class View {
  constructor(store) {
    Object.assign(this, { store, shown: "all", card: null, follows: true });
    Object.assign(this, { unfolded: new Set(), holes: new Map(), lines: new Map() });
    this.panel = parsed(SKELETON).firstElementChild;
    this.find = (selector) => this.panel.querySelector(selector);
    this.all = (selector) => [...this.panel.querySelectorAll(selector)];
    for (const name of ["log", "select", "filter", "present"]) this[name] = this.find(`.nblaunch-${name}`);
    this.panel.addEventListener("click", (event) => this.click(event));
    this.panel.addEventListener("keydown", (event) => this.key(event));
    for (const name of ["pointerover", "focusin"]) {
      this.panel.addEventListener(name, ({ target }) => this.point(target.closest(".nblaunch-cell")));
    }
    this.select.addEventListener("change", () => {
      const rank = Number(this.select.value);
      this.set(Number.isNaN(rank) ? { shown: "all" } : { shown: rank, card: rank });
    });
    for (const name of ["pointerdown", "focus"]) this.select.addEventListener(name, () => this.listRanks(true));
    this.filter.addEventListener("input", () => this.drawLog());
    this.log.addEventListener("scroll", () => this.scrolled());
    // A figure has no height until it is loaded, nor has what is out of sight before it comes near.
    new ResizeObserver(() => this.toEnd()).observe(this.log.firstElementChild);
    this.adopt(this.panel);
  }

  draw(changed = []) {
    const keys = new Set([...changed].map((key) => key.split(".")[0]));
    this.show([...keys].filter((key) => this.panel.contains(this.holes.get(key) ?? null)));
    this.dress();
    this.drawLog();
    this.drawCards();
    this.tick();
  }

  // What a part is now; of a chart the way that the reader wants it.
  content(key) {
    const { parts } = this.store;
    if (!/^c\d+$/.test(key)) return parts[key] ?? "";
    const [each, log] = [this.byRank ? ".each" : "", this.isLog ? ".log" : ""];
    return parts[key + each + log] ?? parts[key + log] ?? parts[key] ?? "";
  }

  show(keys) {
    parsedAll(keys.map((key) => this.content(key))).forEach((content, index) => {
      patch(this.holes.get(keys[index]), content);
      this.adopt(this.holes.get(keys[index]));
    });
  }

  // Fills the elements of other parts in what has come. The notebook's shortcuts match the focused element
  // itself and skip only elements that opt out themselves: an attribute on a parent is not enough.
  adopt(place) {
    const found = [...place.querySelectorAll("[data-key]")].filter((hole) => this.holes.get(hole.dataset.key) !== hole);
    for (const hole of found) this.holes.set(hole.dataset.key, hole);
    if (found.length) this.show(found.map((hole) => hole.dataset.key));
    const takesKeys = ":is(button, select, summary, [tabindex], .nblaunch-cell):not([data-lm-suppress-shortcuts])";
    for (const part of place.querySelectorAll(takesKeys)) {
      part.dataset.lmSuppressShortcuts = "true";
      if (part.matches(".nblaunch-cell") && !part.hasAttribute("tabindex")) part.tabIndex = -1;
    }
  }

  // --- what the reader has chosen, on what Python has drawn ---

  dress() {
    this.present.hidden = Boolean(this.find(".nblaunch-waits"));
    this.dressGroups();
    this.dressMap();
    for (const [act, isOn] of [["log", this.isLog], ["each", this.byRank], ["follow", this.follows]]) {
      const button = this.find(`[data-act=${act}]`);
      if (button) setAttribute(button, "aria-pressed", Boolean(isOn));
    }
    const asked = this.find("[data-asked]");
    if (asked) asked.hidden = !this.store.heard;
  }

  dressGroups() {
    const groups = this.all("tbody[data-key]");
    groups.forEach((group, index) => {
      group.hidden = index >= GROUPS_SHOWN && !this.isWhole;
      const isOpen = this.unfolded.has(group.dataset.key);
      const [button, list] = [group.querySelector("button"), group.querySelector("ul")];
      if (!button) return;
      setAttribute(button, "aria-expanded", isOpen);
      group.querySelector(".nblaunch-below").hidden = !isOpen;
      const ranks = isOpen ? numbersOf(button.dataset.ranks) : [];
      while (list.children.length > ranks.length) list.lastChild.remove();
      const lineAt = (place) => list.children[place] ?? list.appendChild(element("li", ""));
      ranks.forEach((rank, place) => setText(lineAt(place), this.store.lineOf(rank)));
    });
    const more = this.find("[data-act=more]");
    if (!more) return;
    more.hidden = groups.length <= GROUPS_SHOWN;
    setAttribute(more, "aria-expanded", Boolean(this.isWhole));
    setText(more, this.isWhole ? "Fewer rows" : `${groups.length - GROUPS_SHOWN} more rows`);
  }

  // The rank whose card is shown beside the map: the chosen one, else the first that failed, else the first.
  get focused() {
    const { parts } = this.store;
    return `r${this.card}` in parts ? this.card : Number(/\d+/.exec(parts.focus ?? "0")[0]);
  }

  dressMap() {
    const grid = this.find(".nblaunch-map");
    if (!grid) return;
    const cellOf = (rank) => grid.querySelector(`[data-rank="${rank}"]`);
    const [tabbed, chosen] = [cellOf(this.focused), this.shown === "all" ? null : cellOf(this.shown)];
    if (this.tabbed !== tabbed) this.tabbed?.setAttribute("tabindex", -1);
    if (this.chosen !== chosen) this.chosen?.removeAttribute("aria-selected");
    if (chosen) setAttribute(chosen, "aria-selected", true);
    if (tabbed) setAttribute(tabbed, "tabindex", 0);
    Object.assign(this, { tabbed, chosen });
    // Scrolls the map alone, and not under its reader's hands.
    if (tabbed && this.revealed !== tabbed && !grid.contains(document.activeElement)) {
      const top = tabbed.getBoundingClientRect().top - grid.getBoundingClientRect().top;
      if (top < 0 || top > grid.clientHeight - 20) grid.scrollTop += top - grid.clientHeight / 2;
    }
    this.revealed = tabbed;
    this.point(this.pointed);
  }

  // Says in words what the reader points at.
  point(cell) {
    this.pointed = cell;
    const about = this.find(".nblaunch-about");
    if (!about) return;
    const words = [cell?.getAttribute("aria-label"), cell?.dataset.why].filter(Boolean).join(": ");
    setText(about, words || POINT_AT);
    about.classList.toggle("nblaunch-hint", !words);
  }

  drawCards() {
    const cards = this.find(".nblaunch-cards");
    if (!cards) return;
    const ranks = cards.dataset.ranks === undefined ? [this.focused] : numbersOf(cards.dataset.ranks);
    const known = new Map([...cards.children].map((card) => [Number(card.dataset.rank), card]));
    for (const [rank, card] of known) {
      if (!ranks.includes(rank)) card.remove();
    }
    ranks.forEach((rank, index) => {
      const card = known.get(rank) ?? cards.insertBefore(this.makeCard(rank), cards.children[index] ?? null);
      if (!known.has(rank)) this.adopt(card);
      const [bar, last] = this.store.log.lastOf(rank);
      setText(card.querySelector(".nblaunch-bar-line"), bar);
      setText(card.querySelector(".nblaunch-last"), last || "\u00a0");
      for (const line of card.querySelectorAll(".nblaunch-usage, .nblaunch-last, .nblaunch-result")) {
        setAttribute(line, "title", line.textContent.trim());
      }
      setAttribute(card.querySelector("button"), "aria-pressed", this.shown === rank);
      card.classList.toggle("nblaunch-shown", this.shown === rank);
    });
  }

  makeCard(rank) {
    const title = "Show only the output of this rank; once more, of all";
    return parsed(`<article class="nblaunch-card" aria-label="Rank ${rank}" data-rank="${rank}">
      <button type="button" class="nblaunch-title" data-rank="${rank}" title="${title}">Rank ${rank}</button>
      <div class="nblaunch-rank" data-key="r${rank}"></div><div class="nblaunch-usage" data-key="u${rank}"></div>
      <div class="nblaunch-bar-line"></div><div class="nblaunch-last"></div></article>`).firstElementChild;
  }

  // --- clicks and keys ---

  set(chosen, changed) {
    Object.assign(this, chosen);
    this.draw(changed);
  }

  toggle(rank) {
    this.set({ card: rank, shown: this.shown === rank ? "all" : rank });
  }

  click({ target }) {
    const [chosen, button] = [target.closest("button[data-rank], .nblaunch-cell"), target.closest("[data-act]")];
    if (chosen) this.toggle(Number(chosen.dataset.rank));
    if (button) ACTS[button.dataset.act](this, button);
  }

  key(event) {
    const { target, key } = event;
    if (!target.matches(".nblaunch-cell") || !this.keyInMap(key, target)) return;
    event.preventDefault();
    event.stopPropagation();
  }

  keyInMap(key, cell) {
    if (key === "Enter" || key === " ") {
      this.toggle(Number(cell.dataset.rank));
      return true;
    }
    const hosts = this.all(".nblaunch-cells").map((host) => [...host.children]);
    const cells = hosts.flat();
    let next = null;
    if (hosts.length === 1 || !["ArrowUp", "ArrowDown"].includes(key)) {
      next = cells[nextIndex(key, cells.indexOf(cell), cells.length, hosts.length === 1 ? inOneLine(cells) : 1)];
    } else {
      const place = hosts.findIndex((host) => host.includes(cell));
      const columns = inOneLine(hosts.map(([first]) => first.closest(".nblaunch-host")));
      const host = hosts[nextIndex(key, place, hosts.length, columns)];
      next = host[Math.min(hosts[place].indexOf(cell), host.length - 1)];
    }
    if (!next) return false;
    this.tabbed.tabIndex = -1;
    this.tabbed = next;
    Object.assign(next, { tabIndex: 0 }).focus();
    return true;
  }

  // --- the output ---

  entries() {
    const wanted = this.filter.value.toLowerCase();
    const { rows } = this.store.log;
    const found = this.shown === "all" ? rows : rows.filter((row) => isOf(row, this.shown));
    const matching = wanted ? found.filter((row) => !row.isGap && lineOf(row).toLowerCase().includes(wanted)) : found;
    return matching.slice(-ROWS_SHOWN);
  }

  drawLog() {
    this.listRanks(false);
    const entries = this.entries();
    const keep = new Set(entries);
    for (const [row, line] of this.lines) {
      if (keep.has(row)) continue;
      line.element.remove();
      this.lines.delete(row);
    }
    let place = this.log.firstElementChild.firstChild;
    for (const row of entries) {
      const line = this.lines.get(row) ?? this.makeLine(row);
      if (line.version !== row.version) this.drawLine(line, row);
      if (line.element === place) place = place.nextSibling;
      else this.log.firstElementChild.insertBefore(line.element, place);
    }
    this.log.classList.toggle("nblaunch-empty", !entries.length);
    this.log.dataset.empty = this.filter.value ? "no line has this" : "no output yet";
    this.toEnd();
  }

  makeLine(row) {
    const [prefix, text] = [element("span", "nblaunch-prefix"), element("span", "nblaunch-text")];
    const line = { element: element("div", `nblaunch-entry${row.isGap ? " nblaunch-gap" : ""}`), prefix, text };
    line.element.append(prefix, text);
    this.lines.set(row, line);
    return line;
  }

  drawLine(line, row) {
    line.version = row.version;
    const prefix = prefixOf(row);
    setText(line.prefix, `${prefix} `);
    line.prefix.hidden = !prefix;
    line.prefix.title = row.ranks;
    if (line.html === row.html) return;
    line.html = row.html;
    patch(line.text, parsed(row.html || " "));
  }

  setFollow(follows) {
    setAttribute(this.find("[data-act=follow]"), "aria-pressed", (this.follows = follows));
    this.toEnd();
  }

  toEnd() {
    if (!this.follows) return;
    this.log.scrollTop = this.log.scrollHeight;
    this.scrolledTo = this.log.scrollTop;
  }

  // Scrolling up stops following the output; scrolling down to the end follows it again.
  scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.log;
    const atEnd = scrollHeight - clientHeight - scrollTop < 8;
    const movedUp = scrollTop < (this.scrolledTo ?? 0);
    this.scrolledTo = scrollTop;
    if (atEnd !== this.follows && (atEnd || movedUp)) this.setFollow(atEnd);
  }

  // Of many ranks only the chosen one is listed, until the reader opens the list.
  listRanks(isOpened) {
    const { ranks, parts } = this.store;
    this.isListed ||= isOpened || ranks.length <= FEW_RANKS;
    const wanted = this.isListed ? ranks : ranks.filter((rank) => rank === this.shown);
    if (this.listed !== wanted.join()) {
      this.listed = wanted.join();
      const hostOf = (rank) => parsed(/data-host="([^"]*)"/.exec(parts[`r${rank}`])?.[1] ?? "").textContent;
      const nameOf = (rank) => `rank ${rank}${hostOf(rank) ? ` on ${hostOf(rank)}` : ""}`;
      const option = (value, name) => Object.assign(element("option", "", name), { value });
      this.select.replaceChildren(option("all", "all ranks"), ...wanted.map((rank) => option(rank, nameOf(rank))));
    }
    if (this.select.value !== String(this.shown)) this.select.value = String(this.shown);
  }

  async copy() {
    const lines = this.entries().map(lineOf);
    const done = await copied(`${lines.join("\n")}\n`, this.panel);
    const note = this.find(".nblaunch-note");
    setText(note, done ? `copied ${plural(lines.length, "line")}` : "this page may not copy");
    setTimeout(() => setText(note, ""), 2000);
  }

  // What changes with time alone.
  tick() {
    const { store } = this;
    setText(this.find(".nblaunch-elapsed"), formatSeconds((performance.now() - store.began) / 1000));
    const [button, hint] = [this.find(".nblaunch-stop"), this.find(".nblaunch-interrupt")];
    if (button) button.hidden = !store.heard;
    if (hint) hint.hidden = store.heard || performance.now() - store.drawn < 1500;
  }
}

async function copied(text, place) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // A page that was not loaded over https has no `navigator.clipboard`.
    const field = element("textarea", "nblaunch-hidden");
    field.value = text;
    place.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    return done;
  }
}

// --- what anywidget calls ----------------------------------------------------------------------------------

// One store for all views of a panel; a view that is opened later finds everything in it. A page that has the
// panel gets it once more when another page comes: a new model, which goes on with the store. Every model has a
// copy of this script, so the page itself holds the stores.
const shared = (globalThis.nblaunch ??= { name: Math.random().toString(36).slice(2), stores: new Map() });
const PAGE = shared.name;

function initialize({ model }) {
  const name = model.get("name");
  const store = shared.stores.get(name) ?? new Store(model.get("whole"));
  shared.stores.set(name, store);
  // The last model has the comm that is open.
  store.model = model;
  store.timers ??= result(model) ? [] : calls(store);
  const listeners = {
    "change:delta": () => store.take(model.get("delta")),
    "change:whole": () => store.begin(model.get("whole")),
    "change:final": () => settle(model, () => result(model)),
  };
  // The kernel that ran the cell has ended, and the panel with it.
  const left = (_, word) => {
    if (["restarting", "autorestarting", "dead"].includes(word)) settle(model, (data) => withOutput(data, store));
  };
  const status = model.widget_manager?.context?.sessionContext?.statusChanged;
  status?.connect(left);
  for (const [name, listener] of Object.entries(listeners)) model.on(name, listener);
  listeners["change:whole"]();
  listeners["change:delta"]();
  return () => {
    for (const [name, listener] of Object.entries(listeners)) model.off(name, listener);
    status?.disconnect(left);
    if (store.model !== model) return;
    store.timers.forEach(clearInterval);
    shared.stores.delete(name);
  };
}

// Nobody reads it once the kernel has been restarted, and the front end raises.
function send(store, text) {
  try {
    store.model.send(text);
  } catch {}
}

function calls(store) {
  // A kernel that receives this while it is busy can be stopped from here. JupyterLab only now opens the channel
  // that a busy kernel reads; what is sent before it is open arrives after the run. On a busy machine that takes
  // seconds: a page that gave up would have no Stop button, and would lack for the whole run what it has missed.
  let pause = HELLO_AFTER;
  const hello = () => {
    if (store.heard) return;
    send(store, `hello ${PAGE}`);
    pause = Math.min(2 * pause, HELLO_EVERY);
    store.timers[0] = setTimeout(hello, pause);
  };
  // A page that missed a delta asks for everything until it comes.
  const again = () => store.missed && store.heard && send(store, "again");
  return [setTimeout(hello, pause), setInterval(again, ASK_EVERY)];
}

function result(model) {
  const data = model.get("final");
  return data?.["text/plain"] === undefined ? null : data;
}

// What the cell shows where there are no widgets, with the output that this page has.
function withOutput(data, store) {
  const text = store.log.rows.map(lineOf).join("\n");
  const escaped = text.replace(/[&<]/g, (sign) => `&#${sign.charCodeAt(0)};`);
  const html = `${data["text/html"]}<pre style="margin:4px 0;padding:0">${escaped}</pre>`;
  return { "text/html": html, "text/plain": `${data["text/plain"]}\n${text}` };
}

// Puts what stays of the run in the panel's place, in the notebook that the page shows and saves. The page that ran
// the cell has it already; one that was loaded later does not know where a display update goes.
function settle(model, dataFor) {
  for (const cell of model.widget_manager?.context?.model?.cells ?? []) {
    for (let index = 0; index < (cell.outputs?.length ?? 0); index += 1) {
      const old = cell.outputs.get(index).data ?? {};
      if (!Object.values(old).some((form) => form?.model_id === model.get("name"))) continue;
      const data = dataFor(old);
      if (data) cell.outputs.set(index, { output_type: "display_data", data, metadata: {} });
    }
  }
}

function render({ model, el }) {
  if (result(model)) {
    // Where this page has no notebook.
    el.append(element("pre", "", result(model)["text/plain"]));
    // Not before this view is in the page.
    setTimeout(() => settle(model, () => result(model)));
    return undefined;
  }
  const store = shared.stores.get(model.get("name"));
  const view = new View(store);
  el.append(view.panel);
  // A page in the background draws nothing, and everything when it comes back. On a machine that is busy
  // with the ranks drawing takes a quarter of the time at most: the page has to answer its reader.
  const dirty = new Set();
  let [due, timer, rested] = [0, 0, 0];
  const drawSoon = () => {
    if (due || timer) return;
    const wait = rested - performance.now();
    if (wait > 0) timer = setTimeout(() => ((timer = 0), drawSoon()), wait);
    else due = requestAnimationFrame(drawNow);
  };
  const drawNow = () => {
    const begun = performance.now();
    const changed = [...dirty];
    due = 0;
    dirty.clear();
    view.draw(changed);
    rested = performance.now() + 3 * (performance.now() - begun);
  };
  const told = (changed) => {
    for (const key of changed) dirty.add(key);
    drawSoon();
  };
  const clock = setInterval(() => view.tick(), 500);
  store.listeners.add(told);
  view.draw();
  return () => {
    clearInterval(clock);
    clearTimeout(timer);
    cancelAnimationFrame(due);
    store.listeners.delete(told);
  };
}

export default { initialize, render };
