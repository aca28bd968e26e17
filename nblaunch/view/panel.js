// The live panel. What a rank wrote is set as textContent: it cannot become markup. The one exception is HTML
// that a rank displays: it goes into a frame in which no script runs.

const MOST_CARDS = 8;
const MOST_TILES = 64;
const DENSE_CELLS = 256;
const LONGEST_HOST = 18;
const POINT_AT = "Point at a cell, or use the arrow keys: its rank is named here. Click, or press Enter: its output.";
const KEPT_PIECES = 500;
const FOLDED_ROWS = 600;
const LONGEST_PREFIX = 40;
const MOST_CAUSES = 4;
const MOST_ROWS = 8;
const MOST_VALUES = 8;
const SHORT_VALUE = 40;
const SHORT_VALUES = 64;
const NEAR_ROWS = 60;
const NEXT_PIECES = 8;
const HELLO_AFTER = 200;
const HELLO_EVERY = 3_600_000;
const ASK_EVERY = 1000;
const STATES = ["FAILED", "LOST", "STOPPED", "RUNNING", "STARTING", "INIT", "SUCCEEDED"];
const STRAGGLER = "⚠";

// These elements take keys. The notebook's shortcuts match the focused element itself and skip only elements
// that opt out themselves: an attribute on a parent is not enough.
const TAKE_KEYS = new Set(["button", "select", "summary"]);

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (TAKE_KEYS.has(tag)) made.dataset.lmSuppressShortcuts = "true";
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function labelled(tag, className, label, role) {
  const made = element(tag, className);
  made.setAttribute("aria-label", label);
  if (role) made.setAttribute("role", role);
  return made;
}

// Setting what is there already would lose the reader's selection.
function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

function setAttribute(target, name, value) {
  if (target.getAttribute(name) !== value) target.setAttribute(name, value);
}

function formatRanks(ranks) {
  const numbers = [...ranks].sort((one, other) => one - other);
  const parts = [];
  for (let index = 0; index < numbers.length; ) {
    let end = index;
    while (numbers[end + 1] === numbers[end] + 1) end += 1;
    parts.push(end === index ? `${numbers[index]}` : `${numbers[index]}-${numbers[end]}`);
    index = end + 1;
  }
  return `rank${numbers.length === 1 ? "" : "s"} ${parts.join(",")}`;
}

// Ranks as a short cell has them, and as a screen reader is to say them.
function shortRanks(ranks) {
  const numbers = formatRanks(ranks).split(" ")[1];
  if (numbers.length <= LONGEST_PREFIX) return numbers;
  const count = `${plural(ranks.length, "rank")} (`;
  const some = numbers.slice(0, LONGEST_PREFIX - count.length);
  return `${count}${some.slice(0, some.lastIndexOf(","))},…)`;
}

function spokenRanks(ranks) {
  const [word, numbers] = formatRanks(ranks).split(" ");
  if (numbers.length > LONGEST_PREFIX) return plural(ranks.length, "rank");
  return `${word} ${numbers.replaceAll("-", " to ").replaceAll(",", ", ")}`;
}

// The prefix of a line; computed when it is drawn, not each time that one more rank has the line.
function prefixOf(entry) {
  if (!entry.members || entry.isGap) return "";
  if (entry.named !== entry.version) {
    entry.named = entry.version;
    entry.ranks = formatRanks(entry.members);
    const isShort = entry.ranks.length <= LONGEST_PREFIX;
    entry.prefix = `[${isShort ? entry.ranks : plural(entry.members.size, "rank")}]`;
  }
  return entry.prefix;
}

function lineOf(entry) {
  return `${prefixOf(entry)} ${textOf(entry.piece)}`.trimStart();
}

function formatBytes(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(Math.floor(Math.log2(Math.max(bytes, 1)) / 10), units.length - 1);
  const value = bytes / 1024 ** power;
  return `${value.toFixed(value < 10 && power > 2 ? 1 : 0)} ${units[power]}`;
}

function formatRange(least, most, format, unit) {
  const [low, high] = [format(least), format(most)];
  if (low === high) return `${low}${unit}`;
  const end = low.indexOf(" ");
  // One unit for both, if it is the same.
  return end > 0 && high.endsWith(low.slice(end)) ? `${low.slice(0, end)}-${high}` : `${low}-${high}${unit}`;
}

