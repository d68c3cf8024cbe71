// How numbers, times and events are written.

const TIME = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const CLOCK = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit" });
const MOMENT = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });

export const count = (number, thing) => `${number} ${thing}${number === 1 ? "" : "s"}`;

const NO_MAXIMUM = 10000;

/** How many workers a job has, and its maximum if it was given one. */
export const workersOf = (job) => (job.max_workers < NO_MAXIMUM ? `${job.workers} of ${job.max_workers}` : String(job.workers));

export const number = (value) => (value === null || value === undefined ? "–" : Number(value.toPrecision(4)).toString());

export const time = (moment) => TIME.format(new Date(moment));

export const clock = (moment) => CLOCK.format(new Date(moment));

export const moment = (when) => MOMENT.format(new Date(when));

const PRECISE = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", fractionalSecondDigits: 3, hourCycle: "h23" });

export const preciseTime = (moment) => PRECISE.format(new Date(moment));

/** A text of the API with its times as clocks here show them. */
export const withLocalTimes = (text) => text.replace(/\d{4}-\d\d-\d\dT[\d:.]+Z/g, (found) => preciseTime(found));

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toPrecision(2)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} days`;
}

/** When an event happened, which is before it was stored. */
export const when = (event) => event.data.item?.time ?? event.data.time ?? event.time;

/** The parts of an event that people read: what it is about, what happened, and why. */
export function describe(event) {
  const [, family, id, what] = event.subject.split(".");
  const { data } = event;
  if (data.item) {
    const { kind, workers, iteration, reason } = data.item;
    const size = [workers > 0 && count(workers, "worker"), iteration > 0 && `iteration ${iteration}`].filter(Boolean).join(", ");
    return { job: data.job, about: data.name, what: size ? `${words(kind)}: ${size}` : words(kind), reason };
  }
  if (family === "pool") return { about: "pool", what: Object.entries(data).filter(isShown).map(([key, value]) => `${words(key)} ${value}`).join(", "), reason: "" };
  return { about: id ?? family, what: words(what ?? ""), reason: data.reason ?? "" };
}

const isShown = ([key]) => !["number", "time"].includes(key);

const words = (name) => name.replaceAll("_", " ");

/** The class that gives a job its colour, the same in every chart. */
export const colour = (job) => `c${(Number(job.replace(/\D/g, "")) || 0) % 10}`;
