"use strict";
// Builds the page from the data that is embedded in it; nothing is fetched.

const main = document.getElementById("main");
const charts = [];

async function unpacked(id) {
  const packed = atob(document.getElementById(id).textContent.trim());
  const bytes = Uint8Array.from(packed, (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

// Numbers as people read them; the exact value is the cell's title.
function scaled(value, units) {
  if (value === null || value === undefined) return "";
  const [unit, scale] = units.find(([, s]) => Math.abs(value) >= 0.9995 * s) ?? units[units.length - 1];
  const x = value / scale;
  return (Math.abs(x) >= 999.5 ? Math.round(x).toLocaleString("en") : String(Number(x.toPrecision(3)))) + " " + unit;
}
const SI = [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]];
const time = (s) => scaled(s, [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]);
const bytes = (b) => scaled(b, [...SI.map(([p, x]) => [p + "B", x]), ["B", 1]]);
const flops = (f) => scaled(f, [["EFLOP", 1e18], ["PFLOP", 1e15], ...SI.map(([p, x]) => [p + "FLOP", x]), ["FLOP", 1]]);
const count = (n) => (n === null || n === undefined ? "" : n.toLocaleString("en", { maximumFractionDigits: 0 }));
const percent = (x) => (100 * x).toFixed(1) + "%";
const short = (x) => (x === null || x === undefined ? "" : x >= 1000 ? count(x) : String(Number(x.toPrecision(3))));

// Names, values and source lines are text, also where a tooltip is HTML.
const escaped = (text) => String(text ?? "").replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children.filter((c) => c !== null && c !== undefined));
  return made;
}

function section(parent, title, note, ...children) {
  const made = element("section", {}, element("h2", {}, title), note ? element("p", {}, note) : null, ...children);
  parent.append(made);
  return made;
}

function pair() {
  const made = element("div", { class: "pair" });
  main.append(made);
  return made;
}

// Columns: [title, row => value, value => text or Node, class]
function table(rows, columns, mark) {
  const body = element("tbody");
  const heads = columns.map(([title, , , kind], i) => {
    const button = element("button", { type: "button" }, title);
    const head = element("th", { scope: "col", class: kind ?? "" }, button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((h) => h.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      fill([...rows].sort((a, b) => (down ? -1 : 1) * order(columns[i][1](a), columns[i][1](b))));
    });
    return head;
  });
  function fill(sorted) {
    body.replaceChildren(...sorted.map((row) => {
      const line = element("tr", mark && mark(row) ? { class: "best" } : {});
      for (const [, value, show, kind] of columns) {
        const x = value(row);
        const cell = element("td", { class: kind ?? "" }, show ? show(x, row) : String(x ?? ""));
        if (typeof x === "number") { cell.title = String(x); cell.dataset.value = String(x); }
        line.append(cell);
      }
      return line;
    }));
  }
  fill(rows);
  return element("div", { class: "scroll" }, element("table", {}, element("thead", {}, element("tr", {}, ...heads)), body));
}

function order(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a ?? "").localeCompare(String(b ?? ""), "en", { numeric: true });
}

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const PALETTE = ["#3b7ddd", "#e8743b", "#19a979", "#945ecf", "#e0a800", "#13a4b4", "#d6518a", "#6c8893", "#8a6d3b"];

function chart(parent, title, note, options, kind = "") {
  const box = element("div", { class: "chart " + kind, role: "img", "aria-label": title });
  section(parent, title, note, box);
  charts.push({ box, options, drawn: null });
}

function draw(entry) {
  entry.drawn?.dispose();
  entry.drawn = echarts.init(entry.box, null, { renderer: "canvas" });
  const ink = css("--ink"), soft = css("--soft"), line = css("--line");
  const axis = { axisLabel: { color: soft, hideOverlap: true }, nameTextStyle: { color: soft }, axisLine: { lineStyle: { color: line } },
    splitLine: { lineStyle: { color: line } } };
  const options = entry.options(axis, entry.box.clientWidth);
  entry.drawn.setOption({
    animation: false, color: PALETTE, textStyle: { color: ink, fontFamily: "inherit" },
    ...options,
    tooltip: { confine: true, backgroundColor: css("--card"), borderColor: line, textStyle: { color: ink, fontSize: 12 }, ...options.tooltip },
  });
  entry.box.dataset.drawn = "yes";
}