function formatSeconds(seconds) {
  const whole = Math.max(Math.floor(seconds), 0);
  const two = (value) => String(value).padStart(2, "0");
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

function plural(count, word) {
  return `${count} ${word}${count === 1 ? "" : "s"}`;
}

// --- pieces: a line or a display, as Python's `PanelPiece` describes them --------------------------------------

function isDisplay(piece) {
  return Array.isArray(piece) && typeof piece[0] === "string";
}

function textOf(piece) {
  if (typeof piece === "string") return piece;
  if (isDisplay(piece)) return piece[0] === "image" ? piece[3] : piece[piece.length - 1];
  return typeof piece[1] === "string" ? piece[1] : piece[1].map(([, text]) => text).join("");
}

function styledRuns(runs) {
  return runs.map(([code, text]) => {
    const names = [];
    if (code & 7) names.push(`nblaunch-c${code & 7}`);
    if (code & 8) names.push("nblaunch-bold");
    if (code & 16) names.push("nblaunch-italic");
    if (code & 32) names.push("nblaunch-underline");
    return element("span", names.join(" "), text);
  });
}

function fillLine(target, piece) {
  target.classList.toggle("nblaunch-stderr", Array.isArray(piece) && piece[0] === 1);
  if (typeof piece === "string") target.textContent = piece || " ";
  else if (isDisplay(piece)) fillDisplay(target, piece);
  else if (typeof piece[1] === "string") target.textContent = piece[1] || " ";
  else target.replaceChildren(...styledRuns(piece[1]));
}

// A display that is redrawn often, a progress bar in HTML or a growing plot, keeps its element: a new one would
// be blank until it is loaded.
function fillDisplay(target, piece) {
  const shown = target.firstElementChild;
  if (piece[0] === "image" && shown?.tagName === "IMG") fillImage(shown, piece);
  else if (piece[0] === "html" && shown?.tagName === "IFRAME" && shown.refill?.(piece[1])) return;
  else target.replaceChildren(drawDisplay(piece));
}

function drawDisplay(piece) {
  if (piece[0] === "image") return fillImage(element("img", "nblaunch-image"), piece);
  if (piece[0] === "html") return sandboxed(piece[1]);
  if (piece[0] === "waiting") return element("em", "", "… a display that is on its way …");
  return element("span", "", piece[1]);
}

function fillImage(image, [, type, data, text, width, height]) {
  image.src = `data:${type};base64,${data}`;
  image.alt = text;
  for (const [name, value] of [["width", width], ["height", height]]) {
    if (value) image.setAttribute(name, value);
    else image.removeAttribute(name);
  }
  return image;
}

const FRAME_STYLE = `
  body { margin: 0; background: transparent; }
  table { border-collapse: collapse; border: none; font-size: inherit; }
  td, th { text-align: right; padding: 2px 8px; border: none; max-width: 30em; }
  thead { border-bottom: 1px solid currentcolor; }
  tbody tr:nth-child(odd) { background: rgba(127, 127, 127, 0.12); }
  img { max-width: 100%; }
`;

// HTML of a rank, as it would look in the notebook, where it can run no script and open no page.
function sandboxed(markup) {
  const frame = element("iframe", "nblaunch-frame");
  frame.setAttribute("sandbox", "allow-same-origin");
  frame.title = "HTML that a rank displayed";
  const fit = () => {
    const page = frame.contentDocument;
    if (!page?.body) return;
    const { color, colorScheme, fontFamily, fontSize } = getComputedStyle(frame.parentElement ?? frame);
    Object.assign(page.documentElement.style, { color, colorScheme, fontFamily, fontSize });
    frame.style.height = `${Math.min(page.documentElement.scrollHeight + 2, 480)}px`;
  };
  frame.addEventListener("load", () => {
    fit();
    // Returns whether it succeeded: after a reader has followed a link, the frame holds a page out of our reach.
    frame.refill = (other) => {
      if (!frame.contentDocument?.body) return false;
      const { head, body } = new DOMParser().parseFromString(other, "text/html");
      frame.contentDocument.body.replaceChildren(...head.childNodes, ...body.childNodes);
      fit();
      return true;
    };
  });
  frame.srcdoc =
    "<!doctype html><meta http-equiv='Content-Security-Policy' " +
    "content=\"default-src 'none'; img-src data: blob: http: https:; style-src 'unsafe-inline'\">" +
    `<style>${FRAME_STYLE}</style><body>${markup}`;
  return frame;
}

// --- the data: everything that the kernel has sent ------------------------------------------

// The end of one rank's output: pieces in the order of their numbers. A gap in the numbers is what was left out.
class Tail {
  constructor(base) {
    this.base = base;
    this.next = base;
    this.items = new Map();
    this.order = [];
    this.last = "";
    this.bar = "";
  }

  // Adds a piece: a new one, or another state of a known one.
  add(number, piece) {
    const known = this.items.get(number);
    if (known) {
      known.piece = piece;
      known.version += 1;
      const isLast = number === this.order[this.order.length - 1];
      if (!isLast && !isDisplay(piece)) this.bar = textOf(piece).trim();
    } else {
      this.items.set(number, { number, piece, version: 0 });
      let place = this.order.length;
      while (place && this.order[place - 1] > number) place -= 1;
      this.order.splice(place, 0, number);
    }
    if (number >= this.next - 1) {
      this.next = Math.max(this.next, number + 1);
      if (!isDisplay(piece)) this.last = textOf(piece).trim() || this.last;
    }
  }

  trim() {
    for (const number of this.order.splice(0, Math.max(this.order.length - KEPT_PIECES, 0))) {
      this.items.delete(number);
    }
  }

  // What a pane shows: the pieces, and between them how many lines were left out.
  entries() {
    const entries = [];
    let expected = this.base;
    for (const number of this.order) {
      const item = this.items.get(number);
      const missing = number - expected;
      if (missing > 0) entries.push((item.gap = gapBefore(item, missing)));
      entries.push(item);
      expected = number + 1;
    }
    return entries;
  }
}

function gapText(missing, ranks) {
  return `… ${plural(missing, "line")}${ranks ? ` of ${formatRanks(ranks)}` : ""} left out …`;
}

function gapBefore({ gap }, missing) {
  if (gap?.missing === missing) return gap;
  return { missing, piece: gapText(missing), isGap: true, version: 0 };
}

// The output of all ranks as one list in which each rank's lines keep their order; what several ranks wrote
// is there once, as long as no rank's order is broken by it.
class Fold {
  constructor() {
    this.rows = [];
    this.byKey = new Map();
    this.reached = new Map();
    this.made = 0;
  }

  static key(piece) {
    return typeof piece === "string" ? piece : JSON.stringify(piece);
  }

  // Adds `news[index]`, a piece of a rank; those after it are what the rank wrote next.
  add(rank, tail, number, news, index) {
    const piece = news[index];
    const item = tail.items.get(number);
    const before = item.row?.isGone ? undefined : item.row;
    const key = Fold.key(piece);
    if (before?.key === key) return;
    const [lower, upper] = this.bounds(rank, tail, number);
    const row = this.find(key, rank, lower, upper);
    if (before && !row && before.members.size === 1) {
      this.forget(before);
      Object.assign(before, { key, piece, version: before.version + 1 });
      this.remember(before);
      return;
    }
    if (before) this.leave(before, rank);
    const joined =
      row ??
      (before
        ? this.insert(key, piece, this.rows.indexOf(before) + Number(rank > Math.min(...before.members)))
        : this.insert(key, piece, this.placeBelow(this.ahead(rank, lower, upper, news, index))));
    this.join(joined, rank);
    item.row = joined;
    if (upper === Infinity) this.reached.set(rank, joined.order);
  }

  find(key, rank, lower, upper) {
    const rows = this.byKey.get(key) ?? [];
    const found = rows.find((row) => row.order > lower && row.order < upper && !row.members.has(rank));
    if (!found || textOf(found.piece).trim()) return found;
    // A blank line further down would put the rank's next lines below it.
    const above = this.rows[this.rows.indexOf(found) - 1];
    return !above || above.order <= lower ? found : undefined;
  }

  // A line that only this rank has goes before its next shared line, which could not be shared otherwise; only
  // close to the end, where the reader looks.
  ahead(rank, lower, upper, news, index) {
    const near = Math.max(lower, this.rows[this.rows.length - NEAR_ROWS]?.order ?? -Infinity);
    for (let next = index + 1; next < Math.min(news.length, index + NEXT_PIECES); next += 1) {
      const row = textOf(news[next]).trim() && this.find(Fold.key(news[next]), rank, near, upper);
      if (row) return row.order;
    }
    return upper;
  }

  // One note for all that was left out in a tick.
  leaveOut(gaps) {
    if (!gaps.size) return;
    let row = this.rows[this.rows.length - 1];
    if (!row?.isGap) {
      row = { key: "", piece: "", members: new Set(), isGap: true, missing: 0, version: 0 };
      row.order = this.made += 1;
      this.rows.push(row);
    }
    for (const [rank, missing] of gaps) {
      row.members.add(rank);
      row.missing += missing;
      this.reached.set(rank, row.order);
    }
    row.piece = gapText(row.missing, row.members);
    row.version += 1;
  }

  clear(rank) {
    for (const row of [...this.rows]) {
      if (row.members.has(rank) && !row.isGap) this.leave(row, rank);
    }
  }

  trim() {
    if (this.rows.length <= FOLDED_ROWS * 1.3) return;
    for (const row of this.rows.splice(0, this.rows.length - FOLDED_ROWS)) this.forget(row);
  }

  // Between which rows a rank's piece belongs: after its previous piece, before its next one.
  bounds(rank, tail, number) {
    const place = tail.order.lastIndexOf(number);
    const order = (neighbour) => tail.items.get(neighbour).row?.order;
    const isLast = place === tail.order.length - 1;
    const lower = place > 0 ? order(tail.order[place - 1]) : undefined;
    const upper = isLast ? Infinity : order(tail.order[place + 1]);
    return [lower ?? (isLast ? this.reached.get(rank) : undefined) ?? -Infinity, upper ?? Infinity];
  }

  placeBelow(order) {
    if (order === Infinity) return this.rows.length;
    const place = this.rows.findIndex((each) => each.order >= order);
    return place < 0 ? this.rows.length : place;
  }

  insert(key, piece, place) {
    const row = { key, piece, members: new Set(), version: 0 };
    if (place === this.rows.length) {
      row.order = this.made += 1;
      this.rows.push(row);
    } else {
      row.order = ((this.rows[place - 1]?.order ?? this.rows[place].order - 1) + this.rows[place].order) / 2;
      this.rows.splice(place, 0, row);
    }
    this.remember(row);
    return row;
  }

  join(row, rank) {
    row.members.add(rank);
    row.version += 1;
  }

  leave(row, rank) {
    row.members.delete(rank);
    if (row.members.size) {
      row.version += 1;
    } else {
      this.forget(row);
      this.rows.splice(this.rows.indexOf(row), 1);
    }
  }

  remember(row) {
    row.isGone = false;
    if (!this.byKey.has(row.key)) this.byKey.set(row.key, []);
    this.byKey.get(row.key).push(row);
  }

  forget(row) {
    row.isGone = true;
    const rows = this.byKey.get(row.key);
    const place = rows?.indexOf(row) ?? -1;
    if (place >= 0) rows.splice(place, 1);
    if (rows?.length === 0) this.byKey.delete(row.key);
  }
}

class Store {
  constructor(whole) {
    this.listeners = new Set();
    this.header = {};
    this.rows = new Map();
    // Another object whenever ranks have come or gone, and whenever anything of them has changed.
    this.members = {};
    this.news = {};
    this.values = {};
    this.report = null;
    this.curves = null;
    this.tails = new Map();
    this.fold = new Fold();
    this.attempt = 0;
    this.sequence = -1;
    this.heard = Boolean(whole?.heard?.includes(PAGE));
    this.missed = false;
    this.began = performance.now() - (whole?.age ?? 0) * 1000;
    this.drawn = performance.now();
    if (!whole || whole.sequence === undefined) return;
    this.sequence = whole.sequence;
    this.takeRanks({ header: whole.header, rows: whole.rows, removed: [], values: whole.values });
    this.report = whole.report;
    this.takeOutput(whole.output, false);
    if (whole.curves) this.takeCurves(whole.curves);
  }

  // Starts again from everything, unless all of it is known.
  begin(whole) {
    if (whole?.sequence === undefined) return;
    this.heard ||= Boolean(whole.heard?.includes(PAGE));
    if (!this.missed && whole.sequence <= this.sequence) return;
    const { listeners, drawn, heard, model, timers } = this;
    Object.assign(this, new Store(whole), { listeners, drawn, heard, model, timers });
    for (const listener of this.listeners) listener();
  }

  take(delta) {
    if (delta?.sequence === undefined || delta.sequence <= this.sequence) return;
    this.missed ||= delta.sequence > this.sequence + 1;
    this.sequence = delta.sequence;
    if (delta.ranks) this.takeRanks(delta.ranks);
    if (delta.report) this.report = delta.report;
    if (delta.output) this.takeOutput(delta.output, true);
    if (delta.curves) this.takeCurves(delta.curves);
    for (const listener of this.listeners) listener();
  }

  takeRanks({ header, rows, removed, values }) {
    this.header = header;
    Object.assign(this.values, values);
    for (const rank of removed) this.rows.delete(Number(rank));
    let isNew = false;
    for (const row of Object.values(rows)) {
      isNew ||= !this.rows.has(row.rank);
      this.rows.set(row.rank, row);
    }
    if (isNew) this.rows = new Map([...this.rows].sort(([one], [other]) => one - other));
    this.news = {};
    if (isNew || removed.length) this.members = {};
  }

  takeCurves({ names, more, ranks, curves }) {
    const known = this.curves?.byName ?? new Map();
    for (const [name, { whole, cells, lines, drawn, apart, words }] of Object.entries(curves)) {
      const before = whole ? undefined : known.get(name);
      const curve = before ?? { cells: new Map(), lines: new Map() };
      for (let place = 0; place < cells.length; place += 4) curve.cells.set(cells[place], cells.slice(place + 1, place + 4));
      for (const [rank, points] of Object.entries(lines)) {
        const line = curve.lines.get(Number(rank)) ?? new Map();
        for (let place = 0; place < points.length; place += 2) line.set(points[place], points[place + 1]);
        curve.lines.set(Number(rank), line);
      }
      for (const rank of curve.lines.keys()) {
        if (!drawn.includes(rank)) curve.lines.delete(rank);
      }
      known.set(name, Object.assign(curve, { apart, words, news: {} }));
    }
    this.curves = { names: names.filter((name) => known.has(name)), more, ranks, byName: known };
  }

  takeOutput({ attempt, pieces, tails }, gapsAreNew) {
    if (attempt !== this.attempt) {
      this.attempt = attempt;
      this.tails = new Map();
      this.fold = new Fold();
    }
    const news = Object.entries(tails).map(([rank, lines]) => [Number(rank), lines]);
    const gaps = new Map();
    for (const [rank, { clear, sent }] of news) {
      if (clear !== undefined || !this.tails.has(rank)) {
        if (this.tails.has(rank)) this.fold.clear(rank);
        this.tails.set(rank, new Tail(clear ?? 0));
      }
      const { next } = this.tails.get(rank);
      const first = sent.filter((_, index) => index % 2 === 0).find((number) => number >= next);
      if (first > next) gaps.set(rank, first - next);
    }
    if (gapsAreNew) this.fold.leaveOut(gaps);
    for (const [rank, { sent }] of news) {
      const tail = this.tails.get(rank);
      const written = sent.filter((_, index) => index % 2).map((place) => pieces[place]);
      written.forEach((piece, index) => {
        tail.add(sent[2 * index], piece);
        this.fold.add(rank, tail, sent[2 * index], written, index);
      });
      tail.trim();
    }
    this.fold.trim();
  }

  entries(shown) {
    if (shown === "all") return this.fold.rows;
    return this.tails.get(shown)?.entries() ?? [];
  }

  get seconds() {
    return (performance.now() - this.began) / 1000;
  }
}

// --- the parts of the panel: each makes its element once, and draws what has changed into it ---------------

function stateWord(state, icon, phase) {
  const word = element("span", `nblaunch-state nblaunch-${state}`);
  const sign = element("span", "nblaunch-icon", icon);
  sign.setAttribute("aria-hidden", "true");
  word.append(sign, element("span", "", state === "STARTING" && phase ? `${state} (${phase})` : state));
  return word;
}

class Head {
  constructor(store, stop) {
    this.store = store;
    this.element = element("div", "nblaunch-head");
    this.word = element("strong");
    this.what = element("span");
    this.elapsed = element("span", "nblaunch-elapsed");
    this.elapsed.title = "time since the run began";
    this.bar = labelled("div", "nblaunch-bar", "", "img");
    this.counts = element("span", "nblaunch-counts");
    this.hint = element("span", "nblaunch-hint");
    this.button = element("button", "nblaunch-button nblaunch-stop");
    this.button.type = "button";
    this.stopped = element("span", "nblaunch-hint");
    this.stopped.setAttribute("role", "status");
    this.button.addEventListener("click", () => {
      stop();
      if (this.store.header.stop === "Stop") setText(this.stopped, "stopping … press again to end the ranks at once");
    });
    this.nodes = element("div", "nblaunch-nodes");
    const line = element("div", "nblaunch-line");
    line.append(this.word, this.what, this.elapsed, this.stopped, this.hint, this.button);
    this.ranks = element("div", "nblaunch-line");
    this.ranks.append(this.bar, this.counts);
    this.hosts = element("div", "nblaunch-hosts");
    this.waits = element("div", "nblaunch-hint");
    this.element.append(line, this.nodes, this.waits, this.ranks, this.hosts);
  }

  draw() {
    const { header } = this.store;
    if (this.drawn !== header) {
      this.drawn = header;
      this.word.replaceChildren(stateWord(header.state ?? "", header.icon ?? ""));
      setText(this.what, [header.what, header.node, header.restarts, header.logs, header.note].filter(Boolean).join(" · "));
      this.what.title = header.magic ?? "";
      setText(this.nodes, header.nodes ? `${header.soon ? `${STRAGGLER} ` : ""}${header.nodes}` : "");
      this.nodes.hidden = !header.nodes;
      this.nodes.classList.toggle("nblaunch-soon", Boolean(header.soon));
      setText(this.waits, header.waits ?? "");
      this.waits.hidden = !header.waits;
      this.ranks.hidden = Boolean(header.waits);
      if (this.named !== header.hosts) {
        this.named = header.hosts;
        const lines = header.hosts ? header.hosts.split("\n") : [];
        this.hosts.replaceChildren(...lines.map((line) => element("div", "", line)));
        this.hosts.hidden = !lines.length;
      }
      const stop = header.stop ?? "Stop";
      setText(this.hint, `interrupt the kernel to ${stop.toLowerCase()}`);
      setText(this.button, `■ ${stop}`);
      setAttribute(this.button, "aria-label", stop);
    }
    this.drawCounts();
    this.tick();
  }

  drawCounts() {
    if (this.counted === this.store.news) return;
    this.counted = this.store.news;
    const counts = new Map(STATES.map((state) => [state, []]));
    for (const row of this.store.rows.values()) counts.get(row.state)?.push(row);
    const present = [...counts].filter(([, some]) => some.length);
    const summary = present.map(([state, some]) => `${some.length} ${state}`).join(", ");
    if (this.summary === summary) return;
    this.summary = summary;
    this.bar.setAttribute("aria-label", `Ranks by state: ${summary}`);
    this.bar.replaceChildren(
      ...present.map(([state, some]) => {
        const part = element("span", `nblaunch-part nblaunch-${state}`);
        part.style.flexGrow = some.length;
        return part;
      }),
    );
    this.counts.replaceChildren(
      ...present.map(([state, some]) => {
        const part = element("span", "nblaunch-count");
        part.append(`${some.length} `, stateWord(state, some[0].icon));
        return part;
      }),
    );
  }

  // What changes with time alone.
  tick() {
    setText(this.elapsed, formatSeconds(this.store.seconds));
    this.button.hidden = !this.store.heard;
    this.hint.hidden = this.store.heard || performance.now() - this.store.drawn < 1500;
  }
}

function failurePart(cause, index) {
  const part = element("div");
  const line = element("div");
  line.append(
    element("strong", "", `${index ? "Also failed" : "Root cause"}: ${cause.ranks}: `),
    element("code", "", cause.why),
  );
  part.append(line);
  if (cause.traceback.length) {
    const text = element("pre", "nblaunch-pre");
    for (const piece of cause.traceback) {
      const shown = element("div");
      fillLine(shown, piece);
      text.append(shown);
    }
    part.append(folding("Traceback", text, index === 0));
  }
  return part;
}

function folding(title, content, open) {
  const part = element("details");
  part.open = open;
  part.append(element("summary", "", title), content);
  return part;
}

class Failure {
  constructor(store) {
    this.store = store;
    this.element = labelled("div", "nblaunch-failure", "Failure", "group");
    this.element.hidden = true;
  }

  draw() {
    const { report } = this.store;
    if (this.drawn === report) return;
    this.drawn = report;
    const causes = (report?.causes ?? []).map(failurePart);
    const parts = causes.slice(0, MOST_CAUSES);
    if (causes.length > MOST_CAUSES) {
      const rest = element("div", "nblaunch-indent");
      rest.append(...causes.slice(MOST_CAUSES));
      parts.push(folding(`${causes.length - MOST_CAUSES} more failures`, rest, false));
    }
    if (report?.consequences.length) {
      const lines = report.consequences.map((text) => element("div", "nblaunch-code", text));
      const list = element("div", "nblaunch-indent");
      list.append(...lines);
      const title = plural(report.consequence_count, "consequence");
      parts.push(folding(`${title} of it`, list, false));
    }
    parts.push(...(report?.warnings ?? []).map((text) => element("div", "nblaunch-code", text)));
    this.element.hidden = !parts.length;
    this.element.replaceChildren(...parts);
  }
}

class Hang {
  constructor(store) {
    this.store = store;
    this.element = element("div", "nblaunch-hang");
  }

  draw() {
    const text = this.store.report?.hang ?? "";
    if (this.drawn === text) return;
    this.drawn = text;
    const note = element("pre", "nblaunch-pre", text);
    this.element.replaceChildren(...(text ? [folding("Where the ranks are", note, true)] : []));
  }
}

// One tab for each attempt, the present one last; without a restart there are none.
class Attempts {
  constructor(store, present) {
    this.store = store;
    this.present = present;
    this.element = element("div");
    this.tabs = labelled("div", "nblaunch-tabs", "Attempts", "tablist");
    this.past = element("div", "nblaunch-past");
    this.past.tabIndex = 0;
    this.element.append(this.tabs, this.past, present);
    this.chosen = null;
    this.names = `nblaunch-${Math.random().toString(36).slice(2)}`;
    this.past.id = `${this.names}-past`;
    present.id = `${this.names}-now`;
    this.tabs.addEventListener("keydown", (event) => this.move(event));
    this.tabs.dataset.lmSuppressShortcuts = "true";
  }

  draw() {
    const attempts = this.store.report?.attempts ?? [];
    if (this.drawn === this.store.report) return;
    this.drawn = this.store.report;
    this.tabs.hidden = !attempts.length;
    const tabs = attempts.map((attempt) => this.tab(`attempt ${attempt.number}`, attempt));
    tabs.push(this.tab(`attempt ${(attempts.at(-1)?.number ?? -1) + 1}, now`, null));
    const left = this.store.report?.attempts_left_out;
    this.tabs.replaceChildren(...(left ? [element("span", "nblaunch-hint", left)] : []), ...tabs);
    this.choose(attempts.find((each) => each.number === this.chosen?.number) ?? null);
    if (attempts.length) this.present.setAttribute("role", "tabpanel");
  }

  tab(name, attempt) {
    const tab = element("button", "nblaunch-tab", name);
    tab.type = "button";
    tab.attempt = attempt;
    tab.setAttribute("role", "tab");
    tab.setAttribute("aria-controls", attempt ? this.past.id : this.present.id);
    tab.addEventListener("click", () => this.choose(attempt));
    return tab;
  }

  choose(attempt) {
    this.chosen = attempt;
    for (const tab of this.tabs.querySelectorAll("[role=tab]")) {
      const isChosen = tab.attempt === attempt;
      tab.setAttribute("aria-selected", String(isChosen));
      tab.tabIndex = isChosen ? 0 : -1;
      const [panel, used] = [attempt ? this.past : this.present, this.store.report?.attempts?.length];
      if (isChosen && used) panel.setAttribute("aria-label", tab.textContent);
    }
    this.past.hidden = !attempt;
    this.present.hidden = Boolean(attempt);
    if (!attempt) return;
    this.past.setAttribute("role", "tabpanel");
    this.past.replaceChildren(
      element("div", "nblaunch-code", attempt.title),
      element("pre", "nblaunch-pre", attempt.lines.join("\n")),
    );
  }

  move(event) {
    const tabs = [...this.tabs.querySelectorAll("[role=tab]")];
    const next = nextIndex(event.key, tabs.indexOf(event.target), tabs.length, 1);
    if (next === null) return;
    event.preventDefault();
    tabs[next].focus();
    tabs[next].click();
  }
}

// Where an arrow key leads from `index`; null for other keys.
function nextIndex(key, index, length, columns) {
  const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns };
  if (key === "Home") return 0;
  if (key === "End") return length - 1;
  if (!(key in steps)) return null;
  const next = index + steps[key];
  return next >= 0 && next < length ? next : index;
}

