// Submits a script or a folder that is dropped on the page or chosen.

import { send, upload } from "./api.js";
import { h } from "./dom.js";
import { count } from "./format.js";
import { pack } from "./tar.js";

/** The names of files that usually hold secrets: the pattern of sdk/resile/secret_files.py. */
const SECRET = /^#?(?!.*\.(?:py|pyi|pyx|c|cc|cpp|cu|cuh|h|hpp|md|pub|rst)$)(?:.*\.(?:env|env\.local|pem|key|ppk|p8|p12|pfx|pkcs12|jks|keystore|keytab|kdbx|ovpn|kubeconfig|kubeconfig\.ya?ml|tfvars|tfvars\.json|tfstate)|id_(?:rsa|dsa|ecdsa|ed25519|xmss).*|_?netrc|env\.(?:local|prod|production|staging|dev|sh)|kube[._-]?config.*|token(?:\.(?:txt|json|pickle|pkl))?|kaggle\.json|auth\.json|rootkey\.csv|.*accesskeys\.csv|tfplan|rclone\.conf|pgpass(?:\.conf)?|krb5cc.*|accesstokens\.json|msal_token_cache.*|secring.*|key4\.db|logins\.json|.*_history|client[-_]secret.*|(?:credentials?|secrets|service[-_]account)[-_. ].*|(?:.*[-_. ])?(?:credentials?|creds|(?:client[-_])?secrets?|passwords?|passwd|service[-_]account|private[-_]key|(?:api|access|auth|bearer|refresh|hf|huggingface|github|gitlab|wandb|openai|anthropic|slack|aws|gcp|azure|stripe)[-_]?(?:tokens?|keys?)|htpasswd)(?:\.(?:cfg|conf|csv|ini|json|toml|txt|xml|ya?ml|gpg|zip|tar\.gz))?)(?:~|#|\.(?:bak|backup|old|orig|save|swp|tmp|\d+))*$/i;
const LEFT_OUT = /^(?:.*?\/)??(?:\.[^/]*|__pycache__|node_modules|[^/]*\.egg-info)(?=\/|$)/;
const MAX_NAMED = 5;

export class SubmitView {
  title = "Submit a job";
  #files = [];
  #script = h("select", { id: "script", name: "script", required: true });
  #chosen = h("p", { role: "status" }, "No files chosen yet.");
  #error = h("p", { class: "error", role: "alert" });
  #submit = h("button", { class: "primary" }, "Submit");

