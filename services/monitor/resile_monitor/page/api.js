// The HTTP API of the pool, as docs/api.md describes it. The browser sends the cookie of the session by itself.

/** A request that failed, with the line that says what is wrong and what to do. */
export class Problem extends Error {
  constructor(detail, status) {
    super(detail);
    this.status = status;
  }
}

export const get = (path) => request("GET", path);

/** Change something; the key makes it happen once, even if the browser sends it twice. */
export const send = (method, path, body = {}) =>
  request(method, path, JSON.stringify(body), { "Idempotency-Key": crypto.randomUUID?.() ?? String(Math.random()) });

export const upload = (path, bytes) => request("POST", path, bytes);

export const logOn = (token) => request("POST", "/session", JSON.stringify({ token }));

export const logOff = () => request("DELETE", "/session");

async function request(method, path, body, headers = {}) {
  let response;
  try {
    response = await fetch(path, { method, body, headers });
  } catch {
    throw new Problem("the monitor cannot be reached: is the pool up?", 0);
  }
  const text = await response.text();
  if (response.ok) return text ? JSON.parse(text) : null;
  let detail = `${response.status} ${response.statusText}`;
  try {
    detail = JSON.parse(text).detail ?? detail;
  } catch {
    // Something between the browser and the monitor answered.
  }
  throw new Problem(detail, response.status);
}

/**
 * Follow server-sent events until the returned function is called. `onOpen` is called at each connection: what was
 * received before it comes again, up to the `tail` of the path. If `isOver()` when the connection ends, the browser asks
 * by itself whether there is more, from the last event on.
 *
 * A browser opens six connections to one address, for all of its tabs and windows together. So each view follows one
 * stream at most, and none while it is hidden.
 */
export function follow(path, { onOpen, onEvent, isOver = () => false }) {
  let source = null;
  let timer;
  const close = () => {
    clearTimeout(timer);
    source?.close();
    source = null;
  };
  const open = () => {
    close();
    if (document.hidden) return;
    source = new EventSource(path);
    source.onopen = () => onOpen();
    source.onmessage = (message) => onEvent(JSON.parse(message.data));
    source.onerror = () => {
      if (isOver()) return;
      close();
      timer = setTimeout(open, 1000);
    };
  };
  document.addEventListener("visibilitychange", open);
  open();
  return () => {
    document.removeEventListener("visibilitychange", open);
    close();
  };
}
