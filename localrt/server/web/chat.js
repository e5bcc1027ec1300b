// What the page does: one conversation at a time, kept by the server.

const PART = 30; // items that are fetched and shown at a time
// A reverse proxy may serve the page below a path, and another server's page beside it.
const BASE = location.pathname.replace(/\/+$/, "");
const stored = (name) => { try { return localStorage.getItem(`localrt${BASE}.${name}`); } catch { return null; } };
function store(name, value) { // "" keeps nothing
  try {
    if (value) localStorage.setItem(`localrt${BASE}.${name}`, value);
    else localStorage.removeItem(`localrt${BASE}.${name}`);
  } catch { /* private mode */ }
}

const chat = {
  id: "", // of the open conversation; "" for a new one
  about: null, // the conversation without its items
  items: [], // those shown, oldest first
  seen: 0, // when the items that are shown were changed last
  more: false, // whether there are earlier ones
  models: [],
  files: [], // attached to the message
  unsent: "", // the message as it was kept last
  editing: null, // the id of the item before the edited message, or that of the edited answer
  rewriting: false, // whether it is an answer
  answering: "", // the id of the answer that is followed
  draft: {}, // options of a new conversation
  loads: 0, // goes up with every load: what an earlier one brings comes too late
  loading: 0, // how many loads there are now
  visit: 0, // goes up with every conversation that is opened
  opened: null, // resolved when its items are here
};

// -- the server

const refused = (message, status) => Object.assign(new Error(message), { status });

