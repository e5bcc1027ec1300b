// The models: the choice of one, and a dialog to load, unload and download them.

async function loadModels() {
  const found = (await api("v1/models")).data;
  const chosen = $("model").value;
  chat.models = found.filter((one) => (one.capabilities || []).includes("completion"));
  const [chats, others] = [true, false].map((chats) =>
    chat.models.filter((one) => one.chat === chats).map((one) => h("option", { value: one.id }, one.id)));
  const base = h("optgroup", { label: "Without a chat template" }, ...others);
  $("model").replaceChildren(...chats, others.length ? base : ""); // the one used last is first
  choose(chosen);
}

// Chooses the model of new chats: the one chosen last, but no base model.
function chooseDefault() {
  const name = stored("model");
  if (chat.models.some((one) => one.id === name && one.chat)) choose(name);
}

let several = null; // whether models can be loaded and unloaded; null: not asked yet

async function openModels() {
  $("models").showModal();
  $("models-said").textContent = "";
  await drawModels();
  if (several !== null) return;
  const found = await api("v1/recommended"); // a second's work
  several = found.several;
  $("downloading").hidden = !several;
  $("recommended").replaceChildren(...found.data.map((value) => h("option", { value })));
  if (several) await drawModels();
}

async function drawModels() {
  const focused = document.activeElement.dataset.model;
  await loadModels();
  showUsed();
  $("models-list").replaceChildren(...chat.models.map(({ id, status, meta }) => {
    const there = status.value !== "unloaded";
    const size = meta.size ? `${(meta.size / 1e9).toFixed(1)} GB, ` : "";
    const act = h("button", { type: "button", "data-model": id, "aria-label": `${there ? "Unload" : "Load"} ${id}`,
      onclick: ({ currentTarget }) => inModels(() => setLoaded(id, !there, currentTarget)) }, there ? "Unload" : "Load");
    return h("li", {}, h("span", {}, id, h("small", {}, `${size}${status.value}`)), several ? act : null);
  }));
  if (focused) $("models-list").querySelector(`[data-model="${CSS.escape(focused)}"]`)?.focus();
}

async function inModels(work) {
  $("models-error").textContent = "";
  try { await work(); } catch (error) {
    if (error.name !== "AbortError") $("models-error").textContent = error.message;
    await drawModels();
  }
}

async function setLoaded(model, wanted, act) {
  act.textContent = wanted ? "Loading…" : "Unloading…";
  await post("api/generate", wanted ? { model } : { model, keep_alive: 0 });
  for (let left = 20; left > 0; left--) { // one that is unloaded frees its memory step by step
    const { status } = await api(`v1/models/${model}`);
    if ((status.value !== "unloaded") === wanted) break;
    await new Promise((done) => setTimeout(done, 500));
  }
  await drawModels();
}

let pulling = null; // ends a download
async function download() {
  if (pulling) return pulling.abort();
  const field = $("models").querySelector("[name=name]");
  const model = field.value.trim();
  if (!model) return field.focus();
  pulling = new AbortController();
  $("download").textContent = "Stop";
  $("models-said").textContent = "";
  try {
    const answer = await send("api/pull", { method: "POST", body: { model }, signal: pulling.signal });
    for await (const part of partsOfBody(answer, "\n")) {
      const { error, status, completed, total } = JSON.parse(part);
      if (error) throw new Error(error);
      $("progress").hidden = !total;
      if (total) Object.assign($("progress"), { max: total, value: completed || 0 });
      $("models-said").textContent = status === "success" ? `${model} is here.` : status;
    }
    field.value = "";
    await drawModels();
  } finally {
    pulling = null;
    $("progress").hidden = true;
    $("download").textContent = "Download";
  }
}