// A layout such as [data·model,-] Σ{x} as tiles of devices: at most two split dimensions are drawn.
function tiles(layout, mesh) {
  const inside = /^\[(.*?)\]/.exec(layout);
  if (!inside) return "";
  const devices = Object.values(mesh).reduce((a, b) => a * b, 1);
  const ways = inside[1] === "" ? [] : inside[1].split(",").map((d) => (d === "-" ? 1 : d.split("·").reduce((n, a) => n * (mesh[a] ?? 1), 1)));
  const split = ways.filter((w) => w > 1);
  const [rows, columns] = split.length === 0 ? [1, 1] : split.length === 1 ? [1, split[0]] : [split[0], split[1]];
  const pieces = ways.reduce((a, b) => a * b, 1);
  const seen = (n) => Math.min(n, 16);
  const [r, c] = [seen(rows), seen(columns)];
  const [W, H] = [84, r === 1 ? 14 : 28];
  let cells = "";
  for (let i = 0; i < r; i++) for (let j = 0; j < c; j++) {
    const device = (Math.floor(i * rows / r) * columns + Math.floor(j * columns / c)) / (rows * columns);
    const fill = pieces === 1 ? "var(--line)" : `hsl(${Math.round(330 * device)} 58% 56%)`;
    cells += `<rect x="${(j * W / c).toFixed(2)}" y="${(i * H / r).toFixed(2)}" width="${(W / c - 0.6).toFixed(2)}" height="${(H / r - 0.6).toFixed(2)}" fill="${fill}"/>`;
  }
  const copies = devices / pieces;
  const label = `${pieces} ${pieces === 1 ? "piece" : "pieces"}, ${copies === 1 ? "one device each" : copies + " devices hold each"}`;
  const holder = element("span", { title: label });
  holder.innerHTML = `<svg class="tiles" width="${W}" height="${H}" role="img" aria-label="${label}">${cells}</svg>`;
  return holder;
}

