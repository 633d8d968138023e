// Fetches the page again when the service says that it has changed, and replaces its main part. Without
// this script the page works all the same, by its link "Reload".
"use strict";
(() => {
  const status = document.getElementById("live");
  const path = document.getElementById("main").dataset.live;
  if (!status || !path || !window.EventSource || !window.fetch) return;

  // A page shows ages, which go on without any change.
  const REFRESH_MS = 60000;
  let source = null;
  let timer = 0;
  let isBusy = false;
  let isStale = false;

  const say = (text) => { if (status.textContent !== text) status.textContent = text; };

  // Keeps the focus, the form fields, and how far tables are scrolled. The window's own scroll position
  // isn't affected.
  function replaceMain(next) {
    const old = document.getElementById("main");
    const scrolled = [...old.querySelectorAll(".scroll")].map((box) => box.scrollLeft);
    const active = document.activeElement;
    const isInside = old.contains(active);
    const focusable = (root) => [...root.querySelectorAll("a, button, input, select, [tabindex]")];
    const at = isInside ? focusable(old).indexOf(active) : -1;
    const href = isInside ? active.getAttribute("href") : null;
    const main = document.importNode(next, true);
    // What somebody has typed stays.
    for (const field of old.querySelectorAll("input, select")) {
      const same = field.id && main.querySelector("#" + CSS.escape(field.id));
      if (same) same.replaceWith(field);
    }
    old.replaceWith(main);
    main.querySelectorAll(".scroll").forEach((box, i) => { box.scrollLeft = scrolled[i] || 0; });
    if (isInside) {
      const all = focusable(main);
      const same = active.id ? document.getElementById(active.id)
        : href ? all.find((one) => one.getAttribute("href") === href) : all[at];
      (same || main).focus({ preventScroll: true });
    }
  }

  async function refresh() {
    if (isBusy) { isStale = true; return; }
    isBusy = true;
    clearTimeout(timer);
    try {
      const answer = await fetch(location.href, { cache: "no-store", credentials: "same-origin" });
      if (answer.status === 401) { location.reload(); return; }
      if (answer.ok) {
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        const main = page.getElementById("main");
        if (main) replaceMain(main);
        document.title = page.title;
      } else {
        say("Not live: the service answered " + answer.status);
      }
    } catch {
      say("Not live: the service doesn't answer");
    } finally {
      isBusy = false;
      const isNeeded = isStale;
      isStale = false;
      // The page may have been hidden, and shown again, since the fetch began.
      clearTimeout(timer);
      if (source) timer = setTimeout(refresh, REFRESH_MS);
      if (source && isNeeded) refresh();
    }
  }

  function start() {
    if (source) return;
    source = new EventSource(path);
    source.onopen = () => say("Live");
    source.addEventListener("changed", refresh);
    source.onerror = () => {
      if (source && source.readyState === EventSource.CLOSED) {
        say("Not live: reload");
        stop();
      } else {
        say("Connecting");
      }
    };
    timer = setTimeout(refresh, REFRESH_MS);
  }

  function stop() {
    clearTimeout(timer);
    if (source) source.close();
    source = null;
  }

  // A hidden page needs no stream: browsers open few connections to one service.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) { stop(); } else { start(); refresh(); }
  });
  window.addEventListener("pagehide", stop);
  window.addEventListener("pageshow", (event) => { if (event.persisted) { start(); refresh(); } });
  if (!document.hidden) start();
})();
