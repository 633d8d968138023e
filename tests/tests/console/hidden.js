// Hides the page while it fetches itself. Returns how many timers run after the fetch has ended: a hidden
// page needs none. Then shows the page again while it fetches itself. Returns how many timers run then.
(async () => {
  const timers = new Set();
  const [set, clear] = [window.setTimeout, window.clearTimeout];
  let answer = null;
  window.fetch = () => new Promise((resolve) => { answer = resolve; });
  window.setTimeout = (run, after) => { const id = set(run, after); timers.add(id); return id; };
  window.clearTimeout = (id) => { timers.delete(id); clear(id); };
  window.EventSource = class { close() {} addEventListener() {} };

  const pause = () => new Promise((done) => set(done, 20));
  const turn = (isHidden) => {
    Object.defineProperty(document, "hidden", { value: isHidden, configurable: true });
    document.dispatchEvent(new Event("visibilitychange"));
  };
  const begun = async () => { while (!answer) await pause(); };
  const end = async () => {
    const resolve = answer;
    answer = null;
    resolve(new Response("", { status: 500 }));
    await pause();
  };

  turn(true);
  turn(false);
  await begun();
  turn(true);
  await end();
  const whileHidden = timers.size;

  turn(false);
  await begun();
  turn(true);
  turn(false);
  await end();
  // Showing the page again asked for another fetch.
  await begun();
  await end();
  return [whileHidden, timers.size];
})()