class Card {
  constructor(rank, choose) {
    this.element = labelled("article", "nblaunch-card", `Rank ${rank}`);
    this.title = element("button", "nblaunch-title", `Rank ${rank}`);
    this.title.type = "button";
    this.title.title = "Show only the output of this rank; once more, of all";
    this.title.addEventListener("click", () => choose(rank));
    this.state = element("span");
    this.where = element("div", "nblaunch-where");
    this.usage = element("div", "nblaunch-usage");
    this.mark = element("div", "nblaunch-mark");
    this.bar = element("div", "nblaunch-last");
    this.last = element("div", "nblaunch-last");
    this.result = element("div", "nblaunch-result");
    const top = element("div", "nblaunch-top");
    top.append(this.title, this.state);
    this.element.append(top, this.where, this.usage, this.mark, this.bar, this.last, this.result);
  }

  draw(row, tail, store) {
    if (this.row !== row) {
      this.row = row;
      this.state.replaceChildren(stateWord(row.state, row.icon, row.phase));
      const place = (host) => [host, row.device, row.pid && `pid ${row.pid}`].filter(Boolean).join(" · ");
      setText(this.where, place(row.host && shortHost(row.host)) || "\u00a0");
      this.where.title = place(row.host);
      setText(this.mark, row.mark ? `${STRAGGLER} ${row.mark}` : "");
      const value = store.values[row.value];
      const result = row.failure ?? (value ? firstLineOf(value) : "");
      setText(this.result, result);
      this.result.classList.toggle("nblaunch-wrong", Boolean(row.failure));
      this.result.title = row.failure ?? value?.text ?? "";
      // A line's height is kept for it, so that cards do not grow and shrink.
      const usage = usageOf(row);
      setText(this.usage, usage || (row.phase ? "\u00a0" : ""));
      this.usage.title = usage;
    }
    const last = tail?.last ?? "";
    setText(this.last, last || "\u00a0");
    setText(this.bar, tail && tail.bar !== last ? tail.bar : "");
    this.last.title = last;
  }

