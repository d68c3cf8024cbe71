// The chart of slots as SVG: who had how many over time, and the moments that explain it.

import { LEFT, frame, onPointer, scales, timeTicks } from "./charts.js";
import { h, svg } from "./dom.js";
import { count, time, timeOrDay } from "./format.js";

const COLUMNS = 500;
const MARKS_TOP = 26; // pixels above the stack, for marks
const MANY_JOBS = 12;
const MANY_MARKS = 30;
const CLUSTER = 14; // pixels within which marks are one
const NUM_TOLD = 12;
const HINT = "Point at the chart to see how many slots each job had.";
const WORDS = {
  submitted: ["job submitted", "jobs submitted"],
  priority: ["priority changed", "priorities changed"],
  policy: ["policy changed", "policies changed"],
  joined: ["host joined", "hosts joined"],
  draining: ["host draining", "hosts draining"],
  left: ["host left", "hosts left"],
  lost: ["host lost", "hosts lost"],
};
const URGENCY = Object.keys(WORDS); // of marks that are one, the last in this order is shown

/**
 * Stack how many slots each of several jobs had over time. What is under the pointer is written, and the job marked.
 *
 * `jobs` are `{id, name, className, steps: [[time, number], ...]}`, `marks` `{time, kind, name, text}`; times are in
 * milliseconds. `capacity` are steps, drawn as a line. `all` are steps of what all jobs held, up to `until`: what none
 * of `jobs` held is drawn as that of removed jobs. `pointer` is kept from one drawing to the next, and `hint` is
 * shown while nothing is pointed at.
 */
export function stackedSteps({ jobs, begin, end, all = [], until = 0, capacity = [], marks, width, height = 240, hint = HINT, pointer = {} }) {
  const isDense = jobs.length > MANY_JOBS;
  if (isDense) height = 380;
  const edges = moments([...jobs.map(({ steps }) => steps), capacity, all], begin, end);
  const layers = stack(jobs, edges, all, until);
  const limits = columnsOf(capacity, edges);
  const totals = layers.at(-1).highs;
  const most = Math.max(1, ...limits, ...totals);
  const scale = scales({ begin, end, least: 0, most, width, height, top: MARKS_TOP });
  const areas = layers.map((layer) => svg("path", { class: `area ${layer.job.className}`, d: outline(layer, edges, scale) },
    svg("title", {}, layer.job.id ? `${layer.job.name} (${layer.job.id})` : layer.job.name)));
  const limit = limits.some(Boolean) && svg("path", { class: "limit", d: limits.map((n, at) => `${at ? "V" : `M${scale.x(begin)} `}${scale.y(n)}H${scale.x(edges[at + 1])}`).join("") });
  const label = `Slots of each job from ${time(begin)} to ${time(end)}; ${marksInWords(marks)}now ${jobsInWords(jobs)}`;
  const drawn = frame({ width, height, label, scale, ...timeTicks(begin, end, width), most, least: 0, isWhole: true },
    svg("g", { class: isDense ? "dense" : null }, areas.filter((area) => area.getAttribute("d"))), limit, drawMarks(marks, scale, height, begin, end));
  const read = h("p", { class: "readout" });
  const point = () => {
    const at = pointer.x >= LEFT ? edges.findLastIndex((edge) => scale.x(edge) <= pointer.x) : -1;
    const column = Math.min(at, totals.length - 1);
    const chosen = at < 0 ? -1 : layers.findIndex(({ lows, highs }) => scale.y(highs[column]) <= pointer.y && pointer.y < scale.y(lows[column]));
    areas.forEach((area, n) => area.classList.toggle("chosen", n === chosen));
    drawn.classList.toggle("pointed", chosen >= 0);
    read.replaceChildren(...(at < 0 ? [h("span", { class: "hint" }, hint)] : readout(edges[column], totals[column], limits[column], layers[chosen], column)));
  };
  onPointer(drawn, (event) => {
    const box = drawn.getBoundingClientRect();
    Object.assign(pointer, { x: ((event.clientX - box.left) * width) / box.width, y: ((event.clientY - box.top) * height) / box.height });
    point();
  });
  drawn.addEventListener("pointerleave", () => {
    pointer.x = -1;
    point();
  });
  point();
  return h("div", { class: "chart" }, read, drawn);
}

function readout(at, total, limit, layer, column) {
  const { job } = layer ?? {};
  return [
    h("span", {}, `${timeOrDay(at)}: ${total}${limit ? ` of ${limit}` : ""} slots in use`),
    ...(job ? [h("span", {}, h("i", { class: `swatch ${job.className}` }), `${job.name}${job.id ? ` (${job.id})` : ""}: ${count(layer.highs[column] - layer.lows[column], "slot")}`)] : []),
  ];
}

