// How numbers, times and events are written.

const CLOCK = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
const DAY = { day: "numeric", month: "short" };
const format = (options) => {
  const made = new Intl.DateTimeFormat(undefined, options);
  return (when) => made.format(new Date(when));
};

export const clock = format(CLOCK);

export const time = format({ ...CLOCK, second: "2-digit" });

export const preciseTime = format({ ...CLOCK, second: "2-digit", fractionalSecondDigits: 3 });

export const moment = format({ dateStyle: "medium", timeStyle: "medium", hourCycle: "h23" });

const day = format(DAY);

const dayAndTime = (when) => `${day(when)}, ${time(when)}`;

/** A time of today, or the day and the time. */
export const timeOrDay = (when) => (day(when) === day(Date.now()) ? time(when) : dayAndTime(when));

export const count = (number, thing) => `${number} ${thing}${number === 1 ? "" : "s"}`;

const NO_MAXIMUM = 10000;

/** How many workers a job has, and its maximum if it was given one. */
export const workersOf = (job) => (job.max_workers < NO_MAXIMUM ? `${job.workers} of ${job.max_workers}` : String(job.workers));

export const number = (value) => (value === null || value === undefined ? "–" : Number(value.toPrecision(4)).toString());

/** A text of the API with its times as clocks here show them. */
export const withLocalTimes = (text) => text.replace(/\d{4}-\d\d-\d\dT[\d:.]+Z/g, (found) => preciseTime(found));

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.001) return seconds > 0 ? `${Math.max(1, Math.round(seconds * 1e6))} µs` : "0 ms";
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 59.5) return `${seconds < 9.95 ? Number(seconds.toPrecision(2)) : Math.round(seconds)} s`;
  const whole = Math.round(seconds);
  const minutes = Math.floor(whole / 60);
  if (minutes < 10) return whole % 60 ? `${minutes} min ${whole % 60} s` : `${minutes} min`;
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