  press(isShown) {
    setAttribute(this.title, "aria-pressed", String(isShown));
    this.element.classList.toggle("nblaunch-shown", isShown);
  }
}

function firstLineOf(value) {
  const [first, ...more] = value.text.trim().split("\n");
  return value.html ? "→ a value, see below" : `→ ${first}${more.length ? " …" : ""}`;
}

function usageOf(row) {
  const parts = [];
  if (row.cpu !== undefined) parts.push(`CPU ${row.cpu} %`);
  const memory = row.memory === undefined ? "" : formatBytes(row.memory);
  if (memory) parts.push(memory);
  if (row.gpu !== undefined || row.gpu_memory !== undefined) {
    const gpu = [row.gpu === undefined ? "" : `${row.gpu} %`];
    gpu.push(row.gpu_memory === undefined ? "" : formatBytes(row.gpu_memory));
    parts.push(`GPU ${gpu.filter(Boolean).join(", ")}`);
  }
  // Behind the rest: on a narrow card it is what is cut off, and the title has it.
  const peak = row.memory_peak === undefined ? "" : formatBytes(row.memory_peak);
  if (peak && peak !== memory) parts.push(`peak ${peak}`);
  if (row.gpu_peak !== undefined) parts.push(`GPU peak ${formatBytes(row.gpu_peak)}`);
  return parts.join(" · ");
}

function nameOf(row) {
  const where = row.host ? ` on ${row.host}` : "";
  return `Rank ${row.rank}${where}, ${row.state}${row.mark ? `, ${STRAGGLER} ${row.mark}` : ""}`;
}

// The end of a long name is what tells hosts apart; a domain does not.
function shortHost(host) {
  const name = host.split(".")[0];
  return name.length > LONGEST_HOST ? `…${name.slice(1 - LONGEST_HOST)}` : name;
}

// What all of these begin with; a number stays whole.
function commonStart([first = "", ...others]) {
  let { length } = first;
  for (const name of others) {
    while (name.slice(0, length) !== first.slice(0, length)) length -= 1;
  }
  return first.slice(0, length).replace(/\d+$/, "");
}

// A cell for each rank, in a row for each host. Only cells of ranks that have changed are drawn, and those out of
// sight cost nothing. The pointer and the keys are heard in one place.
class HostMap {
  constructor(choose) {
    this.choose = choose;
    this.element = element("div", "nblaunch-mapped");
    this.grid = labelled("div", "nblaunch-map", "Ranks by host", "grid");
    this.caption = element("div", "nblaunch-hint");
    this.about = element("div", "nblaunch-about");
    this.element.append(this.caption, this.grid, this.about);
    this.hosts = new Map();
    this.cells = new Map();
    this.focused = null;
    this.pressed = null;
    this.grid.addEventListener("click", (event) => {
      const cell = this.cellOf(event);
      if (cell) this.choose(cell.rank);
    });
    this.grid.addEventListener("keydown", (event) => this.key(event));
    for (const name of ["pointerover", "focusin"]) {
      this.grid.addEventListener(name, (event) => this.point(this.cellOf(event)));
    }
    this.grid.addEventListener("pointerleave", () => this.point(null));
    this.grid.addEventListener("focusout", () => this.point(null));
    // The cells say it themselves.
    this.about.setAttribute("aria-hidden", "true");
  }

  cellOf({ target }) {
    const rank = target?.dataset?.rank;
    return rank === undefined ? undefined : this.cells.get(Number(rank));
  }

  point(cell) {
    this.pointed = cell;
    this.tell();
  }

  // What the reader points at, in words.
  tell() {
    const row = this.pointed?.row;
    setText(this.about, row ? `${nameOf(row)}${row.failure ? `: ${row.failure}` : ""}` : POINT_AT);
    this.about.classList.toggle("nblaunch-hint", !row);
  }

  draw(rows, focused, shown) {
    const isNumbered = rows.size <= MOST_TILES;
    for (const [rank, cell] of this.cells) {
      if (!rows.has(rank)) this.remove(cell);
      else if (isNumbered !== this.isNumbered) cell.row = cell.name = null;
    }
    this.isNumbered = isNumbered;
    this.grid.classList.toggle("nblaunch-numbered", isNumbered);
    for (const [rank, row] of rows) {
      const cell = this.cells.get(rank) ?? this.make(rank);
      if (cell.row === row) continue;
      if (cell.host?.name !== (row.host ?? "")) this.move(cell, row.host ?? "");
      this.fill(cell, row);
    }
    this.grid.classList.toggle("nblaunch-one", this.hosts.size === 1);
    this.drawNames(rows.size > DENSE_CELLS);
    this.focus(this.cells.get(focused), false);
    if (this.pressed !== this.cells.get(shown)) {
      if (this.pressed) setAttribute(this.pressed.element, "aria-selected", "false");
      this.pressed = this.cells.get(shown);
      if (this.pressed) setAttribute(this.pressed.element, "aria-selected", "true");
    }
    this.tell();
  }

  make(rank) {
    const cell = { rank, element: element("div") };
    cell.element.dataset.rank = rank;
    cell.element.dataset.lmSuppressShortcuts = "true";
    cell.element.tabIndex = -1;
    cell.element.setAttribute("role", "gridcell");
    this.cells.set(rank, cell);
    return cell;
  }

  remove(cell) {
    this.leave(cell);
    cell.element.remove();
    this.cells.delete(cell.rank);
    if (this.focused === cell) this.focused = null;
    if (this.pointed === cell) this.pointed = null;
    if (this.pressed === cell) this.pressed = null;
  }

  leave(cell) {
    const host = cell.host;
    if (!host) return;
    host.cells.splice(host.cells.indexOf(cell), 1);
    if (host.cells.length) return;
    host.element.remove();
    this.hosts.delete(host.name);
  }