function ranking(found) {
  const varied = [...new Set(found.rows.flatMap((r) => Object.keys(r.choice)))];
  const budget = found.rows.some((r) => r.days !== null), priced = found.rows.some((r) => r.dollars !== null);
  section(main, "Ranking", "Every slice and mesh that was planned, by time per token. A star marks the Pareto front of time, memory and chips. " +
    (found.twins ? `${found.twins} meshes that differ in the order of equal links alone are not listed. ` : "") + "Click a head to sort.",
    table(found.rows, [
      ["#", (r) => r.rank, (x, r) => element("span", r.pareto ? { class: "star" } : {}, x + (r.pareto ? "\u00a0★" : ""))],
      ["slice", (r) => r.hardware],
      ["chips", (r) => r.chips, count, "number"],
      ["mesh", (r) => Object.entries(r.mesh).map(([a, n]) => `${a}=${n}`).join(" × ")],
      ...varied.map((key) => [key, (r) => r.choice[key], null, "number"]),
      ["step", (r) => r.step_s, time, "number"],
      ...(found.rows[0].tokens_per_step ? [["tokens/s", (r) => r.tokens_per_s, count, "number"]] : []),
      ["MFU", (r) => r.mfu, percent, "number"],
      ["exposed", (r) => r.exposed_s, time, "number"],
      ["memory", (r) => r.peak_bytes, bytes, "number"],
      ...(budget ? [["days", (r) => r.days, short, "number"]] : []),
      ...(priced ? [["$", (r) => r.dollars, short, "number"]] : []),
      ["gap", (r) => r.gap, (x) => (100 * x).toFixed(2) + "%", "number"],
    ], (r) => r.rank === 1));
  const both = pair();
  chart(both, "Time and memory", "A point is a candidate; those on the Pareto front are larger. Down and left is better.", (axis) => ({
    grid: { left: 8, right: 16, top: 56, bottom: 30, containLabel: true }, legend: legend(),
    xAxis: { ...axis, type: "value", scale: true, name: "memory per device", nameLocation: "middle", nameGap: 28, axisLabel: { ...axis.axisLabel, formatter: bytes } },
    yAxis: { ...axis, type: "value", scale: true, name: "step", axisLabel: { ...axis.axisLabel, formatter: time } },
    tooltip: { formatter: (p) => { const r = found.rows[p.data[2]]; return `#${r.rank} ${escaped(r.hardware)}<br>${Object.values(r.mesh).join("×")}: ${time(r.step_s)}, ${bytes(r.peak_bytes)}`; } },
    series: [...new Set(found.rows.map((r) => r.chips))].sort((a, b) => a - b).map((chips) => ({
      type: "scatter", name: chips + " chips", data: found.rows.map((r, i) => [r, i]).filter(([r]) => r.chips === chips).map(([r, i]) => [r.peak_bytes, r.step_s, i]),
      symbolSize: (v) => (found.rows[v[2]].pareto ? 13 : 7) })),
  }));
  if (found.scaling.length) {
    chart(both, "Strong scaling", "The same work on more chips; the knee, a larger point, is where doubling the chips stops to give half of what it could: " +
      found.scaling.map((c) => `${c.name}: ${c.knee_chips} chips`).join("; ") + ".", (axis) => ({
      grid: { left: 8, right: 16, top: 56, bottom: 30, containLabel: true }, legend: legend(),
      xAxis: { ...axis, type: "log", logBase: 2, name: "chips", nameLocation: "middle", nameGap: 28 },
      yAxis: { ...axis, type: "log", name: found.rows[0].tokens_per_step ? "tokens/s" : "steps/s", nameGap: 8, axisLabel: { ...axis.axisLabel, formatter: count } },
      tooltip: { trigger: "item", formatter: (p) => `${escaped(p.seriesName)}<br>${count(p.data[0])} chips: ${count(p.data[1])} per s` },
      series: found.scaling.map((c) => ({ type: "line", name: c.name, symbolSize: (v) => (v[0] === c.knee_chips ? 13 : 7), data: c.points.map((p) => [p.chips, p.per_s]) })),
    }));
  } else {
    chart(both, "Where the time goes", "Compute and exposed communication of the first candidates.", (axis, width) => stacked(axis, width, found.rows.slice(0, 12).map((r) => Object.values(r.mesh).join("×")),
      [["compute", found.rows.slice(0, 12).map((r) => r.step_s - r.exposed_s), "--compute"], ["exposed", found.rows.slice(0, 12).map((r) => r.exposed_s), "--wait"]]));
  }
}

// One line, which scrolls where names do not fit; of type "plain" as many as `lines` says.
function legend() {
  return { top: 0, type: "scroll", textStyle: { color: css("--soft") }, pageTextStyle: { color: css("--soft") } };
}

// How many lines the names of a legend take.
function lines(names, width) {
  let count = 1, used = 0;
  for (const name of names) {
    const wide = 45 + 7 * name.length;
    if (used && used + wide > width) { count += 1; used = 0; }
    used += wide;
  }
  return count;
}

function stacked(axis, width, names, series) {
  const room = 0.8 * width / names.length;
  const label = { interval: 0, hideOverlap: false, ...(room < 70 ? { rotate: 40 } : { overflow: "break", width: room }) };
  return {
    grid: { left: 8, right: 16, top: 30, bottom: 8, containLabel: true }, legend: legend(),
    tooltip: { trigger: "axis", axisPointer: { type: "shadow" }, valueFormatter: time },
    xAxis: { ...axis, type: "category", data: names, axisLabel: { ...axis.axisLabel, ...label } },
    yAxis: { ...axis, type: "value", axisLabel: { ...axis.axisLabel, formatter: time } },
    series: series.map(([name, data, color]) => ({ type: "bar", stack: "all", name, data, itemStyle: { color: css(color) } })),
  };
}

