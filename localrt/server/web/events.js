// What happens when: keys, clicks, other windows, the start.

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  doing(submit)();
});
$("message").addEventListener("input", () => {
  fit();
  clearTimeout(typed);
  typed = setTimeout(keepDraft, 500);
});
document.addEventListener("visibilitychange", () => { if (document.hidden) keepDraft(true); });
window.addEventListener("pagehide", leaveTemporary);
$("message").addEventListener("keydown", (event) => {
  const touch = matchMedia("(pointer: coarse)").matches; // there Enter is a new line
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !touch) {
    event.preventDefault();
    doing(submit)();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (document.body.classList.contains("listing")) showList(false);
  else if (chat.editing !== null) finishEditing();
  else if (chat.answering) doing(halt)();
});
async function halt() {
  await post(here(`/answers/${chat.answering}/cancel`), {});
}
$("stop").addEventListener("click", doing(halt));
$("edit-end").addEventListener("click", finishEditing);
$("attach").addEventListener("click", () => $("files").click());
$("files").addEventListener("change", () => {
  attaching($("files").files);
  $("files").value = "";
});
$("message").addEventListener("paste", (event) => {
  if (event.clipboardData.files.length) {
    event.preventDefault();
    attaching(event.clipboardData.files);
  }
});
const box = document.querySelector(".box");
for (const name of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(name, (event) => {
    if (![...(event.dataTransfer?.types || [])].includes("Files")) return;
    event.preventDefault();
    box.classList.toggle("drop", name === "dragover");
    if (name === "drop") attaching(event.dataTransfer.files);
  });
}
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address names the conversation
  $("message").focus();
});
$("options-open").addEventListener("click", doing(openOptions));
$("sign").addEventListener("click", doing(openOptions));
optionsForm.preset.addEventListener("change", usePreset);
optionsForm.theme.addEventListener("change", () => setTheme(optionsForm.theme.value));
$("options-cancel").addEventListener("click", () => $("options").close());
$("options-save").addEventListener("click", async (event) => {
  event.preventDefault();
  if ($("more").querySelector(":invalid")) $("more").open = true;
  if (!optionsForm.reportValidity()) return;
  try {
    await saveOptions();
    $("options").close();
  } catch (error) { $("options-error").textContent = error.message; }
});
$("delete").addEventListener("click", twice(doing(async () => {
  await remove(chat.id);
  $("options").close();
})));
$("models-open").addEventListener("click", () => inModels(openModels));
$("download").addEventListener("click", () => inModels(download));
$("models").addEventListener("close", () => pulling?.abort());
$("models").querySelector("[name=name]").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault();
  inModels(download);
});
$("model").addEventListener("change", () => {
  store("model", $("model").value);
  showUsed();
});
$("new").addEventListener("click", doing(startNew));
$("new-temporary").addEventListener("click", doing(openTemporary));
$("import").addEventListener("click", () => $("import-file").click());
$("import-file").addEventListener("change", doing(async () => {
  const [file] = $("import-file").files;
  $("import-file").value = "";
  await importFile(file);
}));
let typing = 0;
$("search").addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(doing(list), 150);
});
$("earlier").addEventListener("click", doing(earlier));
new IntersectionObserver((entries) => {
  if (entries[0].isIntersecting && $("scroller").scrollTop < 400) doing(earlier)();
}, { root: $("scroller"), rootMargin: "200px 0px 0px 0px" }).observe($("earlier"));
$("scroller").addEventListener("scroll", () => { $("down").hidden = atEnd(); });
$("down").addEventListener("click", toEnd);
function showList(shown) {
  document.body.classList.toggle("listing", shown);
  $("side-open").setAttribute("aria-expanded", String(shown));
  $(shown ? "side-close" : "side-open").focus();
}
$("side-open").addEventListener("click", () => showList(true));
$("side-close").addEventListener("click", () => showList(false));
$("shade").addEventListener("click", () => showList(false));
window.addEventListener("hashchange", () => {
  const id = location.hash.slice(1);
  if (id !== chat.id) doing(open)(id);
});
const POLL_MS = 2500;
// Shows what other windows, and the terminal app, have written.
setInterval(async () => {
  if (document.hidden || chat.answering || chat.loading || !chat.about || chat.editing !== null) return;
  const about = await api(here()).catch(() => null);
  if (!about || about.id !== chat.id || chat.answering || chat.loading || about.updated === chat.seen) return;
  await load({ branch: chat.items.at(-1)?.id }).catch(() => {});
  await list().catch(() => {});
}, POLL_MS);

document.documentElement.dataset.theme = stored("theme") || "";
const start = doing(async () => {
  await Promise.all([loadModels(), list(), loadPresets(), open(location.hash.slice(1))]);
  chooseDefault();
  choose(chat.about?.model);
  showUsed();
  await loadTools();
});
start();
