// Charts as SVG: lines, and what all charts have: scales, a frame, ticks.

import { h, svg } from "./dom.js";
import { clock, number, time } from "./format.js";

export const LEFT = 46;
const BOTTOM = 22;
const TOP = 14;

/** Draw lines of `{label, className, points: [[x, y], ...]}` over iterations; what is under the pointer is written. */
export function lines({ series, width, height = 180, isWhole = false }) {
  const points = series.flatMap((line) => line.points);
  const xs = points.map(([x]) => x);
  const ys = points.map(([, y]) => y);
  const [least, most] = padded(isWhole ? 0 : extreme(Math.min, ys), extreme(Math.max, ys));
  const [begin, end] = [extreme(Math.min, xs), Math.max(extreme(Math.max, xs), extreme(Math.min, xs) + 1)];
  const scale = scales({ begin, end, least, most, width, height });
  const paths = series.map(({ className, points: own }) =>
    svg("path", { class: `line ${className}`, d: own.map(([x, y], i) => `${i ? "L" : "M"}${scale.x(x)} ${scale.y(y)}`).join("") }));
  const dots = series.filter(({ points: own }) => own.length === 1).map(({ className, points: [[x, y]] }) =>
    svg("circle", { class: `dot ${className}`, cx: scale.x(x), cy: scale.y(y), r: 3 }));
  const read = h("p", { class: "readout" });
  const write = (x) => read.replaceChildren(...series.map(({ label, className, points: own }) => {
    const [at, value] = nearest(own, x);
    return h("span", {}, h("i", { class: `swatch ${className}` }), `${label} ${number(value)} at iteration ${at}`);
  }));
  write(end);
  const label = series.map((line) => `${line.label}: ${number(line.points.at(-1)?.[1])} at iteration ${line.points.at(-1)?.[0]}`).join(", ");
  const drawn = frame({ width, height, label, scale, xText: number, xTicks: ticks(begin, end, width / 80, true), least, most, isWhole }, paths, dots);
  onPointer(drawn, (event) => {
    const box = drawn.getBoundingClientRect();
    write(begin + ((event.clientX - box.left - LEFT) / (box.width - LEFT - 4)) * (end - begin));
  });
  drawn.addEventListener("pointerleave", () => write(end));
  return h("div", { class: "chart" }, read, drawn);
}

/** Call `show` where a pointer moves over a chart, or a finger touches it. */
export function onPointer(drawn, show) {
  for (const kind of ["pointermove", "pointerdown"]) drawn.addEventListener(kind, show);
}

export function scales({ begin, end, least, most, width, height, top = TOP }) {
  const round = (value) => Math.round(value * 10) / 10;
  return {
    x: (at) => round(LEFT + ((at - begin) / (end - begin || 1)) * (width - LEFT - 4)),
    y: (value) => round(height - BOTTOM - ((value - least) / (most - least || 1)) * (height - BOTTOM - top)),
  };
}

export function frame({ width, height, label, scale, xText, xTicks, least, most, isWhole }, ...content) {
  const rows = ticks(least, most, 4, isWhole).map((value) => svg("g", { class: "grid" },
    svg("line", { x1: LEFT, x2: width - 4, y1: scale.y(value), y2: scale.y(value) }),
    svg("text", { x: LEFT - 6, y: scale.y(value) + 4, "text-anchor": "end" }, number(value))));
  const columns = xTicks.map((at) => {
    const text = xText(at);
    const half = 3.3 * String(text).length; // pixels, as wide as it is at most
    return svg("text", { class: "tick", x: Math.min(scale.x(at), width - half), y: height - 6, "text-anchor": "middle" }, text);
  });
  const drawn = svg("svg", { role: "img", "aria-label": label, viewBox: `0 0 ${width} ${height}`, width, height }, rows);
  drawn.append(...content.flat().filter(Boolean), ...columns);
  return drawn;
}

function ticks(least, most, wanted, isWhole) {
  const rough = (most - least) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max([1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough), isWhole ? 1 : 0);
  const found = [];
  for (let n = Math.ceil(least / step); n * step <= most * (1 + 1e-9); n += 1) found.push(n * step);
  return found;
}

const SECONDS = [5, 10, 30, 60, 300, 600, 1800, 3600, 10800, 21600, 43200, 86400];

export function timeTicks(begin, end, width) {
  const wanted = (width - LEFT) / 90;
  const step = 1000 * (SECONDS.find((s) => (end - begin) / 1000 / s <= wanted) ?? Math.ceil((end - begin) / 1000 / wanted));
  const xTicks = [];
  for (let at = Math.ceil(begin / step) * step; at <= end; at += step) xTicks.push(at);
  return { xTicks, xText: step < 60000 ? time : clock };
}

const extreme = (of, values) => values.reduce((a, b) => of(a, b));

const padded = (least, most) => (least === most ? [least - (Math.abs(least) || 1) / 2, most + (Math.abs(most) || 1) / 2] : [least, most]);

const nearest = (points, x) => points.reduce((a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a));
