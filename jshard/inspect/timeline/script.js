// The timeline: every event is a bar on one canvas, drawn anew for each window of time that one looks at.
(() => {
  const one = (selector) => document.querySelector(selector);
  const all = (selector) => [...document.querySelectorAll(selector)];
  const told = JSON.parse(one("#events").textContent);
  const { lanes, steps, length, kinds } = told;
  const count = told.start.length;
  const [OP, KIND, COLLECTIVE, SIGNAL, PHASE, LINE, PROGRAM] = [0, 1, 2, 3, 4, 5, 6];
  const view = one("#view"), canvas = one("#canvas"), pen = canvas.getContext("2d");
  const ROW = lanes.reduce((sum, lane) => sum + lane.rows, 0) <= 16 ? 24 : 17, GAP = 9, HEAD = 40, NARROW = 620;
  const SIGNALS = ["--ax0", "--ax2", "--ax3", "--ax4", "--ax5", "--ax6", "--ax7"];

  // -- where lanes lie, and the events of each row in order of their begin --
  let high = HEAD;
  const tops = lanes.map((lane) => { const top = high; high += lane.rows * ROW + GAP; return top; });
  const rows = lanes.map((lane) => Array.from({ length: lane.rows }, () => []));
  for (let event = 0; event < count; event += 1) rows[told.lane[event]][told.row[event]].push(event);
  const inLane = lanes.map((_, lane) => rows[lane].flat().sort((a, b) => told.start[a] - told.start[b] || a - b));

  // -- words --
  const span = (ns) => {
    const units = ["ns", "µs", "ms", "s"];
    let unit = 0;
    while (ns >= 999.5 && unit < 3) { ns /= 1000; unit += 1; }
    return `${!unit ? ns.toFixed(0) : ns < 9.995 ? ns.toFixed(2) : ns < 99.95 ? ns.toFixed(1) : ns.toFixed(0)} ${units[unit]}`;
  };
  const wordsOf = (event) => {
    const kind = kinds[told.kind[event]], step = told.step[event];
    const what = kind[COLLECTIVE] ? kind[COLLECTIVE].replaceAll("_", "-") : kind[KIND] === "around" ? "runs others" : "computes";
    const signal = kind[SIGNAL] === "-" ? "no signal" : `signal ${kind[SIGNAL]}${kind[LINE] ? ` (${kind[LINE]})` : ""}`;
    return [
      kind[OP],
      `${what}, ${kind[PHASE]}, ${signal}`,
      `${span(told.duration[event])} from ${span(told.start[event])} on ${lanes[told.lane[event]].name}`
        + `${step === null ? "" : `, step ${step}`}${kind[PROGRAM] ? `, ${kind[PROGRAM]}` : ""}`,
    ];
  };

  // -- colours --
  const by = { colours: "kind", labels: "operation" };
  let found = null;
  const signals = [...new Set(kinds.map((kind) => kind[SIGNAL]))].filter((name) => name !== "-");
  const variable = (kind) => {
    if (by.colours === "kind") return kind[KIND] === "collective" ? "--collective" : "--compute";
    const place = signals.indexOf(kind[SIGNAL]);
    return place < 0 ? "--m1" : SIGNALS[place % SIGNALS.length];
  };
  let styles = null;
  const colour = (name) => {
    styles ??= new Map();
    if (!styles.has(name)) styles.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
    return styles.get(name);
  };
  const resolve = (name) => (name === "--compute" ? colour("--ax0") : name === "--collective" ? colour("--ax1") : colour(name));

  function legend() {
    const entries = by.colours === "kind"
      ? [["computes", "--compute"], ["collective", "--collective"]]
      : [...signals.map((name, place) => [name, SIGNALS[place % SIGNALS.length]]),
        ...(kinds.some((kind) => kind[SIGNAL] === "-") ? [["no signal", "--m1"]] : [])];
    const made = entries.map(([word, name]) => {
      const item = document.createElement("li"), mark = document.createElement("i");
      mark.style.setProperty("--c", `var(${name})`);
      item.append(mark, word);
      return item;
    });
    if (kinds.some((kind) => kind[KIND] === "around")) {
      const item = document.createElement("li"), mark = document.createElement("i");
      mark.className = "around";
      item.append(mark, "a loop or a call, which runs what lies below it");
      made.push(item);
    }
    one("#legend").replaceChildren(...made);
  }

  // -- the window of time --
  let from = 0, to = length || 1, wide = 0, left = 0, chosen = null, pending = false;
  const x = (ns) => left + (ns - from) / (to - from) * (wide - left);
  const time = (place) => from + (place - left) / (wide - left) * (to - from);
  const show = (a, b) => {
    const whole = length || 1, least = Math.min(whole, 20);
    let size = Math.min(whole, Math.max(least, b - a));
    from = Math.min(Math.max(0, (a + b) / 2 - size / 2), whole - size);
    to = from + size;
    ask();
  };
  const zoom = (factor, at = (from + to) / 2) => show(at - (at - from) * factor, at + (to - at) * factor);
  const move = (ns) => show(from + ns, to + ns);
  const ask = () => { if (!pending) { pending = true; requestAnimationFrame(draw); } };

  function ticks() {
    const rough = (to - from) / Math.max(2, (wide - left) / 110), ten = 10 ** Math.floor(Math.log10(rough));
    const each = [1, 2, 5, 10].map((times) => times * ten).find((size) => size >= rough);
    return { each, first: Math.ceil(from / each) * each };
  }

  function draw() {
    pending = false;
    const ratio = devicePixelRatio || 1;
    wide = view.clientWidth;
    left = wide < NARROW ? 62 : 118;
    const tall = Math.min(high, parseFloat(getComputedStyle(view).maxHeight) || high);
    one("#height").style.height = `${Math.max(0, high - tall)}px`;
    canvas.style.height = `${tall}px`;
    if (canvas.width !== Math.round(wide * ratio) || canvas.height !== Math.round(tall * ratio)) {
      canvas.width = Math.round(wide * ratio);
      canvas.height = Math.round(tall * ratio);
    }
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, wide, tall);
    const down = view.scrollTop, end = down + tall;
    pen.textBaseline = "middle";
    let drawn = 0;

    // steps lie behind everything, every second one tinted
    steps.forEach(([, start, stop], number) => {
      if (number % 2 === 0) { pen.fillStyle = colour("--sunk"); pen.fillRect(x(start), HEAD - 4, x(stop) - x(start), tall); }
    });
    pen.save();
    pen.beginPath();
    pen.rect(left, 0, wide - left, tall);
    pen.clip();
    const mono = getComputedStyle(document.documentElement).getPropertyValue("--mono");
    pen.font = `11px ${mono}`;
    lanes.forEach((lane, number) => {
      const top = tops[number] - down;
      if (top > tall || top + lane.rows * ROW < HEAD) { drawn += seen(number); return; }
      rows[number].forEach((events, row) => {
        const y = top + row * ROW;
        for (const event of events) {
          const start = told.start[event], size = told.duration[event];
          if (start + size < from || start > to) continue;
          bar(event, x(start), y, Math.max(1, x(start + size) - x(start) - 0.5));
          drawn += 1;
        }
      });
    });
    pen.restore();
    heads(tall, down);
    canvas.dataset.bars = drawn;
  }

  // bars of lanes that are scrolled away are bars of this window too
  const seen = (lane) => inLane[lane].filter((event) => told.start[event] + told.duration[event] >= from && told.start[event] <= to).length;

  function bar(event, place, y, size) {
    const kind = kinds[told.kind[event]], tall = ROW - 2;
    pen.globalAlpha = found === null || found.has(told.kind[event]) ? 1 : 0.16;
    if (kind[KIND] === "around") {
      pen.strokeStyle = colour("--strong");
      pen.strokeRect(place + 0.5, y + 0.5, Math.max(0.5, size - 1), tall - 1);
    } else {
      pen.fillStyle = resolve(variable(kind));
      pen.fillRect(place, y, size, tall);
      if (by.colours === "signal" && kind[KIND] === "collective") {
        pen.fillStyle = colour("--ink");
        pen.fillRect(place, y + tall - 3, size, 3);
      }
    }
    const begin = Math.max(place, left), room = Math.min(place + size, wide) - begin;
    if (room > 34) {
      pen.fillStyle = kind[KIND] === "around" ? colour("--soft") : colour("--paper");
      const fits = Math.floor((room - 8) / 6.7), text = kind[by.labels === "signal" && kind[SIGNAL] !== "-" ? SIGNAL : OP];
      pen.fillText(text.length > fits ? `${text.slice(0, Math.max(1, fits - 1))}…` : text, begin + 4, y + tall / 2 + 0.5);
    }
    pen.globalAlpha = 1;
    if (event === chosen) {
      pen.strokeStyle = colour("--ink");
      pen.lineWidth = 2;
      pen.strokeRect(place - 1, y - 1, size + 2, tall + 2);
      pen.lineWidth = 1;
    }
  }

  function heads(tall, down) {
    const sans = getComputedStyle(document.documentElement).getPropertyValue("--sans");
    pen.fillStyle = colour("--raised");
    pen.fillRect(0, 0, wide, HEAD - 4);
    pen.fillRect(0, 0, left, tall);
    pen.font = `12px ${sans}`;
    pen.fillStyle = colour("--ink");
    lanes.forEach((lane, number) => {
      const top = tops[number] - down;
      if (top > tall || top + lane.rows * ROW < HEAD) return;
      const words = wide < NARROW ? lane.name.replace("device ", "").replace(" of rank ", " · ") : lane.name;
      pen.fillText(words, 12, top + ROW / 2 - 1, left - 18);
    });
    pen.fillStyle = colour("--raised");
    pen.fillRect(0, 0, left, HEAD - 4);
    pen.fillStyle = colour("--soft");
    if (wide < NARROW) pen.fillText(lanes.some((lane) => lane.name.includes(" of rank ")) ? "dev · rank" : "device", 8, 12, left - 12);
    pen.save();
    pen.beginPath();
    pen.rect(left, 0, wide - left, tall);
    pen.clip();
    const { each, first } = ticks();
    for (let ns = first; ns <= to; ns += each) {
      pen.fillStyle = colour("--line");
      pen.fillRect(x(ns), 22, 1, HEAD - 26);
      pen.fillStyle = colour("--soft");
      pen.fillText(span(ns), x(ns) + 4, 29);
    }
    pen.font = `600 12px ${sans}`;
    for (const [number, start, stop] of steps) {
      const begin = Math.max(x(start), left), room = Math.min(x(stop), wide) - begin, words = `step ${number}`;
      if (room > pen.measureText(words).width + 6) { pen.fillStyle = colour("--ink"); pen.fillText(words, begin + 4, 11); }
      pen.fillStyle = colour("--strong");
      pen.fillRect(x(start), 4, 1, 15);
    }
    pen.restore();
    pen.fillStyle = colour("--line");
    pen.fillRect(0, HEAD - 5, wide, 1);
    pen.fillRect(left - 1, 0, 1, tall);
  }

  // -- pointing --
  const at = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  function hit(place, y) {
    if (place < left || y < HEAD - 4) return null;
    const deep = y + view.scrollTop;
    const lane = tops.findLastIndex((top) => deep >= top);
    if (lane < 0) return null;
    const row = Math.floor((deep - tops[lane]) / ROW);
    if (row >= lanes[lane].rows) return null;
    const ns = time(place), near = 3 * (to - from) / (wide - left);
    let best = null, least = near;
    const events = rows[lane][row];
    let low = 0, above = events.length;
    while (low < above) { const middle = (low + above) >> 1; if (told.start[events[middle]] <= ns) low = middle + 1; else above = middle; }
    for (const event of [events[low - 1], events[low]]) {
      if (event === undefined) continue;
      const away = Math.max(told.start[event] - ns, ns - told.start[event] - told.duration[event], 0);
      if (away <= least) { least = away; best = event; if (away === 0) break; }
    }
    return best;
  }
  const tip = one("#tip");
  function point(event, place, y) {
    tip.hidden = event === null;
    if (event === null) return;
    const [name, ...rest] = wordsOf(event);
    const bold = document.createElement("b");
    bold.textContent = name;
    tip.replaceChildren(bold, ...rest.map((words) => { const part = document.createElement("span"); part.textContent = words; return part; }));
    const box = view.getBoundingClientRect(), home = tip.parentElement.getBoundingClientRect();
    const right = home.width - tip.offsetWidth - 4;
    tip.style.left = `${Math.max(0, Math.min(place + 14, right))}px`;
    tip.style.top = `${box.top - home.top + y + 20}px`;
  }
  function choose(event) {
    chosen = event;
    one("#said").textContent = event === null ? "" : wordsOf(event).join(" · ");
    ask();
  }
  const downs = new Map();
  let moved = false;
  canvas.addEventListener("pointerdown", (event) => {
    downs.set(event.pointerId, at(event)[0]);
    canvas.setPointerCapture(event.pointerId);
    moved = false;
  });
  canvas.addEventListener("pointermove", (event) => {
    const [place, y] = at(event);
    if (!downs.has(event.pointerId)) { point(hit(place, y), place, y); return; }
    const before = downs.get(event.pointerId), perPixel = (to - from) / (wide - left);
    if (downs.size === 2) {
      const other = [...downs].find(([id]) => id !== event.pointerId)[1];
      const was = Math.abs(before - other), now = Math.abs(place - other);
      if (was > 4 && now > 4) zoom(was / now, time((place + other) / 2));
    } else if (Math.abs(place - before) > 0) {
      move((before - place) * perPixel);
    }
    if (Math.abs(place - before) > 2) moved = true;
    downs.set(event.pointerId, place);
    tip.hidden = true;
  });
  const lift = (event) => {
    if (!downs.delete(event.pointerId) || moved || event.type !== "pointerup") return;
    const [place, y] = at(event);
    choose(hit(place, y));
  };
  canvas.addEventListener("pointerup", lift);
  canvas.addEventListener("pointercancel", lift);
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("dblclick", (event) => zoom(0.4, time(at(event)[0])));
  canvas.addEventListener("wheel", (event) => {
    const perPixel = (to - from) / (wide - left);
    if (event.ctrlKey || event.metaKey) zoom(1.0018 ** event.deltaY, time(at(event)[0]));
    else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) move((event.deltaX || event.deltaY) * perPixel);
    else return;
    event.preventDefault();
  }, { passive: false });

  // -- keys and buttons --
  function go(by) {
    const lane = chosen === null ? 0 : told.lane[chosen], events = inLane[lane];
    if (!events?.length) return;
    const next = events[Math.max(0, Math.min(events.length - 1, chosen === null ? 0 : events.indexOf(chosen) + by))];
    choose(next);
    if (told.start[next] < from || told.start[next] + told.duration[next] > to) {
      const middle = told.start[next] + told.duration[next] / 2;
      show(middle - (to - from) / 2, middle + (to - from) / 2);
    }
  }
  const does = {
    in: () => zoom(0.6), out: () => zoom(1 / 0.6), all: () => { show(0, length); const step = one("#step"); if (step) step.value = ""; },
    left: () => move((from - to) / 6), right: () => move((to - from) / 6), next: () => go(1), before: () => go(-1),
  };
  const keys = { "+": "in", "=": "in", "-": "out", "0": "all", ArrowLeft: "left", ArrowRight: "right", "]": "next", "[": "before" };
  view.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
    does[keys[event.key]]();
    event.preventDefault();
  });
  for (const button of all("[data-do]")) button.addEventListener("click", () => does[button.dataset.do]());
  one("#step")?.addEventListener("change", (event) => {
    if (event.target.value === "") { show(0, length); return; }
    const [, start, stop] = steps[event.target.value], edge = (stop - start) / 50;
    show(start - edge, stop + edge);
  });
  for (const button of all("[data-by]")) {
    button.addEventListener("click", () => {
      by[button.dataset.what] = button.dataset.by;
      for (const other of all(`[data-what=${button.dataset.what}]`)) other.setAttribute("aria-pressed", String(other === button));
      legend();
      ask();
    });
  }
  for (const button of all("[data-op]")) {
    button.addEventListener("click", () => {
      const on = button.getAttribute("aria-pressed") !== "true";
      for (const other of all("[data-op]")) other.setAttribute("aria-pressed", String(on && other === button));
      const same = (kind) => kind[OP] === button.dataset.op && kind[PROGRAM] === button.dataset.program;
      found = on ? new Set([...kinds.keys()].filter((number) => same(kinds[number]))) : null;
      ask();
      if (on) view.scrollIntoView({ block: "nearest" });
    });
  }

  view.addEventListener("scroll", ask);
  new ResizeObserver(ask).observe(view);
  const anew = () => { styles = null; ask(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", anew);
  new MutationObserver(anew).observe(document.documentElement, { attributeFilter: ["data-theme"] });
  legend();
  draw();
})();
