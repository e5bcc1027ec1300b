// The options of a chat, presets, and the page's theme.

let asked = null; // how to ask for each option
const FIRST = ["temperature", "max_tokens", "thinking"]; // have fields of their own
const optionsForm = $("options").querySelector("form");
let presets = [];

async function openOptions() {
  const form = optionsForm;
  if (!asked) {
    asked = (await api("v1/options")).data;
    $("more").lastElementChild.append(...asked.filter(({ name }) => !FIRST.includes(name)).map(fieldOf));
  }
  const { options = {}, instructions = "" } = chat.about || chat.draft;
  $("options-title").textContent = chat.id ? "Options of this chat" : "Options of new chats";
  form.elements.title.value = chat.about?.title || "";
  form.elements.title.disabled = !chat.id;
  form.instructions.value = instructions || "";
  form.preset.value = form.preset_name.value = "";
  form.theme.value = stored("theme") || "";
  fill(options);
  form.tools.checked = options.tool_choice !== "none";
  $("options-error").textContent = "";
  $("delete").textContent = "Delete this chat";
  $("options").showModal();
  loadTools();
}

function fieldOf({ name, help, kind, min, max, step, choices }) {
  const given = { name, placeholder: "default" };
  const shown = (value) => ({ true: "on", false: "off" })[value] || value;
  const field = kind === "number" ? h("input", { ...given, type: "number", min, max, step })
    : kind === "choice" ? h("select", { name }, h("option", { value: "" }, "default"), ...choices.map((one) => h("option", { value: String(one) }, shown(one))))
      : h("textarea", { ...given, rows: 1 });
  return h("label", {}, name, field, h("small", {}, help));
}

const asText = (value) => (typeof value === "object" && value !== null ? JSON.stringify(value) : String(value ?? ""));

const optionFields = () => [...optionsForm.elements].filter((field) => asked.some(({ name }) => name === field.name));

function fill(options) {
  for (const field of optionFields()) field.value = asText(options[field.name]);
}

function valueOf({ name, value, type }) {
  if (value === "") return null;
  if (type === "number") return Number(value);
  if (type === "select-one") return { true: true, false: false }[value] ?? value;
  const isJson = asked.find((one) => one.name === name).kind === "json";
  try { return isJson ? JSON.parse(value) : value; } catch { return value; }
}

async function saveOptions() {
  const options = { ...(chat.about || chat.draft).options };
  for (const field of optionFields()) options[field.name] = valueOf(field);
  if (!optionsForm.tools.checked) options.tool_choice = "none";
  else if (options.tool_choice === "none") options.tool_choice = null;
  const changes = { instructions: optionsForm.instructions.value, options };
  const name = optionsForm.preset_name.value.trim();
  if (name) await post("v1/presets", { ...changes, name });
  if (chat.id) {
    chat.about = await post(here(), { ...changes, title: optionsForm.elements.title.value.trim() });
    await list();
  } else {
    await post("v1/options", { options });
    chat.draft = changes;
    store("options", JSON.stringify(changes));
  }
  if (name) await loadPresets();
  draw();
}

// The presets, and the options of new chats: those of this browser, or else of the app's settings.
async function loadPresets() {
  const found = await api("v1/presets").catch(() => ({ data: [], default: {} }));
  presets = found.data;
  const first = h("option", { value: "" }, presets.length ? "choose one" : "none yet");
  optionsForm.preset.replaceChildren(first, ...presets.map(({ name }) => h("option", {}, name)));
  try { chat.draft = JSON.parse(stored("options")) || found.default; } catch { chat.draft = found.default; }
  if (!chat.id) draw();
}

function usePreset() {
  const preset = presets.find(({ name }) => name === optionsForm.preset.value);
  if (!preset) return;
  fill(preset.options);
  if (preset.instructions !== null) optionsForm.instructions.value = preset.instructions;
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  store("theme", theme);
}