  constructor(live) {
    const field = (id, label, attributes) => h("p", {}, h("label", { for: id }, label), h("input", { id, name: id, ...attributes }));
    const choose = (id, label, attributes) => h("label", { class: "button" }, label,
      h("input", { id, type: "file", class: "hidden", multiple: true, ...attributes, onchange: (event) => this.#choose([...event.target.files].map((file) => ({ path: file.webkitRelativePath || file.name, file }))) }));
    const drop = h("div", { class: "drop", ondragover: (event) => {
      event.preventDefault();
      drop.classList.add("over");
    }, ondragleave: () => drop.classList.remove("over"), ondrop: async (event) => {
      event.preventDefault();
      drop.classList.remove("over");
      this.#choose(await dropped(event.dataTransfer));
    } },
    h("p", {}, "Drop a script or a folder of code here, or"),
    h("p", { class: "buttons" }, choose("file", "Choose files"), choose("folder", "Choose a folder", { webkitdirectory: true })), this.#chosen);
    this.element = h("form", { class: "card narrow", onsubmit: (event) => this.#send(event, live) },
      h("h1", {}, "Submit a job"), drop,
      h("p", {}, h("label", { for: "script" }, "Script to run"), this.#script),
      field("name", "Name", { maxlength: 200, placeholder: "the name of the script" }),
      field("args", "Arguments, separated by spaces (double quotes keep spaces)", { placeholder: '--lr 0.1 --note "first try"' }),
      field("requirements", "Additional Python packages", { placeholder: "einops>=0.8 tiny-package==1.2" }),
      h("div", { class: "pair" },
        field("min_workers", "Minimum workers", { type: "number", min: 1, value: 1 }),
        field("max_workers", "Maximum workers", { type: "number", min: 1, placeholder: "as many as it can use" })),
      h("div", { class: "pair" },
        field("priority", "Priority", { type: "number", min: 1, max: 1000000, value: 5000 }),
        field("group", "Required host labels", { placeholder: "gpu=h200,zone=a" })),
      this.#error, h("p", { class: "buttons" }, this.#submit));
  }

  update() {}

  close() {}

  #choose(files) {
    this.#error.textContent = "";
    const sent = files.filter(({ path }) => !omittedPart(path));
    const root = commonFolder(sent.map(({ path }) => path));
    this.#files = sent.map(({ path, file }) => ({ path: path.slice(root.length), file }));
    const scripts = this.#files.map(({ path }) => path).filter((path) => path.endsWith(".py")).sort((a, b) => a.split("/").length - b.split("/").length || a.localeCompare(b));
    this.#script.replaceChildren(...scripts.map((path) => h("option", { value: path }, path)));
    const size = this.#files.reduce((sum, { file }) => sum + file.size, 0);
    const within = (path) => (path.startsWith(root) ? path.slice(root.length) : path);
    const omitted = [...new Set(files.map(({ path }) => omittedPart(within(path))).filter(Boolean))];
    const named = omitted.slice(0, MAX_NAMED).join(", ") + (omitted.length > MAX_NAMED ? ` and ${omitted.length - MAX_NAMED} more` : "");
    this.#chosen.textContent = `${count(this.#files.length, "file")}, ${(size / 1024).toFixed(1)} KiB` +
      (omitted.length ? `; not sent, as hidden, generated or secret: ${named}` : "") + (scripts.length ? "" : "; none of them is a Python script");
  }

  async #send(event, live) {
    event.preventDefault();
    const form = new FormData(event.target);
    this.#error.textContent = "";
    if (!this.#files.length) {
      this.#error.textContent = "Choose a script or a folder first.";
      return;
    }
    this.#submit.disabled = true;
    try {
      const { package: key } = await upload("/v1/packages", await pack(this.#files));
      const given = (name) => form.get(name).trim();
      const whole = (name) => (given(name) ? { [name]: Number(given(name)) } : {});
      const { id } = await send("POST", "/v1/jobs", {
        name: given("name") || form.get("script").split("/").at(-1).replace(/\.py$/, ""),
        package: key, script: form.get("script"), args: words(given("args")), group: given("group"),
        requirements: words(given("requirements")),
        ...whole("min_workers"), ...whole("max_workers"), ...whole("priority"),
      });
      live.refresh();
      location.hash = `#/jobs/${id}`;
    } catch (problem) {
      this.#error.textContent = problem.message;
    }
    this.#submit.disabled = false;
  }
}

/** Split as a shell does, as far as double quotes go. */
const words = (text) => [...text.matchAll(/"([^"]*)"|(\S+)/g)].map(([, quoted, plain]) => quoted ?? plain);

/** The path of what is not sent of that file: its own, or that of a folder above; nothing for what is sent. */
const omittedPart = (path) => LEFT_OUT.exec(path)?.[0] ?? (SECRET.test(path.split("/").at(-1)) ? path : undefined);

/** The folder that all paths begin with, and its slash; that of a single file is its own. */
function commonFolder(paths) {
  const folders = paths.map((path) => path.slice(0, path.lastIndexOf("/") + 1));
  return folders.reduce((a, b) => {
    while (!b.startsWith(a)) a = a.slice(0, a.lastIndexOf("/", a.length - 2) + 1);
    return a;
  }, folders[0] ?? "");
}

async function dropped(transfer) {
  const files = [];
  const visit = async (entry, path) => {
    if (LEFT_OUT.test(path)) files.push({ path });
    else if (entry.isFile) files.push({ path, file: await new Promise((resolve, reject) => entry.file(resolve, reject)) });
    else for (const child of await children(entry)) await visit(child, `${path}/${child.name}`);
  };
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry()).filter(Boolean);
  if (!entries.length) return [...transfer.files].map((file) => ({ path: file.name, file }));
  for (const entry of entries) await visit(entry, entry.name);
  return files;
}

async function children(folder) {
  const reader = folder.createReader();
  const found = [];
  for (;;) {
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!some.length) return found;
    found.push(...some);
  }
}
