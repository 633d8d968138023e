// Checks a page for what its readers need. Returns a list of faults.
(() => {
  const faults = [];
  const say = (text, element) => faults.push(text + ": " + element.outerHTML.slice(0, 160));
  const all = (selector) => [...document.querySelectorAll(selector)];
  const isShown = (element) => element.checkVisibility({ visibilityProperty: true });

  if (document.documentElement.lang !== "en") faults.push("no language");
  if (!document.title) faults.push("no title");
  if (all("h1").length !== 1) faults.push("not one h1: " + all("h1").length);
  if (all("main").length !== 1) faults.push("not one main");
  if (all("header").length !== 1) faults.push("not one header");
  const skip = document.querySelector("a.skip");
  if (!skip || !document.querySelector(skip.getAttribute("href"))) faults.push("no skip link");

  let level = 0;
  for (const heading of all("h1, h2, h3, h4, h5, h6")) {
    const next = Number(heading.tagName[1]);
    if (next > level + 1) say("a heading skips a level", heading);
    level = next;
  }
  const ids = all("[id]").map((element) => element.id);
  for (const id of new Set(ids.filter((id, i) => ids.indexOf(id) !== i))) faults.push("id twice: " + id);
  for (const element of all("[aria-labelledby], [aria-describedby]")) {
    for (const name of ["aria-labelledby", "aria-describedby"]) {
      for (const id of (element.getAttribute(name) || "").split(" ").filter(Boolean)) {
        if (!document.getElementById(id)) say("its label is missing", element);
      }
    }
  }
  const labels = all("nav, [role=group], [role=search]").map((e) =>
    e.tagName + (e.getAttribute("aria-label") || document.getElementById(e.getAttribute("aria-labelledby"))?.textContent));
  for (const label of labels) if (/null|undefined/.test(label)) faults.push("a landmark without a name");

  for (const table of all("table")) {
    if (!table.caption || !table.caption.textContent.trim()) say("a table without a caption", table);
    for (const th of table.querySelectorAll("th")) if (!th.scope) say("a header without a scope", th);
    for (const row of table.tBodies[0].rows) {
      if (!row.querySelector("th[scope=row]")) say("a row without a header", row);
    }
  }
  for (const field of all("input, select, textarea")) if (!field.labels.length) say("a field without a label", field);
  for (const one of all("a, button")) if (!one.textContent.trim()) say("a link or button without a name", one);
  for (const image of all("img")) if (!image.hasAttribute("alt")) say("an image without a text", image);
  for (const element of all("[tabindex]")) if (element.tabIndex > 0) say("a tabindex above 0", element);
  for (const box of all(".scroll")) {
    if (box.tabIndex !== 0 || !box.getAttribute("role")) say("a box that scrolls and takes no focus", box);
  }
  // A state has a word beside its color and symbol.
  for (const badge of all(".badge")) {
    const words = [...badge.childNodes].filter((n) => n.nodeType === Node.TEXT_NODE);
    if (!words.map((n) => n.textContent).join("").trim()) say("a state that only color and symbol tell", badge);
  }
  if (document.documentElement.scrollWidth > innerWidth) faults.push("the page scrolls sideways");

  // WCAG 2.2, 1.4.3: contrast of text.
  const parse = (color) => (color.match(/[\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => {
    const part = (c) => { c /= 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const background = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const [r, g, b, a = 1] = parse(getComputedStyle(e).backgroundColor);
      if (a === 1) return [r, g, b];
      if (a > 0) return null;
    }
    return parse(getComputedStyle(document.body).backgroundColor);
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let texts = 0;
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !isShown(element) || element.closest(".hidden, option, script")) continue;
    const back = background(element);
    if (!back) continue;
    texts += 1;
    const [one, two] = [light(parse(getComputedStyle(element).color)), light(back)];
    const ratio = (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
    if (ratio < 4.5) say("a contrast of " + ratio.toFixed(2), element);
  }
  if (texts < 5) faults.push("only " + texts + " texts were looked at");
  return faults;
})()