function timeline(plan) {
  const lanes = ["communication", "compute"];
  const color = (b) => css(b.lane === "compute" ? (b.repeated ? "--again" : "--compute") : b.hides ? "--hide" : "--wait");
  const repeats = plan.timeline.some((b) => b.repeated && b.lane === "compute") ? "Violet compute is repeated for the backward pass. " : "";
  chart(main, "A step in two lanes", "Program order, as the planner prices it. A bar spans all trips of its operation. Communication in full colour stops compute; paler communication may hide behind it. " + repeats +
    "Scroll or pinch to zoom, drag to move.", (axis) => ({
    grid: { left: 8, right: 16, top: 10, bottom: 60, containLabel: true },
    xAxis: { ...axis, type: "value", min: 0, axisLabel: { ...axis.axisLabel, formatter: time } },
    yAxis: { ...axis, type: "category", data: lanes },
    dataZoom: [{ type: "inside", filterMode: "none" }, { type: "slider", filterMode: "none", height: 22, bottom: 8, labelFormatter: time, textStyle: { color: css("--soft") } }],
    tooltip: { formatter: (p) => { const b = plan.timeline[p.data[3]]; return `${escaped(b.name)}${b.repeated ? " (repeated)" : ""} <b>${time(b.duration_s)}</b>${b.trips > 1 ? ` in ${count(b.trips)} trips` : ""}<br>${escaped(b.value)}<br>${escaped(b.where)}`; } },
    series: [{
      type: "custom", encode: { x: [1, 2], y: 0 }, progressive: 0,
      data: plan.timeline.map((b, i) => [lanes.indexOf(b.lane), b.start_s, b.start_s + b.duration_s, i]),
      renderItem: (params, api) => {
        const from = api.coord([api.value(1), api.value(0)]), to = api.coord([api.value(2), api.value(0)]);
        const height = api.size([0, 1])[1] * 0.62, area = params.coordSys;
        const shape = echarts.graphic.clipRectByRect({ x: from[0], y: from[1] - height / 2, width: Math.max(to[0] - from[0], 0.6), height },
          { x: area.x, y: area.y, width: area.width, height: area.height });
        return shape && { type: "rect", shape, style: { fill: color(plan.timeline[api.value(3)]), stroke: css("--card"), lineWidth: shape.width > 4 ? 0.5 : 0 } };
      } }],
  }));
}

function memory(parent, plan) {
  const m = plan.memory;
  const moment = m.peak_moment;
  const own = { "kept for backward": "--kept", "repeated in backward": "--again" };
  const below = (width) => 22 * lines(Object.keys(m.kinds), width) + 4; // the legend
  chart(parent, "Memory over the program", `The peak is ${bytes(m.peak_bytes)} of ${bytes(m.limit_bytes)} per device, at ${m.peak_at}.`, (axis, width) => ({
    grid: { left: 8, right: 16, top: below(width) + 24, bottom: 8, containLabel: true }, legend: { ...legend(), type: "plain" },
    tooltip: { trigger: "axis", formatter: (ps) => `${escaped(m.moments[ps[0].dataIndex])}<br>` + ps.filter((p) => p.value).map((p) => `${p.marker}${escaped(p.seriesName)}: ${bytes(p.value)}`).join("<br>") },
    xAxis: { ...axis, type: "category", data: m.moments.map((_, i) => i), axisLabel: { show: false }, axisTick: { show: false } },
    yAxis: { ...axis, type: "value", axisLabel: { ...axis.axisLabel, formatter: bytes } },
    series: Object.entries(m.kinds).map(([kind, values], k) => ({
      type: "line", name: kind, stack: "all", step: "middle", symbol: "none", lineStyle: { width: 0 }, areaStyle: { opacity: 0.85 }, data: values,
      ...(own[kind] ? { itemStyle: { color: css(own[kind]) } } : {}),
      markLine: k === 0 ? { symbol: "none", silent: true, data: [[{ xAxis: moment, yAxis: m.peak_bytes }, { xAxis: moment, y: below(width) + 20 }]], lineStyle: { color: css("--ink") }, label: { formatter: "peak", color: css("--ink") } } : undefined,
    })),
  }));
}

