"use strict";
(() => {
  const UNFOLDED = 8, MOST_ROWS = 16;
  const one = (selector, inside = document) => inside.querySelector(selector);
  const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
  const breakable = (text) => text.split(/(?<=[/.:_])/).flatMap((part) => [part, document.createElement("wbr")]);
  const facts = JSON.parse(one("#facts").textContent);

  // -- which device holds what --
  const bytes = (count) => {
    if (count < 1023.5) return `${count} B`;
    const units = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    let unit = -1;
    do { count /= 1024; unit += 1; } while (count >= 1023.5 && unit < units.length - 1);
    return `${count < 9.995 ? count.toFixed(2) : count < 99.95 ? count.toFixed(1) : count.toFixed(0)} ${units[unit]}`;
  };
  const place = (rectangle, x, y, width, height) => {
    for (const [key, value] of Object.entries({ x, y, width, height })) rectangle.setAttribute(key, value.toFixed(2));
  };
  const mesh = one("#mesh");
  const cells = [];
  const strips = all(".strip").map((strip) => ({
    strip, at: JSON.parse(strip.dataset.at),
    devices: all(".device", strip).map((cell) => {
      const number = Number(cell.dataset.device), room = cell.dataset.room.split(" ").map(Number);
      cells[number] = { cell, outline: one(".outline", cell), tile: one(".tile", cell), room };
      return number;
    }),
  }));
  let shown = strips;
  let chosen = null;
  let device = 0;
  const tileOf = (array, number) => facts.layouts[array.layout][number];

  function draw(array) {
    cells.forEach(({ outline, tile, room: [x, y, width, height] }, number) => {
      const aspect = width < 30 ? height / width : array.aspect, least = width < 30 ? 6 : 2.5;
      const w = Math.min(width, height / aspect), h = w * aspect;
      const left = x + (width - w) / 2, top = y + (height - h) / 2;
      place(outline, left, top, w, h);
      const held = tileOf(array, number);
      if (held < 0) { place(tile, left, top, 0, 0); return; }
      const row = Math.floor(held / array.columns), column = held % array.columns;
      const wide = Math.max(least, w / array.columns), high = Math.max(least, h / array.rows);
      place(tile, left + Math.min(w * column / array.columns, w - wide), top + Math.min(h * row / array.rows, h - high), wide, high);
      tile.setAttribute("fill", array.split ? `url(#fill${array.fill})` : "var(--soft)");
    });
  }

  // of a large mesh, rows that hold alike are one, and not more than fit are shown
  function fold(array) {
    const alike = new Map();
    for (const each of strips) {
      const key = strips.length > UNFOLDED ? each.devices.map((number) => tileOf(array, number)).join() : each.devices.join();
      if (!alike.has(key)) alike.set(key, []);
      alike.get(key).push(each);
    }
    const groups = [...alike.values()].slice(0, MOST_ROWS);
    shown = groups.map(([first]) => first);
    strips.forEach((each) => { each.strip.hidden = !shown.includes(each); });
    for (const group of groups) {
      all(".where span", group[0].strip).forEach((word, axis) => {
        const spans = new Map(group.map(({ at }) => [at[axis][1], at[axis]]));
        const parts = [];
        for (const [, from, to] of [...spans.values()].sort((a, b) => a[1] - b[1])) {
          if (parts.length && parts.at(-1)[1] === from - 1) parts.at(-1)[1] = to; else parts.push([from, to]);
        }
        word.textContent = `${group[0].at[axis][0]} ${parts.map(([from, to]) => (from === to ? from : `${from}–${to}`)).join(", ")}`;
      });
    }
    const less = strips.length - [...alike.values()].length, more = alike.size - groups.length;
    one("#folded").textContent = (less ? `${strips.length} rows of devices; those that hold the same are drawn once. ` : "")
      + (more ? `${more} more rows hold other parts.` : "");
  }

  function range(array, held) {
    if (!array.shape.length) return "the number";
    const last = array.shape.length - 1, part = Array(array.shape.length).fill(0);
    part[last] = held % array.columns;
    let row = Math.floor(held / array.columns);
    for (const axis of [...array.down_axes].reverse()) { part[axis] = row % array.ways[axis]; row = Math.floor(row / array.ways[axis]); }
    const words = array.shape.flatMap((size, axis) => {
      const step = size / array.ways[axis];
      return array.ways[axis] === 1 ? [] : [`${part[axis] * step}–${(part[axis] + 1) * step - 1} of axis ${axis}`];
    });
    return words.length ? words.join(", ") : "all of it";
  }

  function point(number) {
    device = number;
    const array = facts.arrays[chosen], held = tileOf(array, number);
    cells.forEach(({ cell }, other) => {
      cell.classList.toggle("at", other === number);
      cell.classList.toggle("same", held >= 0 && tileOf(array, other) === held);
    });
    const said = one("#said");
    if (held < 0) {
      said.textContent = `Device ${number} (${facts.devices[number]}) holds nothing of it.`;
      return;
    }
    const copies = facts.layouts[array.layout].flatMap((tile, other) => (tile === held && other !== number ? [other] : []));
    const list = copies.length > 8 ? `${copies.slice(0, 6).join(", ")} and ${copies.length - 6} more` : copies.join(", ");
    const also = copies.length ? ` So ${copies.length === 1 ? "does device" : "do devices"} ${list}.` : " No other device does.";
    said.textContent = `Device ${number} (${facts.devices[number]}) holds ${range(array, held)}: ${bytes(array.bytes)}.${also}`;
  }

  function choose(number) {
    chosen = number;
    const array = facts.arrays[number];
    all(".pick").forEach((button) => button.setAttribute("aria-pressed", String(Number(button.dataset.array) === number)));
    one("#chosen-name").replaceChildren(...breakable(array.name));
    one("#chosen-caption").replaceChildren(one(`#caption${array.caption}`).content.cloneNode(true));
    fold(array);
    draw(array);
    const strip = strips.find(({ devices }) => devices.includes(device));
    const same = shown.includes(strip) ? device : shown.find(({ devices }) => tileOf(array, devices[0]) === tileOf(array, strip.devices[0]))
      ?.devices[strip.devices.indexOf(device)];
    point(same ?? shown[0].devices[0]);
  }

  all(".pick").forEach((button) => button.addEventListener("click", () => choose(Number(button.dataset.array))));
  cells.forEach(({ cell }, number) => {
    cell.addEventListener("pointerenter", () => chosen !== null && point(number));
    cell.addEventListener("click", () => chosen !== null && point(number));
  });
  mesh.addEventListener("keydown", (event) => {
    if (chosen === null) return;
    const line = shown.flatMap(({ devices }) => devices), at = line.indexOf(device);
    const row = shown.findIndex(({ devices }) => devices.includes(device)), column = shown[row].devices.indexOf(device);
    const next = {
      ArrowRight: line[at + 1], ArrowLeft: line[at - 1], Home: line[0], End: line.at(-1),
      ArrowDown: shown[row + 1]?.devices[column], ArrowUp: shown[row - 1]?.devices[column],
    };
    if (!(event.key in next)) return;
    event.preventDefault();
    if (next[event.key] !== undefined) point(next[event.key]);
  });
  const first = facts.arrays.findIndex((array) => array.split);
  if (facts.arrays.length) choose(Math.max(0, first));

  // -- the ledger --
  const table = one("#ledger");
  if (table) {
    const rows = all("tbody tr", table);
    const folded = new Set();
    let group = "signal", key = null, descending = false;
    const columns = Number(table.dataset.columns);
    const cellOf = (row, name) => one(`.c-${name}`, row).dataset.sort;
    const numeric = (name) => one(`th.c-${name}`, table).dataset.numeric !== undefined;

    function compare(a, b) {
      if (key !== null) {
        const [x, y] = [cellOf(a, key), cellOf(b, key)];
        const order = numeric(key) ? Number(x) - Number(y) : x.localeCompare(y);
        if (order) return descending ? -order : order;
      }
      return Number(a.dataset.order) - Number(b.dataset.order);
    }

    function heading(name, members) {
      const row = document.createElement("tr");
      row.className = "group";
      const title = document.createElement("th");
      title.colSpan = columns - 3;
      title.scope = "rowgroup";
      const button = document.createElement("button");
      button.type = "button";
      button.append(document.createElement("span"));
      button.firstChild.append(...breakable(name || "–"));
      const isOpen = !folded.has(`${group}:${name}`);
      button.setAttribute("aria-expanded", String(isOpen));
      button.addEventListener("click", () => {
        const word = `${group}:${name}`;
        if (folded.has(word)) folded.delete(word); else folded.add(word);
        show();
        all("tr.group button", table).find((other) => other.textContent === (name || "–")).focus();
      });
      title.append(button);
      const sum = (what) => members.reduce((total, member) => total + Number(member.dataset[what]), 0);
      const cell = (name_, text, value) => {
        const made = document.createElement("td");
        made.className = `c-${name_}`;
        const number = document.createElement("data");
        number.textContent = text;
        number.value = value;
        made.append(number);
        return made;
      };
      const gap = document.createElement("td");
      gap.className = "c-payload";
      row.append(title, cell("count", sum("count").toLocaleString("en"), sum("count")), gap, cell("total", bytes(sum("total")), sum("total")));
      return row;
    }

    function show() {
      const groups = new Map();
      for (const row of [...rows].sort(compare)) {
        const name = group ? row.dataset[group] : "";
        if (!groups.has(name)) groups.set(name, []);
        groups.get(name).push(row);
      }
      const bodies = [];
      for (const [name, members] of groups) {
        const body = document.createElement("tbody");
        if (group) body.append(heading(name, members));
        const hidden = group && folded.has(`${group}:${name}`);
        members.forEach((row) => { row.hidden = Boolean(hidden); body.append(row); });
        bodies.push(body);
      }
      all("tbody", table).forEach((body) => body.remove());
      one("thead", table).after(...bodies);
      all("thead th", table).forEach((title) => {
        const its = title.dataset.key === key;
        title.setAttribute("aria-sort", its ? (descending ? "descending" : "ascending") : "none");
      });
      all("[data-group]").forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.group === group)));
      const names = [...groups.keys()];
      const every = one("#fold-all");
      every.hidden = !group;
      every.textContent = names.every((name) => folded.has(`${group}:${name}`)) ? "Unfold all" : "Fold all";
    }

    all("thead button", table).forEach((button) => button.addEventListener("click", () => {
      const its = button.closest("th").dataset.key;
      if (key !== its) { key = its; descending = numeric(its); }
      else if (descending === numeric(its)) descending = !descending;
      else { key = null; descending = false; }
      show();
    }));
    all("[data-group]").forEach((button) => button.addEventListener("click", () => { group = button.dataset.group; show(); }));
    one("#fold-all").addEventListener("click", () => {
      const names = [...new Set(rows.map((row) => `${group}:${row.dataset[group]}`))];
      const unfold = names.every((name) => folded.has(name));
      names.forEach((name) => (unfold ? folded.delete(name) : folded.add(name)));
      show();
    });
    if (rows.length > 60) rows.forEach((row) => folded.add(`signal:${row.dataset.signal}`));
    show();
  }
})();