  move(cell, name) {
    this.leave(cell);
    cell.host = this.hosts.get(name) ?? this.makeHost(name, cell.rank);
    const { cells, row } = cell.host;
    let place = cells.length;
    while (place && cells[place - 1].rank > cell.rank) place -= 1;
    row.insertBefore(cell.element, cells[place]?.element ?? null);
    cells.splice(place, 0, cell);
    this.isNew = true;
  }

  // In a dense map only the ends of names that begin alike; what they begin with is said once.
  drawNames(isDense) {
    this.grid.classList.toggle("nblaunch-dense", isDense);
    if (!this.isNew && this.isDense === isDense) return;
    this.isNew = false;
    this.isDense = isDense;
    const hosts = [...this.hosts.values()];
    const names = hosts.filter(({ name }) => name).map(({ name }) => shortHost(name));
    const skipped = isDense && names.length > 1 ? commonStart(names) : "";
    setText(this.caption, skipped ? `hosts ${skipped}…` : "");
    let longest = 0;
    for (const { name, label } of hosts) {
      setText(label, name ? shortHost(name).slice(skipped.length) : "no host yet");
      longest = Math.max(longest, label.textContent.length);
    }
    const widest = Math.max(...hosts.map((host) => host.cells.length));
    this.grid.style.setProperty("--nblaunch-columns", Math.min(widest, 16));
    this.grid.style.setProperty("--nblaunch-name", `${longest}ch`);
  }

  // Hosts stand in the order of their lowest ranks.
  makeHost(name, rank) {
    const host = { name, cells: [], element: element("div", "nblaunch-host"), row: element("div", "nblaunch-cells") };
    host.element.setAttribute("role", "row");
    host.label = element("div", "nblaunch-hostname");
    host.label.setAttribute("role", "rowheader");
    host.label.title = name;
    host.row.setAttribute("role", "presentation");
    host.element.append(host.label, host.row);
    const after = [...this.hosts.values()].filter((each) => each.cells[0].rank > rank);
    const next = after.reduce((one, other) => (one?.cells[0].rank < other.cells[0].rank ? one : other), undefined);
    this.grid.insertBefore(host.element, next?.element ?? null);
    this.hosts.set(name, host);
    return host;
  }

  fill(cell, row) {
    cell.row = row;
    const name = nameOf(row);
    if (cell.name === name) return;
    cell.name = name;
    cell.element.className = `nblaunch-cell nblaunch-${row.state}${row.mark ? " nblaunch-late" : ""}`;
    cell.element.setAttribute("aria-label", name);
    setText(cell.element, `${row.mark ? STRAGGLER : row.icon}${this.isNumbered ? ` ${row.rank}` : ""}`);
  }

  // The cell that Tab leads to.
  focus(cell, isMoved) {
    if (this.focused !== cell) {
      if (this.focused) this.focused.element.tabIndex = -1;
      this.focused?.element.classList.remove("nblaunch-focused");
      this.focused = cell;
      cell?.element.classList.add("nblaunch-focused");
      if (cell) cell.element.tabIndex = 0;
      if (!isMoved) this.reveal(cell);
    }
    if (isMoved) cell?.element.focus();
  }

  // Scrolls the map alone: the page is its reader's.
  reveal(cell) {
    if (!cell || this.grid.contains(document.activeElement)) return;
    const top = cell.element.getBoundingClientRect().top - this.grid.getBoundingClientRect().top;
    if (top < 0 || top > this.grid.clientHeight - 20) this.grid.scrollTop += top - this.grid.clientHeight / 2;
  }

  key(event) {
    const cell = this.cellOf(event);
    if (!cell) return;
    if (event.key === "Enter" || event.key === " ") this.choose(cell.rank);
    else if (!this.step(event.key, cell)) return;
    event.preventDefault();
    event.stopPropagation();
  }

  step(key, cell) {
    const hosts = [...this.hosts.values()].sort((one, other) => one.cells[0].rank - other.cells[0].rank);
    const ordered = hosts.flatMap((host) => host.cells);
    const isOne = hosts.length === 1;
    if (isOne || !["ArrowUp", "ArrowDown"].includes(key)) {
      const next = nextIndex(key, ordered.indexOf(cell), ordered.length, isOne ? inOneLine(ordered) : 1);
      if (next !== null) this.focus(ordered[next], true);
      return next !== null;
    }
    const place = hosts.indexOf(cell.host);
    const host = hosts[nextIndex(key, place, hosts.length, inOneLine(hosts))];
    this.focus(host.cells[Math.min(cell.host.cells.indexOf(cell), host.cells.length - 1)], true);
    return true;
  }
}

// How many of these stand side by side.
function inOneLine(things) {
  const { offsetTop } = things[0].element;
  const next = things.findIndex((each) => each.element.offsetTop !== offsetTop);
  return next < 0 ? things.length : next;
}

// What a figure of these ranks is at least and at most; nothing where no rank has it.
function rangeOf(rows, name, format, unit = "") {
  let [least, most] = [Infinity, -Infinity];
  for (const row of rows) {
    if (row[name] === undefined) continue;
    least = Math.min(least, row[name]);
    most = Math.max(most, row[name]);
  }
  return least > most ? "" : formatRange(least, most, format, unit);
}

function usageOfAll(rows) {
  const parts = [["CPU", rangeOf(rows, "cpu", String, " %")], ["", rangeOf(rows, "memory", formatBytes)]];
  const gpu = [rangeOf(rows, "gpu", String, " %"), rangeOf(rows, "gpu_memory", formatBytes)];
  parts.push(["GPU", gpu.filter(Boolean).join(", ")], ["peak", rangeOf(rows, "memory_peak", formatBytes)]);
  parts.push(["GPU peak", rangeOf(rows, "gpu_peak", formatBytes)]);
  return parts.filter(([, text]) => text).map((part) => part.join(" ").trim()).join(" · ");
}

// A button that unfolds what it controls.
function unfolds(className, change) {
  const button = element("button", className);
  button.type = "button";
  button.setAttribute("aria-expanded", "false");
  button.addEventListener("click", () => {
    const isOpen = button.getAttribute("aria-expanded") !== "true";
    setAttribute(button, "aria-expanded", String(isOpen));
    change(isOpen);
  });
  return button;
}

// Ranks that are alike now: the same state, failure and remark. What differs within such a group is a range.
function groupsOf(rows) {
  const groups = new Map();
  for (const row of rows.values()) {
    // How far a rank is behind changes all the time, and is no reason to leave a group.
    const key = JSON.stringify([row.state, row.failure ?? "", (row.mark ?? "").replace(/\d+/g, "0")]);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(row);
  }
  const isCaused = ([row]) => Number(Boolean(row.failure?.startsWith("consequence")));
  const place = ([row]) => STATES.indexOf(row.state);
  const order = ([, one], [, other]) =>
    place(one) - place(other) || isCaused(one) - isCaused(other) || one[0].rank - other[0].rank;
  return new Map([...groups].sort(order));
}

// A row for all ranks that are alike; what differs comes first. A row unfolds to a line for each of its ranks.
class Alike {
  constructor(store) {
    this.store = store;
    this.element = element("div", "nblaunch-alike");
    this.table = element("table", "nblaunch-table");
    this.table.setAttribute("aria-label", "Ranks that are alike");
    const head = element("tr");
    for (const name of ["rank", "state", "now"]) {
      const cell = element("th", "", name);
      cell.scope = "col";
      head.append(cell);
    }
    this.table.createTHead().append(head);
    this.more = unfolds("nblaunch-button", (isOpen) => {
      this.isWhole = isOpen;
      this.known = null;
      this.draw();
    });
    this.element.append(this.table, this.more);
    this.groups = new Map();
    this.isWhole = false;
  }

  draw() {
    if (this.known === this.store.news) return;
    this.known = this.store.news;
    const all = groupsOf(this.store.rows);
    const shown = new Map(this.isWhole ? all : [...all].slice(0, MOST_ROWS));
    for (const [key, group] of this.groups) {
      if (shown.has(key)) continue;
      group.body.remove();
      this.groups.delete(key);
    }
    let before = this.table.tHead;
    for (const [key, rows] of shown) {
      if (!this.groups.has(key)) this.groups.set(key, this.make());
      const group = this.groups.get(key);
      // Moving an element would take the focus from its button.
      if (before.nextSibling !== group.body) before.after(group.body);
      before = group.body;
      this.fill(group, rows);
    }
    this.more.hidden = all.size <= MOST_ROWS;
    setText(this.more, this.isWhole ? "Fewer rows" : `${all.size - MOST_ROWS} more rows`);
  }

  make() {
    const group = { body: element("tbody"), state: element("td"), now: element("td"), rows: [], lines: new Map() };
    group.button = unfolds("nblaunch-unfold", (isOpen) => {
      group.isOpen = isOpen;
      group.below.hidden = !isOpen;
      this.list(group);
    });
    const row = element("tr");
    const name = element("th");
    name.scope = "row";
    name.append(group.button);
    row.append(name, group.state, group.now);
    group.row = row;
    group.below = element("tr");
    group.below.hidden = true;
    group.list = element("ul", "nblaunch-each");
    group.list.tabIndex = 0;
    group.list.dataset.lmSuppressShortcuts = "true";
    const cell = element("td");
    cell.colSpan = 3;
    cell.append(group.list);
    group.below.append(cell);
    group.body.append(row, group.below);
    return group;
  }

