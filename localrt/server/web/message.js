// The message that is written, with its attachments; what is not sent yet is kept.

async function submit() {
  if ($("send").disabled) return; // the message is being sent
  $("send").disabled = true;
  try { await submitted(); } finally { $("send").disabled = false; }
}

async function submitted() {
  const written = $("message").value;
  const text = written.trim();
  const { files, visit } = chat;
  await chat.opened; // until then it is unknown what the message follows
  if (visit !== chat.visit || chat.answering || (!text && !files.length)) return;
  if (chat.rewriting) {
    return showBranch(async () => {
      const { id } = await post(here(`/items/${chat.editing}`), { text });
      finishEditing();
      return id;
    });
  }
  checkPictures();
  const model = $("model").value;
  const before = chat.editing ?? chat.items.at(-1)?.id ?? "";
  let { id } = chat;
  if (!id) {
    const about = await post("v1/conversations", { model, ...chat.draft });
    id = about.id;
    if (visit === chat.visit) {
      Object.assign(chat, { id, about });
      history.replaceState(null, "", `#${id}`);
      store("draft.", "");
    }
  }
  const added = await post(here("/items", id), { ...messageOf(text, files), after: before });
  const asked = added.id;
  if (visit !== chat.visit) { // another conversation was opened meanwhile
    await post(here("/answers", id), askedOf(model, asked));
    return;
  }
  const at = chat.items.findIndex((item) => item.id === before);
  chat.items = [...(before ? chat.items.slice(0, at + 1) : []), added];
  outdate();
  if (chat.editing !== null) finishEditing();
  else if ($("message").value === written) $("message").value = "";
  keepDraft();
  chat.files = [];
  drawFiles();
  draw(true);
  await answerTo(asked);
}

// Pictures come first, files last; a file's text is folded to its label.
function messageOf(text, files) {
  const content = [];
  const folds = [];
  let length = 0;
  const add = (piece) => {
    content.push({ text: piece });
    length += [...piece].length;
  };
  for (const file of files) {
    if (file.url) content.push({ url: file.url, name: file.name });
  }
  if (text) add(text);
  for (const file of files.filter((one) => !one.url)) {
    if (length) add("\n\n");
    const start = length;
    add(file.text);
    folds.push([start, length, file.name]);
  }
  return { content, folds };
}

const dataUrl = (file) => new Promise((done, failed) => {
  const reader = new FileReader();
  reader.onload = () => done(reader.result);
  reader.onerror = () => failed(reader.error);
  reader.readAsDataURL(file);
});

async function attach(given) {
  for (const file of given) {
    const url = await dataUrl(file);
    if (/^image\/(png|jpeg|webp|gif)$/.test(file.type)) {
      chat.files.push({ name: file.name, url });
      continue;
    }
    if (!file.size) throw new Error(`${file.name} is empty`);
    const read = await post("v1/documents", { filename: file.name, file_data: url });
    chat.files.push({ name: `${read.filename}, ${read.size}`, text: read.text });
    for (const picture of read.pictures) {
      chat.files.push({ name: read.filename, url: `data:image/jpeg;base64,${picture}` });
    }
    if (read.note) warn(read.note);
  }
  checkPictures();
}

function checkPictures() {
  const model = chat.models.find((one) => one.id === $("model").value);
  if (chat.files.some((one) => one.url) && model && !model.capabilities.includes("vision")) {
    throw new Error(`${model.id} cannot see pictures: choose another model, or remove them.`);
  }
}

const attaching = doing(async (given) => {
  try { await attach([...given]); } finally { drawFiles(); }
  $("message").focus();
});

function drawFiles() {
  $("chips").hidden = !chat.files.length;
  $("chips").replaceChildren(...chat.files.map((file) => {
    const drop = () => {
      chat.files = chat.files.filter((one) => one !== file);
      drawFiles();
      $("message").focus();
    };
    return h("li", {}, file.url ? h("img", { src: file.url, alt: "" }) : null, h("span", {}, file.name),
      button("close", `Remove ${file.name}`, drop));
  }));
  fit();
}

async function edit(item) {
  const at = await placeOf(item);
  const rewriting = item.role === "assistant";
  const { pictures, folds } = { pictures: [], folds: [], ...item };
  const urls = pictures.length ? await acts.pictures(item) : [];
  const pieces = piecesOf({ ...item, folds });
  finishEditing();
  keepDraft();
  const before = at > 0 ? chat.items[at - 1].id : "";
  Object.assign(chat, { rewriting, editing: rewriting ? item.id : before });
  $("editing-how").textContent = rewriting ? "Editing: your text becomes a branch." : "Editing: the answer begins a new branch.";
  chat.files = [...urls.map((url, place) => ({ name: pictures[place].name, url })),
    ...pieces.filter((piece) => piece.label).map((piece) => ({ name: piece.label, text: piece.text }))];
  $("message").value = pieces.filter((piece) => !piece.label).map((piece) => piece.text).join("").trim();
  $("editing").hidden = false;
  for (const one of chat.items.slice(rewriting ? at + 1 : at)) $("log").querySelector(`[data-id="${one.id}"]`)?.classList.add("off");
  drawFiles();
  $("message").focus();
}

function finishEditing() {
  if (chat.editing === null) return;
  Object.assign(chat, { editing: null, rewriting: false, files: [] });
  $("message").value = chat.unsent;
  $("editing").hidden = true;
  for (const made of $("log").querySelectorAll(".off")) made.classList.remove("off");
  drawFiles();
}

// Keeps what is written for its chat: on the server, and here until the server has it.
let typed = 0;
function keepDraft(keepalive = false) {
  clearTimeout(typed);
  const { id } = chat;
  const draft = $("message").value;
  if (draft === chat.unsent || chat.editing !== null || chat.about?.temporary) return;
  chat.unsent = draft;
  store(`draft.${id}`, draft);
  const kept = () => { if (stored(`draft.${id}`) === draft) store(`draft.${id}`, ""); };
  if (id) api(here("", id), { method: "POST", body: { draft }, keepalive }).then(kept, () => {});
}

function showDraft(text) {
  if (!text || $("message").value || chat.editing !== null) return;
  $("message").value = chat.unsent = text;
  fit();
}

function fit() {
  const box = $("message");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight}px`;
}