function roofline(parent, plan) {
  const r = plan.roofline;
  const x = (p) => p.flops / p.bytes, y = (p) => p.flops / p.seconds;
  const low = Math.min(1, ...r.points.map(x)), high = Math.max(10 * r.peak_flops_per_s / r.bytes_per_s, ...r.points.map(x));
  const ridge = r.peak_flops_per_s / r.bytes_per_s;
  chart(parent, "Roofline", `Contractions of one device: FLOPs per byte against the rate that they are priced at. The ridge is at ${short(ridge)} FLOP/B; a point's size is its share of the step.`, (axis) => ({
    grid: { left: 8, right: 20, top: 16, bottom: 30, containLabel: true },
    xAxis: { ...axis, type: "log", name: "FLOP per byte", nameLocation: "middle", nameGap: 28 },
    yAxis: { ...axis, type: "log", axisLabel: { ...axis.axisLabel, formatter: (v) => scaled(v, [["P", 1e15], ...SI, ["", 1]]) } },
    tooltip: { formatter: (p) => p.seriesType === "line" ? "" : `${escaped(r.points[p.data[2]].name)}<br>${escaped(r.points[p.data[2]].where)}<br>${flops(y(r.points[p.data[2]]))}/s, ${short(p.data[0])} FLOP/B, ${count(r.points[p.data[2]].count)} times` },
    series: [
      { type: "line", symbol: "none", silent: true, lineStyle: { color: css("--soft") }, data: [[low, low * r.bytes_per_s], [ridge, r.peak_flops_per_s], [high, r.peak_flops_per_s]] },
      { type: "scatter", data: r.points.map((p, i) => [x(p), y(p), i]), itemStyle: { color: css("--compute"), opacity: 0.75 },
        symbolSize: (v) => 6 + 26 * Math.sqrt(r.points[v[2]].seconds * r.points[v[2]].count / plan.cost.step_s) },
    ],
  }));
}