  fill(group, rows) {
    const [{ state, icon, failure, mark }] = rows;
    const ranks = rows.map((row) => row.rank);
    const numbers = shortRanks(ranks);
    setText(group.button, numbers);
    // The button's own name is what it shows.
    const spoken = `${spokenRanks(ranks)}: ${state.toLowerCase()}`;
    setAttribute(group.row, "aria-label", spoken);
    setAttribute(group.button, "title", spoken);
    setAttribute(group.list, "aria-label", `Each of ${spokenRanks(ranks)}`);
    if (group.shown !== state) {
      group.shown = state;
      group.state.replaceChildren(stateWord(state, icon));
    }
    const values = new Set(rows.map((row) => row.value).filter((value) => value !== undefined));
    const only = values.size === 1 ? firstLineOf(this.store.values[[...values][0]]) : "";
    const value = values.size > 1 ? `→ ${values.size} values, see below` : only;
    const marks = mark ? `${STRAGGLER} ${mark}` : "";
    setText(group.now, [failure, marks, usageOfAll(rows), value].filter(Boolean).join(" · "));
    group.now.title = group.now.textContent;
    group.rows = rows;
    this.list(group);
  }

  list(group) {
    if (!group.isOpen) {
      group.list.replaceChildren();
      group.lines.clear();
      return;
    }
    const known = new Set(group.rows.map((row) => row.rank));
    for (const [rank, line] of group.lines) {
      if (known.has(rank)) continue;
      line.remove();
      group.lines.delete(rank);
    }
    let before = null;
    for (const row of group.rows) {
      if (!group.lines.has(row.rank)) group.lines.set(row.rank, element("li"));
      const line = group.lines.get(row.rank);
      const next = before ? before.nextSibling : group.list.firstChild;
      if (next !== line) group.list.insertBefore(line, next);
      before = line;
      if (line.row === row) continue;
      line.row = row;
      const value = row.value === undefined ? "" : firstLineOf(this.store.values[row.value]);
      const parts = [`rank ${row.rank}`, row.host && shortHost(row.host), row.device, row.mark, usageOf(row), value];
      setText(line, parts.filter(Boolean).join(" · "));
    }
  }
}

function hasHosts(rows) {
  for (const row of rows.values()) {
    if (row.host) return true;
  }
  return false;
}

// Up to eight ranks: a card each. More: a tile each, and the card of one of them. Many, or many on several hosts:
// a map of the hosts in the place of tiles.
class Ranks {
  constructor(store, choice) {
    this.store = store;
    this.choice = choice;
    this.element = labelled("div", "nblaunch-ranks", "Ranks", "group");
    this.grid = labelled("div", "nblaunch-grid", "Choose a rank", "group");
    this.grid.dataset.lmSuppressShortcuts = "true";
    this.map = new HostMap((rank) => this.choice.toggle(rank));
    this.aside = element("div", "nblaunch-cards");
    this.alike = new Alike(store);
    this.element.append(this.alike.element, this.map.element, this.grid, this.aside);
    this.cards = new Map();
    this.tiles = new Map();
    this.grid.addEventListener("keydown", (event) => this.move(event));
  }

  draw() {
    const { rows, news } = this.store;
    const many = rows.size > MOST_CARDS;
    const isMap = rows.size > MOST_TILES || (many && hasHosts(rows));
    const focused = many ? this.inFocus() : null;
    const drawn = `${focused} ${this.choice.shown}`;
    this.element.hidden = Boolean(this.store.header.waits);
    if (this.drawn !== drawn || this.known !== news) {
      this.drawn = drawn;
      this.known = news;
      this.map.element.hidden = !isMap;
      this.grid.hidden = !many || isMap;
      this.alike.element.hidden = !many;
      if (many) this.alike.draw();
      this.element.classList.toggle("nblaunch-many", many && !isMap);
      if (isMap) this.map.draw(rows, focused, this.choice.shown);
      else if (many) this.drawTiles(rows, focused);
    }
    this.drawCards(many ? [focused] : [...rows.keys()]);
  }

  // The rank whose card is shown beside the tiles: the chosen one, else the first that failed, else the first.
  inFocus() {
    const { rows } = this.store;
    if (rows.has(this.choice.card)) return this.choice.card;
    for (const row of rows.values()) {
      if (row.state === "FAILED" && !row.failure?.startsWith("consequence")) return row.rank;
    }
    return rows.keys().next().value;
  }

  drawCards(ranks) {
    for (const [rank, card] of this.cards) {
      if (ranks.includes(rank)) continue;
      card.element.remove();
      this.cards.delete(rank);
    }
    for (const [index, rank] of ranks.entries()) {
      if (!this.cards.has(rank)) {
        const card = new Card(rank, (chosen) => this.choice.toggle(chosen));
        this.cards.set(rank, card);
        this.aside.insertBefore(card.element, this.aside.children[index] ?? null);
      }
      const card = this.cards.get(rank);
      card.draw(this.store.rows.get(rank), this.store.tails.get(rank), this.store);
      card.press(this.choice.shown === rank);
    }
  }

  drawTiles(rows, focused) {
    for (const [rank, tile] of this.tiles) {
      if (rows.has(rank)) continue;
      tile.element.remove();
      this.tiles.delete(rank);
    }
    let index = 0;
    for (const [rank, row] of rows) {
      if (!this.tiles.has(rank)) this.tiles.set(rank, this.makeTile(rank, index));
      this.drawTile(this.tiles.get(rank), row, rank === focused);
      index += 1;
    }
  }

  makeTile(rank, index) {
    const tile = element("button");
    tile.type = "button";
    tile.addEventListener("click", () => this.choice.toggle(rank));
    this.grid.insertBefore(tile, this.grid.children[index] ?? null);
    return { element: tile };
  }

  drawTile(tile, row, isFocused) {
    tile.element.tabIndex = isFocused ? 0 : -1;
    setAttribute(tile.element, "aria-pressed", String(this.choice.shown === row.rank));
    tile.element.classList.toggle("nblaunch-focused", isFocused);
    const name = nameOf(row);
    const title = row.failure ? `${name}: ${row.failure}` : name;
    if (tile.title === title) return;
    tile.title = title;
    const names = ["nblaunch-tile", `nblaunch-${row.state}`, isFocused ? "nblaunch-focused" : ""];
    tile.element.className = names.filter(Boolean).join(" ");
    tile.element.setAttribute("aria-label", name);
    tile.element.title = title;
    tile.element.replaceChildren(
      element("span", "nblaunch-icon", row.mark ? STRAGGLER : row.icon),
      element("span", "", String(row.rank)),
    );
  }

  move(event) {
    const tiles = [...this.grid.children];
    const index = tiles.indexOf(event.target);
    if (index < 0) return;
    const columns = tiles.filter((tile) => tile.offsetTop === tiles[0].offsetTop).length;
    const next = nextIndex(event.key, index, tiles.length, columns);
    if (next === null) return;
    event.preventDefault();
    event.stopPropagation();
    for (const tile of tiles) tile.tabIndex = -1;
    tiles[next].tabIndex = 0;
    tiles[next].focus();
  }
}

class Output {
  constructor(store, choice) {
    this.store = store;
    this.choice = choice;
    this.follows = true;
    this.drawn = new Map();
    this.element = element("div", "nblaunch-output");
    this.log = labelled("div", "nblaunch-log", "Output", "log");
    // Hundreds of lines a second are not for a screen reader to announce; they can be read in the log.
    this.log.setAttribute("aria-live", "off");
    this.log.tabIndex = 0;
    this.log.dataset.lmSuppressShortcuts = "true";
    this.select = labelled("select", "nblaunch-select", "Show output of");
    this.filter = labelled("input", "nblaunch-filter", "Filter output");
    this.filter.type = "search";
    this.filter.placeholder = "filter";
    this.filter.spellcheck = false;
    this.copy = this.button("Copy", "Copy output", () => this.copyText());
    this.follow = this.button("Follow", "Follow output", () => this.setFollow(!this.follows));
    this.follow.setAttribute("aria-pressed", "true");
    this.note = element("span", "nblaunch-hint");
    this.note.setAttribute("role", "status");
    const tools = element("div", "nblaunch-tools");
    tools.append(element("span", "nblaunch-label", "Output of"), this.select, this.filter);
    tools.append(this.follow, this.copy, this.note);
    this.element.append(tools, this.log);
    this.select.addEventListener("change", () => choice.show(this.select.value));
    for (const name of ["pointerdown", "focus"]) this.select.addEventListener(name, () => this.listRanks());
    this.filter.addEventListener("input", () => this.draw());
    this.log.addEventListener("scroll", () => this.scrolled());
    // A figure has no height until it is loaded, nor has what is out of sight before it comes near.
    this.lines = element("div");
    this.log.append(this.lines);
    new ResizeObserver(() => this.toEnd()).observe(this.lines);
  }

  button(text, name, action) {
    const button = element("button", "nblaunch-button", text);
    button.type = "button";
    button.setAttribute("aria-label", name);
    button.addEventListener("click", action);
    return button;
  }

