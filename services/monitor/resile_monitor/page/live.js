// What the pool is doing now: its newest events, while somebody looks at them, and jobs, hosts and policy, which are
// asked for again after events and every other second.

import { follow, get } from "./api.js";

const TAIL = 500;
const MAX_EVENTS = 5000;
const REFRESH_MS = 2000;
const SETTLE_MS = 250;
const REST = 3; // times as long as an answer took, so that a busy monitor is not asked without a break

export class Live extends EventTarget {
  jobs = null;
  hosts = null;
  policy = null;
  events = [];
  status = "connecting";
  connection = 0; // rises with each: events before it may be missing

  #seen = new Set();
  #unfollow = null;
  #isStopped = false;
  #event = Promise.withResolvers();
  #onVisibility = () => this.refresh();

  start() {
    document.addEventListener("visibilitychange", this.#onVisibility);
    this.#poll();
  }

  stop() {
    this.#isStopped = true;
    document.removeEventListener("visibilitychange", this.#onVisibility);
    this.follow(false);
  }

  /** Start or stop to follow the events of the pool. */
  follow(isFollowed) {
    if (isFollowed === Boolean(this.#unfollow)) return;
    this.#unfollow?.();
    this.#unfollow = isFollowed ? follow(`/v1/events?follow=1&tail=${TAIL}`, {
      onOpen: () => {
        this.connection += 1;
        this.#event.resolve();
      },
      onEvent: (event) => this.#add(event),
    }) : null;
  }

  job(id) {
    return this.jobs?.find((job) => job.id === id);
  }

  /** Ask now: something was changed here. */
  refresh() {
    this.#event.resolve();
  }

  #add(event) {
    if (this.#seen.has(event.sequence)) return;
    this.#seen.add(event.sequence);
    this.events.push(event);
    if (this.events.length > MAX_EVENTS * 1.1) {
      for (const old of this.events.splice(0, this.events.length - MAX_EVENTS)) this.#seen.delete(old.sequence);
    }
    this.#event.resolve();
  }

  async #poll() {
    while (!this.#isStopped) {
      this.#event = Promise.withResolvers();
      const begun = performance.now();
      await this.#load();
      await sleep(Math.min(REFRESH_MS, Math.max(SETTLE_MS, REST * (performance.now() - begun))));
      await Promise.race([this.#event.promise, sleep(document.hidden ? 10 * REFRESH_MS : REFRESH_MS)]);
    }
  }

  async #load() {
    try {
      const [{ jobs }, { hosts }, policy] = await Promise.all([get("/v1/jobs"), get("/v1/hosts"), get("/v1/policy")]);
      Object.assign(this, { jobs, hosts, policy });
      this.#become("live");
    } catch (problem) {
      this.#become(problem.status === 401 ? "logged off" : "disconnected", problem.message);
    }
  }

  #become(status, detail = "") {
    this.status = status;
    this.dispatchEvent(new CustomEvent("change", { detail }));
  }
}

const sleep = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));