/** The moments at which the stack may change: as many as can be told apart. */
function moments(series, begin, end) {
  const column = (end - begin) / COLUMNS || 1;
  const columns = new Set(series.flatMap((steps) => steps.filter(([at]) => at > begin && at < end).map(([at]) => Math.floor((at - begin) / column))));
  return [begin, ...[...columns].sort((a, b) => a - b).map((n) => begin + n * column).filter((at) => at > begin), end];
}

/** What a series of steps is at the end of each column. */
function columnsOf(steps, edges) {
  let next = 0;
  let held = 0;
  return edges.slice(1).map((edge) => {
    for (; next < steps.length && steps[next][0] < edge; next += 1) held = steps[next][1];
    return held;
  });
}

/** For each job, and for what none of them held, where it begins and ends in the stack, by column. */
function stack(jobs, edges, all, until) {
  let base = edges.slice(1).map(() => 0);
  const layers = [];
  const add = (job, values) => {
    const highs = base.map((low, n) => low + values[n]);
    layers.push({ job, lows: base, highs });
    base = highs;
  };
  for (const job of jobs) add(job, columnsOf(job.steps, edges));
  const others = columnsOf(all, edges).map((n, at) => Math.max(0, n - base[at]));
  const last = others.findLastIndex((_, at) => edges[at + 1] <= until);
  add({ name: "removed jobs", className: "others" }, others.map((n, at) => (at <= last ? n : 0)));
  return layers;
}

function outline({ lows, highs }, edges, scale) {
  const blocks = [];
  lows.forEach((low, n) => {
    if (low === highs[n]) return;
    const before = blocks.at(-1);
    if (before && before.end === edges[n] && before.low === low && before.high === highs[n]) before.end = edges[n + 1];
    else blocks.push({ begin: edges[n], end: edges[n + 1], low, high: highs[n] });
  });
  return blocks.map(({ begin, end, low, high }) => `M${scale.x(begin)} ${scale.y(low)}H${scale.x(end)}V${scale.y(high)}H${scale.x(begin)}Z`).join("");
}

/** A symbol for each moment, or for those too close together; lost hosts have a line, and with few marks all have. */
function drawMarks(marks, scale, height, begin, end) {
  const within = marks.filter((mark) => mark.time >= begin && mark.time <= end).sort((a, b) => a.time - b.time);
  const clusters = [];
  for (const mark of within) {
    const x = scale.x(mark.time);
    if (clusters.length && x - clusters.at(-1).x < CLUSTER) clusters.at(-1).marks.push(mark);
    else clusters.push({ x, marks: [mark] });
  }
  return clusters.map(({ x, marks: near }) => {
    const kind = URGENCY.findLast((each) => near.some((mark) => mark.kind === each)) ?? "other";
    const told = near.slice(0, NUM_TOLD).map((mark) => `${timeOrDay(mark.time)} ${inWords(mark)}`);
    if (near.length > told.length) told.push(`and ${near.length - told.length} more`);
    return svg("g", { class: `mark ${kind}` },
      (kind === "lost" || within.length <= MANY_MARKS) && svg("line", { x1: x, x2: x, y1: 12, y2: scale.y(0) }),
      svg("path", { d: symbol(kind, x) }),
      near.length > 1 && svg("text", { x: x + 7, y: 10 }, near.length),
      svg("title", {}, told.join("\n")));
  });
}

function symbol(kind, x) {
  if (kind === "lost") return `M${x - 5} 2H${x + 5}L${x} 11Z`;
  if (kind === "priority" || kind === "policy") return `M${x} 2L${x + 4.5} 6.5L${x} 11L${x - 4.5} 6.5Z`;
  return `M${x - 4} 6.5a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z`;
}

const inWords = ({ kind, name, text }) => `${name}: ${WORDS[kind]?.[0] ?? kind}${text ? `${WORDS[kind] ? " to" : ":"} ${text}` : ""}`;

function marksInWords(marks) {
  const found = Object.entries(WORDS).map(([kind, words]) => [marks.filter((mark) => mark.kind === kind).length, words]);
  return found.filter(([num]) => num).map(([num, [one, several]]) => `${num} ${num === 1 ? one : several}, `).join("");
}

function jobsInWords(jobs) {
  const now = jobs.map(({ name, steps }) => [name, steps.at(-1)?.[1] ?? 0]).filter(([, n]) => n).sort(([, a], [, b]) => b - a);
  const told = now.slice(0, NUM_TOLD).map(([name, n]) => `${name} ${n}`);
  if (now.length > told.length) told.push(`${count(now.length - told.length, "other job")} ${now.slice(NUM_TOLD).reduce((sum, [, n]) => sum + n, 0)}`);
  return told.join(", ") || "none";
}