function planned(plan, first) {
  const c = plan.cost;
  section(main, first ? "The step" : "The best candidate's step", first ? "" : plan.verdict, element("dl", { class: "stats" }, ...[
    ["step", time(c.step_s)], ["compute", time(c.compute_s)], ["exposed communication", time(c.exposed_s)], ["hidden communication", time(c.hidden_s)],
    ["matmuls per device", flops(plan.flops)], ["of peak", percent(plan.flops / plan.roofline.peak_flops_per_s / c.step_s)],
    ...(plan.backward.repeated ? [["kept for backward", bytes(plan.backward.kept_bytes)], ["matmuls repeated", percent(plan.backward.repeated.share_of_flops)]] : []),
    ["peak memory", bytes(plan.memory.peak_bytes)], ["gap", (100 * plan.certificate.gap).toFixed(2) + "%"],
  ].map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)))));
  timeline(plan);
  const both = pair();
  memory(both, plan);
  roofline(both, plan);
  if (plan.compared.length) {
    const rows = [{ name: "this plan", step_s: c.step_s, exposed_s: c.exposed_s, peak_bytes: plan.memory.peak_bytes, fits: true }, ...plan.compared];
    chart(main, "Against the standard layouts", "Hand-written layouts of the same program, completed as well as they can be and priced in the same model.", (axis, width) => stacked(axis, width, rows.map((r) => r.name),
      [["compute", rows.map((r) => r.step_s - r.exposed_s), "--compute"], ["exposed", rows.map((r) => r.exposed_s), "--wait"]]));
    section(main, "Standard layouts", "", table(rows, [["layout", (r) => r.name], ["step", (r) => r.step_s, time, "number"], ["slower", (r) => r.step_s / c.step_s - 1, percent, "number"],
      ["exposed", (r) => r.exposed_s, time, "number"], ["memory", (r) => r.peak_bytes, bytes, "number"], ["fits", (r) => (r.fits ? "yes" : "no"), (x) => element("span", x === "no" ? { class: "no" } : {}, x)]]));
  }
  const mesh = Object.entries(plan.mesh).map(([a, n]) => `${a}=${n}`).join(" × ");
  const lies = (role, name, ...more) => table(plan.layouts.filter((r) => r.role === role), [[name, (r) => r.path, null, "code"], ["value", (r) => r.value, null, "code"],
    ["layout", (r) => r.layout, null, "code"], ["tiles", (r) => r.layout, (x) => tiles(x, plan.mesh)], ["count", (r) => r.count, count, "number"], ["bytes per device", (r) => r.bytes, bytes, "number"], ...more]);
  section(main, "Layouts of inputs", `Mesh ${mesh}. A tile is a piece of the value, its colour the device that holds it (at most 16 a side are drawn); grey: every device holds it all. Equal layers share a row.`,
    lies("input", "input"));
  section(main, "Layouts of activations", "What operations that decide a layout give, the weightiest first.", lies("activation", "made by", ["at", (r) => r.where]));
  section(main, "Collectives of a step", plan.collectives.length ? "Logical bytes per device; the time if nothing hides." : "None: no device needs what another one has.",
    plan.collectives.length ? table(plan.collectives, [["collective", (r) => r.kind], ["over", (r) => r.axes], ["count", (r) => r.count, count, "number"], ["bytes", (r) => r.bytes, bytes, "number"], ["time", (r) => r.seconds, time, "number"],
      ["may hide", (r) => (r.hides ? "yes" : "no")], ["value", (r) => r.value, null, "code"], ["at", (r) => r.where]]) : null);
  const proof = plan.certificate;
  section(main, "Certificate", `${proof.proof}: nothing takes less than ${time(proof.bound_s)} among ${proof.space}. Solver: ${proof.solver}.`);
  section(main, "Hardware", `${plan.hardware}: every number that the prices use, and who says so.`,
    table(plan.numbers, [["number", (r) => r.name, null, "code"], ["value", (r) => r.value, (_, r) => r.text, "number"], ["source", (r) => r.source, null, "text"]]));
  if (plan.notes.length) section(main, "Notes", plan.notes.join(" · "));
}

const FAMILY = { D: "#3b7ddd", m: "#e0a800", T: "#19a979", ".": "#9ba1a9" };

function phases(phase) {
  const widths = phase.cells.map((c) => c.width), batches = phase.cells.map((c) => c.per_device);
  const bounds = (v) => [Math.min(...v) / Math.SQRT2, Math.max(...v) * Math.SQRT2];
  const kinds = Object.keys(phase.families).filter((k) => phase.cells.some((c) => c.found === k));
  chart(main, "Which parallelism where", `${phase.name}: the family that the solver found for each batch and width, and the closed forms' boundaries.`, (axis) => ({
    grid: { left: 8, right: 16, top: 56, bottom: 34, containLabel: true }, legend: legend(),
    xAxis: { ...axis, type: "log", logBase: 2, min: bounds(batches)[0], max: bounds(batches)[1], name: "rows of the batch per device", nameLocation: "middle", nameGap: 28, axisLabel: { ...axis.axisLabel, formatter: short } },
    yAxis: { ...axis, type: "log", logBase: 2, min: bounds(widths)[0], max: bounds(widths)[1], name: "width", axisLabel: { ...axis.axisLabel, formatter: short } },
    tooltip: { formatter: (p) => { if (p.seriesType === "line") return escaped(p.seriesName); const c = phase.cells[p.data[2]];
      return `${short(c.per_device)} per device, width ${count(c.width)}<br>found: ${escaped(phase.families[c.found])}, closed forms: ${escaped(c.closed)}<br>${time(c.step_s)}`; } },
    series: [
      ...kinds.map((kind) => ({ type: "custom", name: phase.families[kind], itemStyle: { color: FAMILY[kind] },
        data: phase.cells.map((c, i) => [c.per_device, c.width, i]).filter(([, , i]) => phase.cells[i].found === kind),
        renderItem: (params, api) => {
          const a = api.coord([api.value(0) / Math.SQRT2, api.value(1) * Math.SQRT2]), b = api.coord([api.value(0) * Math.SQRT2, api.value(1) / Math.SQRT2]);
          return { type: "rect", shape: { x: a[0], y: a[1], width: b[0] - a[0], height: b[1] - a[1] }, style: { fill: FAMILY[kind], stroke: css("--card"), lineWidth: 1 } };
        } })),
      ...phase.lines.map((line, i) => ({ type: "line", name: line.name, symbol: "none", clip: true, data: line.points, lineStyle: { color: css("--ink"), type: ["solid", "dashed", "dotted"][i] }, itemStyle: { color: css("--ink") } })),
    ],
  }), "tall");
}

