"use strict";
// How a conversation looks. HTML comes from the server alone, made of Markdown; all else is text.

const $ = (id) => document.getElementById(id);

function h(tag, given = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child != null && child !== false));
  return made;
}

function icon(name) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `#i-${name}`);
  made.append(use);
  made.setAttribute("aria-hidden", "true");
  return made;
}

function button(name, label, act) {
  return h("button", { class: "icon", type: "button", "aria-label": label, title: label, onclick: act }, icon(name));
}

// Further buttons behind one: their texts, and what they do.
function menu(label, entries) {
  const buttons = entries.map(([text, act]) => h("button", { type: "button", onclick: act }, text));
  return h("details", { class: "menu", name: "menu" }, h("summary", { class: "icon", "aria-label": label, title: label }, icon("more")), h("div", {}, ...buttons));
}

// What a button does at its second click; the first asks, until the focus leaves it.
const SURE = "Delete it for good?";
const twice = (work) => ({ currentTarget: asked }) => {
  if (asked.textContent === SURE) return work();
  const text = asked.textContent;
  asked.textContent = SURE;
  asked.addEventListener("blur", () => { asked.textContent = text; }, { once: true });
};

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // pages of other machines, without TLS, may not use it
    const area = h("textarea", { class: "hidden", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

// -- what a model writes

// The blocks of `html` that differ from those shown; the others stay, with selections in them.
const sources = new WeakMap();
function patch(box, html) {
  const parsed = h("template");
  parsed.innerHTML = html;
  const fresh = [...parsed.content.children].map((block) => [block, block.outerHTML]);
  const shown = [...box.children];
  let same = 0;
  while (same < fresh.length && same < shown.length && sources.get(shown[same]) === fresh[same][1]) same++;
  for (const block of shown.slice(same)) block.remove();
  for (const [block, source] of fresh.slice(same)) {
    const whole = h("div", {}, block);
    for (const link of whole.querySelectorAll("a")) {
      link.target = "_blank";
      link.rel = "noopener noreferrer nofollow";
    }
    for (const inner of whole.querySelectorAll("pre, table, math[display=block]")) {
      const place = document.createComment("");
      inner.replaceWith(place);
      place.replaceWith(inner.tagName === "PRE" ? framed(inner) : h("div", { class: "table", tabindex: "0" }, inner));
    }
    const made = whole.firstChild;
    sources.set(made, source);
    box.append(made);
  }
}

function framed(pre) {
  const code = pre.querySelector("code");
  const language = (code?.className.match(/language-(\S+)/) || [])[1] || "code";
  pre.setAttribute("tabindex", "0");
  const said = h("span", {}, "Copy");
  const act = async () => {
    await copy(pre.textContent);
    said.textContent = "Copied";
    setTimeout(() => { said.textContent = "Copy"; }, 1500);
  };
  const top = h("div", { class: "top" }, h("span", {}, language),
    h("button", { type: "button", onclick: act, "aria-label": `Copy ${language}` }, icon("copy"), said));
  return h("div", { class: "code" }, top, pre);
}

// An answer in `made`; the function returned shows the parts of its HTML from `first` on, and `before` returns those
// that precede a part, when one scrolls there. Text that is selected stays selected.
function partsOf(made, writing, before) {
  const thoughts = h("details", { class: "thinking" }, h("summary"), h("div", {}, ""));
  const body = h("div", { class: "body md" });
  const boxes = []; // of the parts, by their numbers
  const show = (first, html) => html.forEach((source, at) => {
    let box = boxes[first + at];
    if (!box) {
      box = boxes[first + at] = h("div", { class: "part" });
      body.insertBefore(box, boxes.find((next, number) => next && number > first + at) || null);
    }
    if (sources.get(box) !== source) patch(box, source);
    sources.set(box, source);
  });
  const reach = async (first) => {
    if (!first || !before) return;
    const edge = h("div", { class: "edge" });
    body.prepend(edge);
    await new Promise((reached) => {
      const seen = new IntersectionObserver((entries) => {
        if (!entries[0].isIntersecting) return;
        seen.disconnect();
        reached();
      }, { root: $("scroller"), rootMargin: "1000px 0px" });
      seen.observe(edge);
    });
    const above = await before(first);
    const below = $("scroller").scrollHeight - $("scroller").scrollTop;
    edge.remove();
    show(above.first, above.html);
    $("scroller").scrollTop = $("scroller").scrollHeight - below;
    await reach(above.first);
  };
  made.append(body);
  return ({ thinking, html, first }) => {
    const text = thoughts.lastChild.firstChild;
    if (thinking.startsWith(text.data)) text.appendData(thinking.slice(text.data.length));
    else text.data = thinking;
    if (thinking && !thoughts.parentNode) body.before(thoughts);
    thoughts.firstChild.textContent = writing && !html.length ? "Thinking…" : "Thoughts";
    show(first, html);
    for (const box of boxes.splice(first + html.length)) box.remove();
    reach(first).catch(warn);
  };
}

// -- messages

const NOTES = { cut: "cut off: the app ended here", cancelled: "stopped", failed: "failed" };

function noteOf(item) {
  if (item.state === "failed" && item.info.error) return [item.info.error, true];
  if (NOTES[item.state]) return [NOTES[item.state], item.state !== "cancelled"];
  if (item.info.finish_reason === "length") return [item.info.ways ? "cut off: the context is full" : "cut off at the limit of tokens", false];
  return ["", false];
}

// A user's text with its files as labels: folds count characters, and not halves of them.
function piecesOf(item) {
  const characters = [...item.text];
  const pieces = [];
  let last = 0;
  for (const [start, end, label] of item.folds) {
    pieces.push({ text: characters.slice(last, start).join("") });
    pieces.push({ text: characters.slice(start, end).join(""), label: String(label) });
    last = end;
  }
  return [...pieces, { text: characters.slice(last).join("") }].filter((piece) => piece.text);
}

// Whether an answer did not come to its end.
function isOpen(item) {
  const { finish_reason: reason, edited, ways } = item.info;
  const ended = ["cancelled", "cut", "failed"].includes(item.state) || reason === "length" || edited;
  return ended && !ways && !item.calls && Boolean(item.text || item.thinking);
}

// `acts` has what the buttons do: edit, again, show (a branch), picture, and so on; `last`: nothing follows.
function drawn(item, acts, last) {
  if (item.role === "tool") return drawnCall(item);
  const mine = item.role === "user";
  const made = h("article", { class: item.role, "data-id": item.id, "aria-label": mine ? "You" : "Answer" });
  const bar = h("div", { class: "bar" });
  if (mine) {
    if (item.pictures.length) made.append(picturesOf(item, acts));
    const pieces = piecesOf(item);
    if (pieces.length) {
      made.append(h("div", { class: "body" }, ...pieces.map((piece) =>
        piece.label ? h("span", { class: "file", title: piece.text.slice(0, 2000) }, piece.label) : piece.text.replace(/\n\n$/, "\n"))));
    }
  } else {
    partsOf(made, false, (first) => acts.before(item, first))(item);
  }
  const others = item.alternatives;
  if (others.length > 1) {
    const at = others.indexOf(item.id);
    const turn = (step) => () => acts.show(others[(at + step + others.length) % others.length]);
    bar.append(button("left", "Show the branch before", turn(-1)),
      h("span", {}, `${at + 1}/${others.length}`), button("right", "Show the next branch", turn(1)));
  }
  bar.append(button("copy", mine ? "Copy the message" : "Copy the answer", () => copy(item.text)));
  if (!item.calls) bar.append(button("edit", mine ? "Edit the message" : "Edit the answer", () => acts.edit(item)));
  bar.append(mine ? "" : button("again", "Answer again", () => acts.again(item)));
  if (!mine && last && isOpen(item)) bar.append(h("button", { class: "text", type: "button", onclick: () => acts.goOn(item) }, "Continue"));
  bar.append(menu("More", [["Fork", () => acts.fork(item)], ["Delete from here", twice(() => acts.remove(item))]]));
  const [note, bad] = noteOf(item);
  const speed = item.info.tok_s ? `${item.info.tok_s.toFixed(1)} tokens/s` : "";
  if (note) bar.append(h("span", { class: bad ? "note bad" : "note" }, note));
  if (speed) bar.append(h("span", { class: "note", title: `${item.info.tokens} tokens` }, speed));
  if (last && item.info.ways) {
    bar.append(h("div", { class: "ways" }, ...item.info.ways.map(([name, label, ctx]) =>
      h("button", { type: "button", onclick: () => acts.way(item, name, ctx) }, label))));
  }
  made.append(bar);
  return made;
}

function picturesOf(item, acts) {
  const images = item.pictures.map(({ name }) => h("img", { alt: name || "A picture" }));
  acts.pictures(item).then((urls) => urls.forEach((url, at) => { if (images[at]) images[at].src = url; }), () => {});
  return h("div", { class: "pictures" }, ...images);
}

function drawnCall(item) {
  const notes = { refused: "not allowed", stopped: "stopped", failed: "failed" };
  const states = { ...NOTES, writing: "waits", cut: "the app ended before this call did" };
  const note = notes[item.info.ending] || states[item.state] || "";
  const line = `${item.info.title || "tool"} ${item.info.arguments || ""}`.trim();
  return h("article", { "data-id": item.id, "aria-label": "Call of a tool" },
    h("details", { class: "call" }, h("summary", {}, note ? `${line} (${note})` : line), h("div", {}, item.text)));
}

// A call that waits for the user or runs: `update` shows its item, all of it as text.
function openCall(item, decide) {
  const made = h("article", { class: "asked", "data-id": item.id, "aria-label": "Call of a tool" });
  const update = ({ info, open }) => {
    const [focused, stay] = [made.contains(document.activeElement), atEnd()];
    const { title = "tool", arguments: given = "", asks } = open || info;
    const line = asks ? `The model wants to run ${title}` : `${title} ${asks === false ? "runs" : "waits"}`;
    if (made.firstChild?.textContent === line) return;
    say(line);
    const choices = asks ? [["once", "Allow once"], ["always", "Always in this chat"], ["refuse", "Deny"]] : [];
    made.replaceChildren(h("p", {}, line), h("pre", { tabindex: "0" }, given), ...choices.map(([decision, text]) =>
      h("button", { type: "button", "aria-label": `${text}: ${title}`, onclick: () => decide(decision) }, text)));
    if (focused && !asks) $("stop").focus();
    if (stay) made.scrollIntoView({ block: "end" });
  };
  update(item);
  return { made, update };
}

// An answer while it is written: `update` shows an event, `made` is its element.
function growing(item) {
  const made = h("article", { class: "assistant", "data-id": item.id, "aria-label": "Answer", "aria-busy": "true" });
  const wait = h("div", { class: "wait" }, h("i"), h("i"), h("i"));
  const rate = h("span", { class: "note" });
  const show = partsOf(made, true);
  made.append(wait, h("div", { class: "bar" }, rate));
  const update = (told) => {
    show(told);
    wait.hidden = Boolean(told.html.length);
    rate.textContent = told.tok_s ? `${told.tok_s.toFixed(1)} tokens/s` : "";
  };
  return { made, update };
}
