// Who held how many slots over time: what the monitor keeps of it, thinned, and the events that came after that.

import { isFinal } from "./actions.js";
import { get } from "./api.js";
import { colour, when } from "./format.js";

const MAX_NEW = 500; // events behind what was kept, until that is asked for again
const PAUSE_MS = 5000;
const HOST_EVENT = /^resile\.host\.[^.]+\.(joined|lost|left)$/; // they change how many slots there are
const KINDS = { priority: "priority", lost: "lost", joined: "joined", draining: "draining", left: "left", policy: "policy" };

export class SlotHistory {
  #live;
  #kept = null;
  #seconds = 0;
  #asked = 0;
  #connection = 0;
  #isLoading = false;

  constructor(live) {
    this.#live = live;
  }

  /** Ask again if what is kept is of another time, or too old; resolves to whether there is something new to draw. */
  async load(seconds) {
    const isOther = seconds !== this.#seconds;
    if (this.#isLoading || !(isOther || (this.#isOld() && performance.now() - this.#asked > PAUSE_MS))) return false;
    [this.#isLoading, this.#seconds, this.#connection] = [true, seconds, this.#live.connection];
    try {
      this.#kept = await get(`/v1/slots?seconds=${seconds}`);
      return true;
    } catch {
      this.#connection = -1; // asked again after a pause; the page shows that it is disconnected
      return false;
    } finally {
      [this.#isLoading, this.#asked] = [false, performance.now()];
    }
  }

  #isOld() {
    const { events, connection } = this.#live;
    if (!this.#kept || connection !== this.#connection) return true;
    const since = this.#newer();
    const lacksSome = events.length > 0 && events[0].sequence > this.#kept.sequence + 1;
    return lacksSome || since.length > MAX_NEW || since.some(({ subject }) => HOST_EVENT.test(subject));
  }

  /** The events that are not in what is kept. */
  #newer() {
    return this.#live.events.filter(({ sequence }) => sequence > (this.#kept?.sequence ?? 0));
  }

  /** When the oldest event was of which something is known; in milliseconds. */
  get oldest() {
    return Math.min(...[this.#kept?.begin || Infinity, ...this.#live.events.slice(0, 1).map((event) => Date.parse(when(event)))]);
  }

  /** What `stackedSteps` draws: steps of each job, of all jobs and of the pool's slots, and the marks. */
  shown(begin, end) {
    const places = new Map(this.#live.jobs.map(({ id }, n) => [id, n])); // in the order of submission
    const place = ({ id }) => places.get(id) ?? places.size;
    const jobs = new Map((this.#kept?.jobs ?? []).filter(({ id }) => places.has(id)).map(({ id, name, held }) =>
      [id, { id, name, className: colour(id), steps: steps(held) }]));
    const marks = [...(this.#kept?.marks ?? [])];
    for (const event of this.#newer()) {
      const { data } = event;
      marks.push(...marksOf(event));
      if (!data.item) continue;
      const job = jobs.get(data.job) ?? { id: data.job, name: data.name, className: colour(data.job), steps: [] };
      jobs.set(data.job, job);
      job.steps.push([Math.max(Date.parse(data.item.time), job.steps.at(-1)?.[0] ?? 0), slotsHeld(data)]);
    }
    return {
      jobs: [...jobs.values()].filter((job) => job.steps.some(([at, n], i) => n && at < end && (job.steps[i + 1]?.[0] ?? end) > begin))
        .sort((a, b) => place(a) - place(b)),
      all: this.#kept ? steps(this.#kept.held) : [],
      until: this.#kept?.end ?? 0,
      capacity: this.#kept ? steps(this.#kept.slots) : [],
      marks: marks.filter((mark) => mark.time >= begin && mark.time <= end).map((mark) => ({ ...mark, name: jobs.get(mark.about)?.name ?? mark.about })),
    };
  }
}

const steps = ({ times, values }) => times.map((time, n) => [time, values[n]]);

const slotsHeld = (data) => (isFinal(data) || ["queued", "paused"].includes(data.state) ? 0 : data.item.workers);

function marksOf(event) {
  const { data, subject } = event;
  const time = Date.parse(when(event));
  if (data.item?.number === 1) return [{ time, kind: "submitted", about: data.job, text: "" }];
  const [, family, id, what] = subject.split(".");
  const kind = KINDS[family === "pool" ? id : what];
  return kind ? [{ time, kind, about: family === "pool" ? "pool" : id, text: String(data.item ? data.priority : (data.policy ?? "")) }] : [];
}
