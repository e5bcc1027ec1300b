// What happens when: keys, clicks, other windows, the start.

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  doing(submit)();
});
$("message").addEventListener("input", fit);
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
$("options-open").addEventListener("click", openOptions);
$("options-cancel").addEventListener("click", () => $("options").close());
$("options-save").addEventListener("click", async (event) => {
  event.preventDefault();
  if (!$("options").querySelector("form").reportValidity()) return;
  try {
    await saveOptions();
    $("options").close();
  } catch (error) { $("options-error").textContent = error.message; }
});
$("delete").addEventListener("click", doing(remove));
$("model").addEventListener("change", () => {
  store("model", $("model").value);
  showUsed();
});
$("new").addEventListener("click", () => {
  if (location.hash) location.hash = "";
  else doing(open)("");
});
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

const start = doing(async () => {
  const [models] = await Promise.all([api("v1/models"), list(), open(location.hash.slice(1))]);
  chat.models = models.data.filter((one) => (one.capabilities || []).includes("completion"));
  $("model").replaceChildren(...chat.models.map((one) => h("option", { value: one.id }, one.id)));
  choose(stored("model"));
  choose(chat.about?.model);
  showUsed();
  await loadTools();
});
start();
