// What the page does: one conversation at a time, kept by the server.

const PART = 30; // items that are fetched and shown at a time
// A reverse proxy may serve the page below a path, and another server's page beside it.
const BASE = location.pathname.replace(/\/+$/, "");
const stored = (name) => { try { return localStorage.getItem(`localrt${BASE}.${name}`); } catch { return null; } };
const store = (name, value) => { try { localStorage.setItem(`localrt${BASE}.${name}`, value); } catch { /* private mode */ } };

const chat = {
  id: "", // of the open conversation; "" for a new one
  about: null, // the conversation without its items
  items: [], // those shown, oldest first
  seen: 0, // when the items that are shown were changed last
  more: false, // whether there are earlier ones
  models: [],
  files: [], // attached to the message
  editing: null, // the id of the item before the edited message
  answering: "", // the id of the answer that is followed
  draft: {}, // options of a new conversation
  loads: 0, // goes up with every load: what an earlier one brings comes too late
  loading: 0, // how many loads there are now
  visit: 0, // goes up with every conversation that is opened
};

try { chat.draft = JSON.parse(stored("options") || "{}"); } catch { /* as if there were none */ }

// -- the server

const refused = (message, status) => Object.assign(new Error(message), { status });

async function send(path, { method = "GET", body, signal } = {}) {
  const headers = body === undefined ? {} : { "Content-Type": "application/json" };
  const key = stored("key");
  if (key) headers.Authorization = `Bearer ${key}`;
  let answer;
  const url = `${location.origin}${BASE}/${path}`;
  try {
    answer = await fetch(url, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw refused("The server does not answer: is it still running?", 0);
  }
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => ({}));
  if (answer.status === 401 && !$("asking").open) $("asking").showModal();
  throw refused(told.error?.message || `The server refused this (${answer.status})`, answer.status);
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

// -- the list of conversations

const DAYS = [[1, "Today"], [2, "Yesterday"], [7, "This week"], [31, "This month"], [Infinity, "Earlier"]];

async function list() {
  const search = $("search").value.trim();
  const found = await api(`v1/conversations?search=${encodeURIComponent(search)}`);
  const mine = found.data.find((one) => one.id === chat.id);
  if (mine && chat.about) chat.about.title = mine.title;
  showTitle();
  const midnight = new Date().setHours(24, 0, 0, 0);
  const groups = new Map();
  for (const one of found.data) {
    const days = (midnight - one.updated * 1000) / 86400000;
    const name = search ? "Found" : DAYS.find(([most]) => days <= most)[1];
    groups.set(name, [...(groups.get(name) || []), one]);
  }
  const shown = [...groups].flatMap(([name, ones]) => [
    h("li", {}, h("h2", {}, name), h("ul", {}, ...ones.map((one) => h("li", {}, h("a", {
      href: `#${one.id}`, "aria-current": one.id === chat.id ? "page" : null, title: one.title,
    }, one.title || "Without a title", one.snippet ? h("small", {}, one.snippet) : null)))))]);
  $("list").replaceChildren(...shown);
  if (!found.data.length) $("list").append(h("li", {}, h("p", {}, search ? "Nothing found." : "No conversations yet.")));
}

// -- one conversation

const acts = {
  edit: doing(edit),
  again: doing(again),
  show: doing(async (id) => {
    const { visit } = chat;
    chat.loading++; // so that no other begins, which would bring the branch before
    try {
      await post(here(), { shown: id });
      if (visit === chat.visit) await load({ branch: id });
    } finally { chat.loading--; }
  }),
  pictures: async (item) => {
    const whole = await api(here(`/items/${item.id}`));
    return whole.pictures.map((picture) => picture.url);
  },
};

async function open(id) {
  chat.visit++;
  Object.assign(chat, { id, about: null, items: [], more: false, answering: "" });
  follower?.abort();
  setBusy(false);
  finishEditing();
  warn(null);
  draw();
  document.body.classList.remove("listing");
  for (const link of $("list").querySelectorAll("a")) link.ariaCurrent = link.hash === `#${id}` ? "page" : null;
  if (id) await load({ end: true });
  if (matchMedia("(pointer: fine)").matches) $("message").focus();
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
  draw(end);
  const open = chat.items.find((item) => item.state === "writing");
  if (open) follow(open).catch(warn);
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
    const text = JSON.stringify(item);
    let made = old.get(item.id);
    const growingNow = item.id === chat.answering && made?.matches("[aria-busy], .asked");
    if (!growingNow && (!made || shownAs.get(made) !== text)) {
      const fresh = drawn(item, acts);
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
  $("options-open").disabled = Boolean(chat.id && !chat.about); // not known yet
  showUsed();
  if (end || wasAtEnd) toEnd();
}

function showTitle() {
  const title = chat.about?.title || "New chat";
  $("title").textContent = title;
  document.title = `${title} · localrt`;
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

async function answerTo(id) {
  const item = await post(here("/answers"), askedOf($("model").value, id));
  chat.items.push(item);
  outdate();
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
  const old = $("log").querySelector(`[data-id="${item.id}"]`);
  if (old) old.replaceWith(made);
  else $("log").append(made);
  setBusy(true);
  toEnd();
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
    const more = isCall || whole.calls; // calls, and what follows them
    chat.answering = more ? item.id : "";
    draw();
    if (more) return await load({ branch: whole.id });
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
  const answer = await send(path, { signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) yield JSON.parse(part.replace(/^data: /, ""));
  }
}

function setBusy(busy) {
  const focused = document.activeElement === (busy ? $("send") : $("stop"));
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  if (focused) $(busy ? "stop" : "message").focus();
}

async function again(item) {
  const at = await placeOf(item);
  if (at < 1) return;
  chat.items = chat.items.slice(0, at);
  draw();
  await answerTo(chat.items[at - 1].id);
}