async function send(path, { method = "GET", body, signal, keepalive } = {}) {
  const headers = body === undefined ? {} : { "Content-Type": "application/json" };
  const key = stored("key");
  if (key) headers.Authorization = `Bearer ${key}`;
  let answer;
  const url = `${location.origin}${BASE}/${path}`;
  try {
    answer = await fetch(url, { method, headers, signal, keepalive, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw refused("The server does not answer: is it still running?", 0);
  }
  if (answer.ok) return answer;
  if (answer.status === 401) {
    if (key !== stored("key")) return send(path, { method, body, signal, keepalive }); // another was given meanwhile
    if (!$("asking").open) $("asking").showModal();
  }
  const told = await answer.json().catch(() => ({}));
  const error = told.error?.message || told.error; // Ollama's is a text
  throw refused(error || `The server refused this (${answer.status})`, answer.status);
}

const api = async (path, given) => (await send(path, given)).json();
const post = (path, body) => api(path, { method: "POST", body });
const here = (rest = "", id = chat.id) => `v1/conversations/${encodeURIComponent(id)}${rest}`;

$("asking").addEventListener("close", () => {
  store("key", $("asking").querySelector("input").value.trim());
  start();
});

function say(text) { $("status").textContent = text; }

function warn(error) {
  if (error?.name === "AbortError") return;
  const text = error ? String(error.message || error) : "";
  $("notice").hidden = !text;
  $("notice").textContent = text;
}

// Runs `work` of a button, and shows its error.
const doing = (work) => async (...given) => {
  try {
    warn(null);
    await work(...given);
  } catch (error) { warn(error); }
};

// -- one conversation

const acts = {
  edit: doing(edit),
  again: doing(again),
  goOn: doing(goOn),
  way: doing(takeWay),
  fork: doing(async (item) => {
    const { id } = await post(here(`/items/${item.id}/fork`), {});
    if (chat.about.temporary) return open(id);
    await list();
    location.hash = id;
  }),
  remove: doing(async (item) => {
    follower?.abort();
    await showBranch(async () => { await api(here(`/items/${item.id}`), { method: "DELETE" }); });
    await list();
  }),
  show: doing((id) => showBranch(async () => {
    await post(here(), { shown: id });
    return id;
  })),
  before: (item, first) => api(here(`/items/${item.id}?before=${first}`)),
  pictures: async (item) => {
    const whole = await api(here(`/items/${item.id}`));
    return whole.pictures.map((picture) => picture.url);
  },
};

async function open(id) {
  finishEditing();
  keepDraft();
  leaveTemporary();
  chat.visit++;
  Object.assign(chat, { id, about: null, items: [], more: false, answering: "", files: [] });
  follower?.abort();
  setBusy(false);
  warn(null);
  $("message").value = chat.unsent = "";
  showDraft(stored(`draft.${id}`));
  draw();
  document.body.classList.remove("listing");
  for (const link of $("list").querySelectorAll("a")) link.ariaCurrent = link.hash === `#${id}` ? "page" : null;
  drawFiles();
  if (matchMedia("(pointer: fine)").matches) $("message").focus(); // what is typed meanwhile is not lost
  await (chat.opened = id && load({ end: true }));
}

// Reads the last part of the conversation; `branch` is an item of the branch to be shown.
async function load({ branch, end = false } = {}) {
  const visit = chat.visit;
  const mine = ++chat.loads;
  const at = branch ? `&branch=${branch}` : "";
  const count = Math.max(PART, chat.items.length);
  const about = await api(here()); // first: what is written after it shows as a change
  const page = await api(here(`/items?limit=${count}${at}`));
  if (visit !== chat.visit || mine !== chat.loads) return;
  Object.assign(chat, { about, seen: about.updated, items: page.data, more: page.more });
  if (end) choose(about.model);
  if (end) showDraft(about.draft);
  draw(end);
  const open = chat.items.find((item) => item.state === "writing");
  if (open) follow(open).catch(warn);
}

// Loads the branch that `work` returns an item of. No other load begins meanwhile: it would bring the branch before.
async function showBranch(work) {
  const { visit } = chat;
  chat.loading++;
  try {
    const branch = await work();
    if (visit === chat.visit) await load({ branch });
  } finally { chat.loading--; }
}

// A conversation that is in the server's memory until the page leaves it.
async function openTemporary() {
  const { id } = await post("v1/conversations", { ...chat.draft, temporary: true });
  history.replaceState(null, "", location.pathname);
  await open(id);
}

function leaveTemporary() {
  if (chat.about?.temporary) api(here(), { method: "DELETE", keepalive: true }).catch(() => {});
}

// What is being loaded was read before a change here: it comes too late.
function outdate() {
  if (chat.about) chat.loads++;
}

function choose(name) {
  if (chat.models.some((one) => one.id === name)) $("model").value = name;
}

async function earlier() {
  const first = chat.items[0];
  const visit = chat.visit;
  if (!first || !chat.more) return;
  const branch = chat.items.at(-1).id;
  const page = await api(here(`/items?limit=${PART}&before=${first.id}&branch=${branch}`));
  if (visit !== chat.visit || chat.items[0]?.id !== first.id) return;
  chat.items = [...page.data, ...chat.items];
  chat.more = page.more;
  const before = $("scroller").scrollHeight - $("scroller").scrollTop;
  draw();
  $("scroller").scrollTop = $("scroller").scrollHeight - before;
}

// Where an item is now, with the one before it loaded.
async function placeOf(item) {
  if (chat.items[0]?.id === item.id) await earlier();
  const at = chat.items.findIndex((one) => one.id === item.id);
  if (at < 0 || (at === 0 && chat.more)) throw new Error("The conversation has changed: try again.");
  return at;
}

// Shows `chat.items`: an item that has not changed keeps its element.
const shownAs = new WeakMap();
function draw(end = false) {
  const wasAtEnd = atEnd();
  const old = new Map([...$("log").children].map((made) => [made.dataset.id, made]));
  let place = $("log").firstChild;
  for (const item of chat.items) {
    const last = item === chat.items.at(-1);
    const text = JSON.stringify([item, last]);
    let made = old.get(item.id);
    const growingNow = item.id === chat.answering && made?.matches("[aria-busy], .asked");
    if (!growingNow && (!made || shownAs.get(made) !== text)) {
      const fresh = drawn(item, acts, last);
      shownAs.set(fresh, text);
      if (made) {
        if (place === made) place = fresh;
        made.replaceWith(fresh);
      }
      made = fresh;
    }
    old.delete(item.id);
    if (place === made) place = made.nextSibling;
    else $("log").insertBefore(made, place);
  }
  for (const made of old.values()) made.remove();
  showTitle();
  $("earlier").hidden = !chat.more;
  $("welcome").hidden = Boolean(chat.id);
  $("delete").hidden = !chat.id;
  const { instructions } = chat.about || (chat.id ? {} : chat.draft);
  $("sign").hidden = !instructions;
  $("sign").textContent = `System prompt: ${instructions}`;
  $("temporary").hidden = !chat.about?.temporary;
  document.body.classList.toggle("unkept", Boolean(chat.about?.temporary));
  $("options-open").disabled = Boolean(chat.id && !chat.about); // not known yet
  showUsed();
  if (end || wasAtEnd) toEnd();
}

function showTitle() {
  const neutral = chat.about?.temporary ? "Temporary chat" : "New chat";
  const title = chat.about?.title || neutral;
  $("title").textContent = title;
  document.title = `${chat.about?.temporary ? neutral : title} · localrt`; // browsers keep it
}

function showUsed(tokens) {
  const last = chat.items.findLast?.((item) => item.info?.context);
  const used = tokens ?? last?.info.context[0];
  const model = chat.models.find((one) => one.id === $("model").value);
  const most = model?.max_model_len || model?.meta?.n_ctx_train;
  const share = most ? ` of ${most.toLocaleString("en")}` : "";
  $("used").textContent = used ? `${used.toLocaleString("en")}${share} tokens used` : "";
}

function atEnd() {
  const box = $("scroller");
  return box.scrollHeight - box.scrollTop - box.clientHeight < 80;
}

function toEnd() {
  $("scroller").scrollTop = $("scroller").scrollHeight;
}

// -- answers

let follower = null; // ends the following of an answer

async function answerTo(id, before = chat.items, more = {}) {
  const item = await post(here("/answers"), { ...askedOf($("model").value, id), ...more });
  chat.items = [...before, item];
  outdate();
  draw();
  follow(item).catch(warn);
  list().catch(() => {});
}

const askedOf = (model, after) => ({ after, model: model || null, tools: !$("tools").hidden });

async function follow(item) {
  if (chat.answering === item.id) return;
  follower?.abort();
  const ending = follower = new AbortController();
  const visit = chat.visit;
  const mine = () => visit === chat.visit && !ending.signal.aborted;
  chat.answering = item.id;
  const decide = doing((decision) => post(here(`/answers/${item.id}/decision`), { decision }));
  const isCall = item.role === "tool";
  const { made, update } = isCall ? openCall(item, decide) : growing(item);
  let failed = "";
  const old = $("log").querySelector(`[data-id="${item.id}"]`);
  if (old) old.replaceWith(made);
  else $("log").append(made);
  setBusy(true);
  toEnd();
  if (!isCall && item.html.length) update(item); // it is continued
  if (!isCall) say("The model answers.");
  try {
    let whole = item;
    while (mine() && whole.state === "writing") {
      try {
        if (isCall) await new Promise((done) => setTimeout(done, 300));
        else for await (const told of events(here(`/answers/${item.id}`), ending.signal)) {
          if (!mine()) return;
          const stay = atEnd();
          update(told);
          failed = told.error;
          if (told.context) showUsed(told.context[0]);
          if (stay) toEnd();
        }
        warn(null);
      } catch (error) { // another program writes it, or it has just ended, or the server is gone
        if (error.name === "AbortError") return;
        if (error.status !== 404) warn(error);
        await new Promise((done) => setTimeout(done, 700));
      }
      const before = whole;
      whole = await api(here(`/items/${item.id}`)).catch((error) => (error.status === 404 ? null : before));
      if (!whole) return mine() && warn("The conversation was deleted.");
      if (whole.state !== "writing" || !mine()) continue;
      update(whole);
    }
    if (!mine()) return;
    chat.items = chat.items.map((one) => (one.id === whole.id ? whole : one));
    made.removeAttribute("aria-busy");
    made.classList.remove("asked");
    const more = isCall || whole.calls || whole.info.summary; // and what follows them
    chat.answering = more ? item.id : "";
    draw();
    if (more) return await load({ branch: whole.id });
    if (failed && whole.state !== "failed") warn(failed); // it could not be continued, and stays
    say(noteOf(whole)[0] || `Answer: ${whole.text.slice(0, 2000)}`);
    await list().catch(() => {});
  } finally {
    if (follower === ending) {
      chat.answering = "";
      setBusy(false);
    }
  }
}

// Shows which tools there are; servers may still be starting.
async function loadTools() {
  const found = await api(`v1/tools?conversation=${chat.id}`, { method: "POST" }).catch(() => ({}));
  $("tools-list").textContent = found.text;
  $("tools").hidden = !found.text;
  if (found.starting) setTimeout(loadTools, 700);
}

// Yields the events of a stream, which are lines of JSON.
async function* events(path, signal) {
  for await (const part of partsOfBody(await send(path, { signal }), "\n\n")) yield JSON.parse(part.replace(/^data: /, ""));
}

async function* partsOfBody(answer, between) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split(between);
    text = parts.pop();
    yield* parts;
  }
}