function diagnosed(found) {
  const s = found.step;
  section(main, "The step", "As it was compiled, priced by the planner's model.", element("dl", { class: "stats" }, ...[
    ["step", time(s.step_s)], ["communication", time(s.communication_s)], ["of which nothing hides", time(s.exposed_s)],
    ...(s.best_s !== null && s.hand_s !== null ? [["as it is, by the cost model", time(s.hand_s)], ["the best plan, by the cost model", time(s.best_s)]] : []),
    ...(s.peak_bytes !== null ? [["peak memory", bytes(s.peak_bytes)]] : []), ...(s.limit_bytes ? [["memory of a device", bytes(s.limit_bytes)]] : []),
  ].map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)))));
  const slow = found.findings.filter((f) => f.seconds > 0);
  if (slow.length > 1) {
    const names = slow.map((f) => `${found.findings.indexOf(f) + 1}`);
    chart(main, "What each change saves", "By the number of the finding; two changes may save the same time.", (axis, width) => stacked(axis, width, names, [["time saved", slow.map((f) => f.seconds), "--wait"]]));
  }
  found.findings.forEach((f, i) => section(main, `${i + 1}. ${f.kind}: ${f.price}`, null,
    element("p", {}, element("code", {}, f.where)), element("p", {}, f.cause + "."), element("p", {}, f.change + ".")));
  if (!found.findings.length) section(main, "No findings", "No change is known that saves much.");
  if (found.trials.length) {
    section(main, "Flags", "Each tried alone, by compiling.", table(found.trials, [["flag", (r) => r.flag, null, "code"], ["step", (r) => r.step_s, (x) => (x === null ? "does not compile" : time(x)), "number"],
      ["change", (r) => (r.step_s === null ? null : r.step_s / s.step_s - 1), (x) => (x === null ? "" : percent(x)), "number"], ["peak", (r) => r.peak_bytes, bytes, "number"]]));
  }
  if (found.notes.length) section(main, "Notes", found.notes.join(" · "));
}

async function start() {
  const data = JSON.parse(await unpacked("data"));
  const script = element("script");
  script.textContent = await unpacked("library");
  document.head.append(script);
  if (data.ranking) ranking(data.ranking);
  if (data.plan) planned(data.plan, !data.ranking);
  if (data.ranking && data.ranking.left_out.length) {
    section(main, "Left out", "Candidates without a plan.", table(data.ranking.left_out, [["candidate", (r) => r.candidate], ["why", (r) => r.reason, null, "text"]]));
  }
  if (data.phase) phases(data.phase);
  if (data.diagnosis) diagnosed(data.diagnosis);
  for (const entry of charts) draw(entry);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach(draw));
  addEventListener("resize", () => charts.forEach((entry) => entry.drawn.resize()));
  document.body.dataset.ready = "yes";
}

start();
