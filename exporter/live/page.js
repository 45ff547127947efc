"use strict";
// Renews the page's sections every two seconds while it is looked at; says so when there is no answer any more.
(() => {
  const EVERY = 2000, PATIENCE = 6000;
  const live = document.getElementById("live");
  const headline = document.getElementById("headline");
  const shown = new Map();
  let answered = Date.now();
  let stale = false;

  function replace(id, html) {
    const section = document.getElementById(id);
    if (!section || shown.get(id) === html) return;
    const open = [...section.querySelectorAll("details[open]")].map((each) => each.id);
    const focused = section.contains(document.activeElement) ? document.activeElement.id : "";
    section.innerHTML = html;
    shown.set(id, html);
    for (const each of open) document.getElementById(each)?.setAttribute("open", "");
    if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  }

  function tell() {
    stale = Date.now() - answered > PATIENCE;
    document.body.classList.toggle("stale", stale);
    if (stale) {
      const since = new Date(answered).toLocaleTimeString();
      live.textContent = `not live since ${since}`;
      const text = "Not known: Stopline does not answer. What is below is old.";
      if (headline.textContent !== text) {
        const box = document.createElement("p");
        box.className = "headline unknown";
        box.textContent = text;
        headline.replaceChildren(box);
        shown.delete("headline");
        document.title = "? Stopline does not answer";
      }
    } else {
      live.textContent = "● live";
    }
  }

  async function renew() {
    if (!document.hidden) {
      try {
        const answer = await fetch("api/state?sections", { cache: "no-store", signal: AbortSignal.timeout(5000) });
        if (!answer.ok) throw new Error(answer.statusText);
        const state = await answer.json();
        for (const [id, html] of Object.entries(state.sections)) replace(id, html);
        document.title = state.title;
        answered = Date.now();
      } catch {
        // told by how long ago the last answer is
      }
      tell();
    }
    setTimeout(renew, EVERY);
  }

  document.addEventListener("visibilitychange", () => { if (!document.hidden) answered = Date.now(); });
  renew();
})();
