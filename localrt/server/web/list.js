// The list of conversations, and what is done to one of them there.

const DAYS = [[1, "Today"], [2, "Yesterday"], [7, "This week"], [31, "This month"], [Infinity, "Earlier"]];

async function list() {
  const search = $("search").value.trim();
  const found = await api(`v1/conversations?search=${encodeURIComponent(search)}`);
  if (found.problem || chat.problem) warn(found.problem);
  chat.problem = found.problem;
  const mine = found.data.find((one) => one.id === chat.id);
  if (mine && chat.about) chat.about.title = mine.title;
  showTitle();
  const midnight = new Date().setHours(24, 0, 0, 0);
  const groups = new Map();
  for (const one of found.data) {
    const days = (midnight - one.updated * 1000) / 86400000;
    const name = search ? "Found" : one.pinned ? "Pinned" : DAYS.find(([most]) => days <= most)[1];
    groups.set(name, [...(groups.get(name) || []), one]);
  }
  $("list").replaceChildren(...[...groups].map(([name, ones]) =>
    h("li", {}, h("h2", {}, name), h("ul", {}, ...ones.map(listed)))));
  if (!found.data.length) $("list").append(h("li", {}, h("p", {}, search ? "Nothing found." : "No conversations yet.")));
}

function listed(one) {
  const title = one.title || "Without a title";
  const link = h("a", {
    href: `#${one.id}`, "aria-current": one.id === chat.id ? "page" : null, title: one.title,
  }, title, one.snippet ? h("small", {}, one.snippet) : null);
  const change = doing(async (changes) => {
    await post(here("", one.id), changes);
    await list();
  });
  return h("li", {}, link, menu(`More about ${title}`, [
    ["Rename", () => rename(link, one.title, (name) => change({ title: name }))],
    [one.pinned ? "Unpin" : "Pin", () => change({ pinned: !one.pinned })],
    ["Export as Markdown", doing(() => exportAs(one, "md"))],
    ["Export as JSON", doing(() => exportAs(one, "json"))],
    ["Delete", twice(doing(() => remove(one.id)))],
  ]));
}

// Puts a field for the title in the place of a link. Enter keeps it, Escape does not.
function rename(link, title, keep) {
  const field = h("input", { "aria-label": "Title", maxlength: "200", value: title });
  let ended = false; // removing the field blurs it
  const end = (kept) => {
    if (ended) return;
    ended = true;
    field.replaceWith(link);
    if (kept && field.value.trim() !== title) keep(field.value.trim());
  };
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== "Escape") return;
    event.stopPropagation();
    end(event.key === "Enter");
    link.focus();
  });
  field.addEventListener("blur", () => end(true));
  link.replaceWith(field);
  field.select();
}

async function remove(id) {
  await api(here("", id), { method: "DELETE" });
  if (id === chat.id) location.hash = "";
  await list();
}

async function exportAs({ id, title }, form) {
  const answer = await send(here(`/export?form=${form}`, id));
  const url = URL.createObjectURL(await answer.blob());
  const name = title.replace(/[^\p{L}\p{N} ._-]+/gu, "-").slice(0, 60) || "chat";
  h("a", { href: url, download: `${name}.${form}` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

async function importFile(file) {
  const given = { filename: file.name, file_data: await dataUrl(file) };
  const { data, left_out: lost } = await post("v1/conversations/import", given);
  if (data.length) {
    history.pushState(null, "", `#${data[0].id}`);
    await open(data[0].id);
  }
  await list();
  say(`Conversations imported: ${data.length}`);
  warn(lost.length ? `Left out: ${lost.join("; ")}` : null);
}
