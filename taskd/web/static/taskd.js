"use strict";
// Every page works without this script. The script updates pages while they are open, shows times
// in the time zone of the browser, and handles keyboard shortcuts.

const clock = new Intl.DateTimeFormat([], { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const twoDigits = (number) => String(number).padStart(2, "0");

function showTimes(within) {
  for (const time of within.querySelectorAll("time[datetime]")) {
    const at = new Date(time.dateTime);
    if (Number.isNaN(at.getTime())) continue;
    if ("clock" in time.dataset) {
      time.textContent = clock.format(at);
      continue;
    }
    const day = `${at.getFullYear()}-${twoDigits(at.getMonth() + 1)}-${twoDigits(at.getDate())}`;
    time.title = time.textContent;
    const part = "ms" in time.dataset ? `.${String(at.getMilliseconds()).padStart(3, "0")}` : "";
    const clockTime = [at.getHours(), at.getMinutes(), at.getSeconds()].map(twoDigits).join(":");
    time.textContent = `${day} ${clockTime}${part}`;
  }
}

// Live updates: a visible page has one stream of events. A hidden tab closes its stream.

const sign = document.getElementById("sign");
const parts = [...document.querySelectorAll("[data-part]")].map((each) => each.dataset.part);
const watched = document.body.dataset.watch;
// A page with data-follow is reloaded as a whole. The pause before the next reload is at least 50
// times as long as the last reload took, so that open pages cost the server little.
const follows = "follow" in document.body.dataset;
const FOLLOW_MS = 5000, PAUSE_FACTOR = 50;
let nextAt = performance.now() + FOLLOW_MS;
let stream = null;
// Whether the page is outdated: its last reload failed, or was put off because the page was in use.
let stale = false;

function showStatus(text, kind) {
  sign.hidden = false;
  sign.textContent = text;
  sign.className = `sign ${kind}`;
}

function inUse(part) {
  const active = document.activeElement;
  const marked = document.getSelection();
  return (part !== active && part.contains(active)) || part.querySelector("details.act[open]") !== null
    || (!marked.isCollapsed && part.contains(marked.anchorNode));
}

function toRelease(part) {
  return part.querySelector("details.act[open]") === null ? "click the page" : "close the form";
}

function replace(old, html) {
  // Do not replace a part that the user is using; a later update replaces it.
  if (inUse(old)) return;
  const scrolled = [...old.querySelectorAll(".wide")].map((each) => each.scrollLeft);
  const folds = [...old.querySelectorAll("details[id]")].map((each) => [each.id, each.open]);
  old.innerHTML = html;
  for (const [id, open] of folds) {
    const fold = document.getElementById(id);
    if (fold !== null) fold.open = open;
  }
  old.querySelectorAll(".wide").forEach((each, place) => { each.scrollLeft = scrolled[place] ?? 0; });
  showTimes(old);
}

async function reload() {
  const main = document.getElementById("main");
  stale = true;
  if (inUse(main)) {
    showStatus(`changed: ${toRelease(main)} to see it`, "bad");
    return;
  }
  const answer = await fetch(location.href, { credentials: "same-origin" });
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const news = page.getElementById("main");
  if (!answer.ok || news === null || inUse(main)) return;
  replace(main, news.innerHTML);
  stale = false;
  document.body.dataset.stage = page.body.dataset.stage ?? "";
  if (watched && !page.body.dataset.watch) stopListening("");
}

async function follow() {
  const main = document.getElementById("main");
  const began = performance.now();
  if (began < nextAt) return;
  if (inUse(main)) {
    showStatus(`in use: ${toRelease(main)} to go on`, "");
    return;
  }
  nextAt = Infinity;
  try {
    await reload();
  } finally {
    stale = false;
    nextAt = performance.now() + Math.max(FOLLOW_MS, PAUSE_FACTOR * (performance.now() - began));
  }
}

function listen() {
  if (stream !== null || document.hidden || (parts.length === 0 && !watched && !follows)) return;
  const query = new URLSearchParams({ parts: parts.join(",") });
  if (watched) {
    query.set("job", watched);
    query.set("stage", document.body.dataset.stage);
  }
  stream = new EventSource(`/live?${query}`);
  stream.addEventListener("news", (event) => {
    showStatus("live", "good");
    const news = JSON.parse(event.data);
    for (const [name, html] of Object.entries(news.parts)) {
      const old = document.querySelector(`[data-part="${name}"]`);
      if (old !== null) replace(old, html);
    }
    if (news.changed || stale) reload().catch(() => showStatus("not live", "bad"));
    else if (follows) follow().catch(() => showStatus("not live", "bad"));
  });
  stream.addEventListener("trouble", () => showStatus("no answer from PostgreSQL", "bad"));
  stream.addEventListener("error", () => {
    const over = stream !== null && stream.readyState === EventSource.CLOSED;
    showStatus("not live", "bad");
    if (over) { stopListening("not live"); setTimeout(listen, 30000); }
  });
}

function stopListening(text) {
  if (stream !== null) stream.close();
  stream = null;
  if (text) showStatus(text, "bad"); else sign.hidden = true;
}

document.addEventListener("visibilitychange", () => (document.hidden ? stopListening("") : listen()));
window.addEventListener("pagehide", () => stopListening(""));
window.addEventListener("pageshow", (event) => { if (event.persisted) listen(); });

// Keyboard shortcuts.

const PAGES = { o: "/", j: "/jobs", f: "/jobs?state=failed", w: "/workflows", s: "/schedules", l: "/limits", k: "/workers" };
const keys = document.getElementById("keys");
const keysButton = document.getElementById("keys-button");
// When the user pressed g: a key of PAGES within the next 1.5 s opens its page.
let prefixAt = 0;

function step(by) {
  const links = [...document.querySelectorAll("a.go")];
  if (links.length === 0) return;
  const at = links.indexOf(document.activeElement);
  const next = at === -1 ? (by > 0 ? 0 : links.length - 1) : at + by;
  links[Math.min(Math.max(next, 0), links.length - 1)].focus();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  if (event.target.closest("input, textarea, select, dialog[open]")) {
    if (event.key === "Escape" && event.target.matches("input")) event.target.blur();
    return;
  }
  const prefixed = Date.now() - prefixAt < 1500;
  prefixAt = 0;
  if (prefixed && event.key in PAGES) location.href = PAGES[event.key];
  else if (event.key === "g") prefixAt = Date.now();
  else if (event.key === "/") document.querySelector(".find input").focus();
  else if (event.key === "?") keys.showModal();
  else if (event.key === "j" || event.key === "k") step(event.key === "j" ? 1 : -1);
  else return;
  event.preventDefault();
});
keysButton.hidden = false;
keysButton.addEventListener("click", () => keys.showModal());

showTimes(document);
listen();