  setFollow(follows) {
    this.follows = follows;
    setAttribute(this.follow, "aria-pressed", String(follows));
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

  entries() {
    const wanted = this.filter.value.toLowerCase();
    const entries = this.store.entries(this.choice.shown);
    if (!wanted) return entries;
    return entries.filter(
      (each) => !each.isGap && `${prefixOf(each)} ${textOf(each.piece)}`.toLowerCase().includes(wanted),
    );
  }

  draw() {
    this.element.hidden = Boolean(this.store.header.waits);
    this.drawOptions();
    const entries = this.entries();
    const keep = new Set(entries);
    for (const [entry, line] of this.drawn) {
      if (keep.has(entry)) continue;
      line.element.remove();
      this.drawn.delete(entry);
    }
    let place = this.lines.firstChild;
    for (const entry of entries) {
      const line = this.drawn.get(entry) ?? this.makeLine(entry);
      if (line.version !== entry.version) this.drawLine(line, entry);
      if (line.element === place) place = place.nextSibling;
      else this.lines.insertBefore(line.element, place);
    }
    this.log.classList.toggle("nblaunch-empty", !entries.length);
    this.toEnd();
  }

  // Of many ranks only those that are needed, until the reader opens the list.
  drawOptions() {
    const { rows, members } = this.store;
    const { shown } = this.choice;
    if (rows.size <= MOST_TILES) this.listRanks();
    else if (this.listed !== members) this.list(["all", ...(shown === "all" ? [] : [shown])]);
    if (this.select.value !== String(shown)) this.select.value = String(shown);
  }

  listRanks() {
    const { rows, members } = this.store;
    if (this.listed === members) return;
    this.list(["all", ...rows.keys()]);
    this.listed = members;
  }

  list(ranks) {
    const names = ranks.join();
    if (this.names === names) return;
    this.names = names;
    this.listed = null;
    this.select.replaceChildren(...ranks.map((rank) => this.option(rank)));
    this.select.value = String(this.choice.shown);
  }

  option(rank) {
    const host = this.store.rows.get(rank)?.host;
    const option = element("option", "", rank === "all" ? "all ranks" : `rank ${rank}${host ? ` on ${shortHost(host)}` : ""}`);
    option.value = rank;
    return option;
  }

  makeLine(entry) {
    const line = { element: element("div", "nblaunch-entry"), prefix: element("span", "nblaunch-prefix") };
    line.text = element("span", "nblaunch-text");
    line.element.append(line.prefix, line.text);
    this.drawn.set(entry, line);
    return line;
  }

  drawLine(line, entry) {
    line.version = entry.version;
    const prefix = prefixOf(entry);
    setText(line.prefix, `${prefix} `);
    line.prefix.hidden = !prefix;
    line.prefix.title = entry.ranks ?? "";
    line.element.classList.toggle("nblaunch-gap", Boolean(entry.isGap));
    if (line.piece === entry.piece) return;
    line.piece = entry.piece;
    fillLine(line.text, entry.piece);
  }

  async copyText() {
    const lines = this.entries().map(lineOf);
    const done = await copied(`${lines.join("\n")}\n`, this.element);
    setText(this.note, done ? `copied ${plural(lines.length, "line")}` : "this page may not copy");
    setTimeout(() => setText(this.note, ""), 2000);
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

// A row per value, with all ranks that returned it. Many short ones stand side by side; of many others the first
// ones are shown until the reader asks for the rest.
class Values {
  constructor(store) {
    this.store = store;
    this.element = element("div", "nblaunch-values");
    this.body = element("tbody");
    this.table = element("table", "nblaunch-table");
    const head = element("tr");
    for (const name of ["rank", "value"]) {
      const cell = element("th", "", name);
      cell.scope = "col";
      head.append(cell);
    }
    this.table.createTHead().append(head);
    this.table.append(this.body);
    this.beside = element("ul", "nblaunch-beside");
    this.more = unfolds("nblaunch-button", (isOpen) => {
      this.isWhole = isOpen;
      this.known = this.shown = null;
      this.draw();
    });
    const content = element("div");
    content.append(this.table, this.beside, this.more);
    this.part = folding("Values", content, true);
    this.lines = new Map();
    this.isWhole = false;
  }

  draw() {
    if (this.known === this.store.news) return;
    this.known = this.store.news;
    const groups = new Map();
    for (const row of this.store.rows.values()) {
      if (row.value === undefined) continue;
      if (!groups.has(row.value)) groups.set(row.value, []);
      groups.get(row.value).push(row.rank);
    }
    const shown = JSON.stringify([...groups]);
    if (this.shown === shown) return;
    this.shown = shown;
    if (groups.size) this.element.append(this.part);
    else this.part.remove();
    const isShort = groups.size > MOST_VALUES && [...groups.keys()].every((number) => isShortValue(this.store.values[number]));
    if (this.isShort !== isShort) {
      this.isShort = isShort;
      for (const line of this.lines.values()) line.remove();
      this.lines.clear();
    }
    this.table.hidden = isShort;
    this.beside.hidden = !isShort;
    const sorted = [...groups].sort(([, [one]], [, [other]]) => one - other);
    const most = isShort ? SHORT_VALUES : MOST_VALUES;
    this.drawLines(new Map(this.isWhole ? sorted : sorted.slice(0, most)));
    this.more.hidden = groups.size <= most;
    setText(this.more, this.isWhole ? "Fewer values" : `${groups.size - most} more values`);
  }

  drawLines(groups) {
    for (const [number, line] of this.lines) {
      if (groups.has(number)) continue;
      line.remove();
      this.lines.delete(number);
    }
    const place = this.isShort ? this.beside : this.body;
    let longest = 0;
    let before = null;
    for (const [number, ranks] of groups) {
      if (!this.lines.has(number)) this.lines.set(number, this.makeLine(this.store.values[number]));
      const line = this.lines.get(number);
      setText(line.firstChild, this.isShort ? shortRanks(ranks) : formatRanks(ranks));
      longest = Math.max(longest, this.isShort ? line.textContent.length : 0);
      // Moving a frame reloads it.
      const next = before ? before.nextSibling : place.firstChild;
      if (next !== line) place.insertBefore(line, next);
      before = line;
    }
    this.beside.style.setProperty("--nblaunch-entry", `${longest + 2}ch`);
  }

  makeLine(value) {
    if (this.isShort) {
      const item = element("li");
      item.append(element("strong"), ": ", element("code", "", value.text));
      return item;
    }
    const line = element("tr");
    const cell = element("td");
    cell.append(value.html ? sandboxed(value.html) : element("pre", "nblaunch-pre", value.text));
    line.append(element("td"), cell);
    return line;
  }
}

function isShortValue(value) {
  return !value.html && value.text.length <= SHORT_VALUE && !value.text.includes("\n");
}

// What ranks have logged: a small chart for each name, over the same steps.
const CHART = { width: 300, height: 150, left: 46, right: 8, top: 6, bottom: 18 };
const SERIES = 8;
const LOG_LABELS = 4;

let namespaceOfSvg;

function drawing(tag, attributes, text) {
  // As the parser has it: no address is written here, and none is asked for.
  namespaceOfSvg ??= new DOMParser().parseFromString("<svg></svg>", "text/html").body.firstElementChild.namespaceURI;
  const made = document.createElementNS(namespaceOfSvg, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function shortNumber(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 1e-4 && size < 1e6 ? String(Number(value.toPrecision(4))) : value.toExponential(1).replace(/\.0e/, "e");
}

function roundTicks(low, high, most) {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(most - 1, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((each) => power * each >= rough * (1 - 1e-9));
  const ticks = [];
  for (let at = Math.ceil(low / step - 1e-9); at <= high / step + 1e-9; at += 1) ticks.push(Number((at * step).toPrecision(12)));
  return ticks;
}

function powersOfTen(low, high) {
  const [first, last] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)];
  const apart = Math.max(1, Math.ceil((last - first + 1) / LOG_LABELS));
  const ticks = [];
  for (let power = first; power <= last; power += apart) ticks.push(10 ** power);
  return ticks.length > 1 ? ticks : [low, high];
}

// From values to pixels. What a logarithm has no place for is left out, as what is not finite is.
function scaleOf(values, isLog) {
  const known = values.filter((value) => value !== null && (!isLog || value > 0));
  let low = known.reduce((one, other) => Math.min(one, other), Infinity);
  let high = known.reduce((one, other) => Math.max(one, other), -Infinity);
  if (!known.length) [low, high] = isLog ? [0.1, 1] : [0, 1];
  if (!(high - low > 1e-12 * Math.max(Math.abs(low), Math.abs(high)))) {
    const more = Math.abs(low) * 0.05 || 0.5;
    [low, high] = isLog ? [low / 1.1, high * 1.1] : [low - more, high + more];
  }
  const at = isLog ? Math.log10 : (value) => value;
  const [from, to] = [at(low), at(high)];
  const room = CHART.height - CHART.bottom - CHART.top;
  const place = (value) =>
    value === null || (isLog && value <= 0) ? null : CHART.height - CHART.bottom - ((at(value) - from) / (to - from)) * room;
  return { place, ticks: isLog ? powersOfTen(low, high) : roundTicks(low, high, 4) };
}

function pathOf(points) {
  let path = "";
  let pen = "M";
  for (const [x, y] of points) {
    if (y === null) {
      pen = "M";
    } else {
      path += `${pen}${x.toFixed(1)} ${y.toFixed(1)}`;
      pen = "L";
    }
  }
  return path;
}

class Chart {
  constructor(name) {
    this.name = name;
    this.element = element("figure", "nblaunch-chart");
    const caption = element("figcaption", "nblaunch-caption");
    this.end = element("span", "nblaunch-end");
    caption.append(element("strong", "nblaunch-name", name), this.end);
    const { width, height } = CHART;
    this.svg = drawing("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img" });
    this.words = element("div", "nblaunch-words");
    this.element.append(caption, this.svg, this.words);
  }

  draw(curve, steps, { isLog, byRank }) {
    const shown = `${steps} ${isLog} ${byRank}`;
    if (this.news === curve.news && this.shown === shown) return;
    Object.assign(this, { news: curve.news, shown });
    const cells = [...curve.cells].sort(([one], [other]) => one - other);
    const sorted = (line) => [...line].sort(([one], [other]) => one - other);
    const isDrawn = (rank) => byRank || curve.apart.includes(rank);
    const lines = [...curve.lines].filter(([rank]) => isDrawn(rank)).map(([rank, line]) => [rank, sorted(line)]);
    const values = [...cells.flatMap(([, band]) => band), ...lines.flatMap(([, line]) => line.map(([, value]) => value))];
    const scale = scaleOf(values, isLog);
    const { width, left, right } = CHART;
    const across = (width - left - right) / Math.max(steps[1] - steps[0], 1);
    const x = (step) => left + (step - steps[0]) * across;
    const parts = [...this.axes(scale, steps, x)];
    if (!byRank) parts.push(...this.band(cells, scale, x));
    for (const [rank, line] of lines) {
      const isApart = curve.apart.includes(rank);
      const series = isApart ? 1 + (curve.apart.indexOf(rank) % (SERIES - 1)) : rank % SERIES;
      const path = drawing("path", {
        d: pathOf(line.map(([step, value]) => [x(step), scale.place(value)])),
        class: `nblaunch-curve nblaunch-series${series}${byRank && !isApart ? " nblaunch-thin" : ""}`,
      });
      path.append(drawing("title", {}, `rank ${rank}`));
      parts.push(path);
      if (isApart) parts.push(this.label(rank, line, scale, x, series));
    }
    this.svg.replaceChildren(...parts);
    const last = cells.findLast(([, band]) => band[1] !== null);
    setText(this.end, last ? shortNumber(last[1][1]) : "");
    setText(this.words, curve.words);
    setAttribute(this.svg, "aria-label", `${this.name}: ${curve.words}`);
  }

  *axes({ place, ticks }, [first, last], x) {
    const { width, height, left, right, bottom } = CHART;
    for (const tick of ticks) {
      const y = place(tick);
      yield drawing("line", { x1: left, x2: width - right, y1: y, y2: y, class: "nblaunch-grid-line" });
      yield drawing("text", { x: left - 4, y: y + 3.5, "text-anchor": "end" }, shortNumber(tick));
    }
    for (const tick of roundTicks(first, last, 5)) {
      const anchor = x(tick) > width - 30 ? "end" : "middle";
      yield drawing("text", { x: Math.min(x(tick), width - right), y: height - bottom + 13, "text-anchor": anchor }, shortNumber(tick));
    }
  }

  *band(cells, { place }, x) {
    const known = cells.filter(([, [least, , greatest]]) => place(least) !== null && place(greatest) !== null);
    const edge = (which) => known.map(([step, band]) => [x(step), place(band[which])]);
    if (known.length) yield drawing("path", { d: `${pathOf([...edge(2), ...edge(0).reverse()])}Z`, class: "nblaunch-band" });
    if (known.length === 1) yield drawing("circle", { cx: x(known[0][0]), cy: place(known[0][1][1]), r: 2.5, class: "nblaunch-dot" });
    yield drawing("path", { d: pathOf(cells.map(([step, band]) => [x(step), place(band[1])])), class: "nblaunch-curve nblaunch-series0" });
  }

  label(rank, line, { place }, x, series) {
    const { width, height, right, top, bottom } = CHART;
    const [step, value] = line.findLast(([, each]) => place(each) !== null) ?? [0, null];
    if (value === null) return drawing("g", {});
    const y = Math.min(Math.max(place(value) - 4, top + 8), height - bottom - 4);
    const attributes = { x: Math.min(x(step), width - right), y, "text-anchor": "end", class: `nblaunch-named nblaunch-series${series}` };
    return drawing("text", attributes, `rank ${rank}`);
  }
}

class Curves {
  constructor(store) {
    this.store = store;
    this.element = element("div", "nblaunch-curves");
    this.charts = new Map();
    this.isLog = false;
    this.byRank = false;
    this.log = this.toggle("Log scale", () => (this.isLog = !this.isLog));
    this.each = this.toggle("One line per rank", () => {
      this.byRank = !this.byRank;
      send(store, `lines ${this.byRank ? "on" : "off"}`);
      return this.byRank;
    });
    this.more = element("span", "nblaunch-hint");
    this.body = element("div", "nblaunch-charts");
    const tools = element("div", "nblaunch-tools");
    tools.append(this.log, this.each, this.more);
    const content = element("div");
    content.append(tools, this.body);
    this.part = folding("Curves", content, true);
  }

  toggle(text, change) {
    const button = element("button", "nblaunch-button", text);
    button.type = "button";
    button.setAttribute("aria-pressed", "false");
    button.addEventListener("click", () => {
      setAttribute(button, "aria-pressed", String(change()));
      this.draw();
    });
    return button;
  }

  draw() {
    const { curves } = this.store;
    if (!curves?.names.length) {
      this.part.remove();
      return;
    }
    if (!this.part.isConnected) this.element.append(this.part);
    // Lines of many ranks come when they are asked for, and a busy kernel may not hear that.
    this.each.hidden = curves.ranks < 2 || (curves.ranks > MOST_CARDS && !this.store.heard);
    setText(this.more, curves.more);
    const known = curves.names.map((name) => [name, curves.byName.get(name)]);
    const all = known.flatMap(([, { cells }]) => [...cells.keys()]);
    const steps = all.reduce(([one, other], step) => [Math.min(one, step), Math.max(other, step)], [Infinity, -Infinity]);
    known.forEach(([name, curve], index) => {
      if (!this.charts.has(name)) this.charts.set(name, new Chart(name));
      const chart = this.charts.get(name);
      if (this.body.children[index] !== chart.element) this.body.insertBefore(chart.element, this.body.children[index] ?? null);
      chart.draw(curve, steps, this);
    });
    for (const [name, chart] of this.charts) {
      if (curves.names.includes(name)) continue;
      chart.element.remove();
      this.charts.delete(name);
    }
  }
}

// Which rank the reader has chosen; every view of a panel has its own.
class Choice {
  constructor(changed) {
    this.shown = "all";
    this.card = null;
    this.changed = changed;
  }

  show(value) {
    this.shown = value === "all" ? "all" : Number(value);
    if (this.shown !== "all") this.card = this.shown;
    this.changed();
  }

  toggle(rank) {
    const again = this.shown === rank;
    this.shown = again ? "all" : rank;
    this.card = rank;
    this.changed();
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
  const take = () => store.take(model.get("delta"));
  const begin = () => store.begin(model.get("whole"));
  const end = () => settle(model, () => result(model));
  // The kernel that ran the cell has ended, and the panel with it.
  const left = (_, word) => {
    if (["restarting", "autorestarting", "dead"].includes(word)) settle(model, (data) => withOutput(data, store));
  };
  const status = model.widget_manager?.context?.sessionContext?.statusChanged;
  status?.connect(left);
  model.on("change:delta", take);
  model.on("change:whole", begin);
  model.on("change:final", end);
  begin();
  take();
  return () => {
    model.off("change:delta", take);
    model.off("change:whole", begin);
    model.off("change:final", end);
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

const OUTPUT_STYLE = "margin:4px 0;padding:0;font-size:var(--jp-code-font-size,13px)";

function escaped(text) {
  return text.replace(/[&<]/g, (sign) => `&#${sign.charCodeAt(0)};`);
}

// What the cell shows where there are no widgets, with the output that this page has.
function withOutput(data, store) {
  const text = store.entries("all").map(lineOf).join("\n");
  return {
    "text/html": `${data["text/html"]}<pre style="${OUTPUT_STYLE}">${escaped(text)}</pre>`,
    "text/plain": `${data["text/plain"]}\n${text}`,
  };
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
    el.append(element("pre", "nblaunch-pre", result(model)["text/plain"]));
    // Not before this view is in the page.
    setTimeout(() => settle(model, () => result(model)));
    return undefined;
  }
  const store = shared.stores.get(model.get("name"));
  const panel = labelled("section", "nblaunch-panel", "Distributed run");
  const present = element("div");
  const choice = new Choice(() => draw());
  const head = new Head(store, () => send(store, "stop"));
  const below = [new Ranks(store, choice), new Curves(store), new Output(store, choice), new Values(store)];
  const attempts = new Attempts(store, present);
  const parts = [head, new Failure(store), new Hang(store), attempts, ...below];
  present.append(...below.map((part) => part.element));
  panel.append(...parts.filter((part) => !below.includes(part)).map((part) => part.element));
  el.append(panel);
  const draw = () => {
    for (const part of parts) part.draw();
  };
  // A page in the background draws nothing, and everything when it comes back. On a machine that is busy
  // with the ranks drawing takes a quarter of the time at most: the page has to answer its reader.
  let due = 0;
  let timer = 0;
  let rested = 0;
  const drawSoon = () => {
    if (due || timer) return;
    const wait = rested - performance.now();
    if (wait > 0) timer = setTimeout(() => ((timer = 0), drawSoon()), wait);
    else due = requestAnimationFrame(drawNow);
  };
  const drawNow = () => {
    const begun = performance.now();
    due = 0;
    draw();
    rested = performance.now() + 3 * (performance.now() - begun);
  };
  const clock = setInterval(() => head.tick(), 500);
  store.listeners.add(drawSoon);
  draw();
  return () => {
    clearInterval(clock);
    clearTimeout(timer);
    cancelAnimationFrame(due);
    store.listeners.delete(drawSoon);
  };
}

export default { initialize, render };