function setBusy(busy) {
  const focused = document.activeElement === (busy ? $("send") : $("stop"));
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  if (focused) $(busy ? "stop" : "message").focus();
}

async function again(item, more) {
  const at = await placeOf(item);
  if (at > 0) await answerTo(chat.items[at - 1].id, chat.items.slice(0, at), more);
}

async function goOn(item, more) {
  const open = await post(here("/answers"), { ...askedOf($("model").value), continued: item.id, ...more });
  chat.items = chat.items.map((one) => (one.id === open.id ? open : one));
  outdate();
  follow(open).catch(warn);
}

// What to do about a full context: `name` is one of `item.info.ways`.
async function takeWay(item, name, ctx) {
  const at = await placeOf(item);
  const asked = chat.items.slice(0, at).findLast((one) => one.role === "user");
  if (name === "oldest") {
    chat.about = await post(here(), { options: { ...chat.about.options, overflow: "drop_oldest" } });
  }
  if (name === "oldest" || name === "longer") {
    await (item.text ? goOn : again)(item, ctx ? { ctx } : {});
  } else if (name === "summary") {
    const given = { ...askedOf($("model").value, asked.id), summary: true };
    await showBranch(async () => (await post(here("/answers"), given)).id);
  } else {
    await startNew();
    if (!item.text) $("message").value = asked.text;
    fit();
  }
}

async function startNew() {
  if (location.hash) history.pushState(null, "", location.pathname);
  await open("");
}
