// Start, pages by the address's hash, theme, and news while a sweep runs.

const POLL_MS = 3000;

class App {
  constructor(data) {
    this.view = new View();
    this.overview = new Overview(this);
    this.run = new RunPage(this);
    this.main = document.getElementById("main");
    this.state = h("p", { class: "soft", role: "status" });
    this.title = h("h1", { tabindex: "-1" });
    this.header();
    this.take(data);
    addEventListener("hashchange", () => this.route(true));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.refresh());
    this.route(false);
  }

  header() {
    const theme = choice("theme", THEMES, savedTheme(), (value) => {
      setTheme(value);
      this.refresh();
    });
    document.getElementById("top").append(h("div", { class: "bar" }, h("div", { class: "grow" }, this.title, this.state), theme));
    document.getElementById("skip").addEventListener("click", (event) => {
      event.preventDefault();
      this.main.focus();
    });
  }

  take(data) {
    this.data = data;
    this.view.fit(data);
    this.title.textContent = data.name;
    this.say("");
  }

  say(text) {
    this.state.textContent = [this.data.summary, text].filter(Boolean).join(" · ");
  }

  /** The run that the address names, or null. */
  get named() {
    const found = /^#run=(.*)$/.exec(location.hash);
    if (!found) return null;
    try {
      return decodeURIComponent(found[1]);
    } catch {
      return found[1];
    }
  }

  route(moved) {
    const page = this.named === null ? this.overview : this.run;
    if (this.main.firstChild !== page.element) this.main.replaceChildren(page.element);
    if (page === this.run) this.run.open(this.named);
    else this.overview.update();
    if (!moved) return;
    scrollTo(0, 0);
    (page === this.run ? this.run.heading : this.title).focus();
  }

  /** Draw again what is seen: other data, or other colours. */
  refresh() {
    if (this.named === null) this.overview.update();
    else this.run.update();
  }

  /** Ask the server that this page came from, and nobody else, whether something is new. */
  async follow() {
    for (;;) {
      await new Promise((done) => setTimeout(done, POLL_MS));
      try {
        const { version } = await (await fetch("version", { cache: "no-store" })).json();
        if (version !== this.data.version) {
          const bytes = new Uint8Array(await (await fetch("data", { cache: "no-store" })).arrayBuffer());
          this.take(new Data(await gunzip(bytes)));
          this.refresh();
        }
        this.say("live");
      } catch {
        this.say("the server does not answer: this is how it last was");
      }
    }
  }
}

async function start() {
  setTheme(savedTheme());
  const [plotly, payload] = await Promise.all(["plotly", "payload"].map((id) => gunzip(fromBase64(document.getElementById(id).textContent))));
  document.head.append(h("script", {}, new TextDecoder().decode(plotly)));
  document.getElementById("plotly").remove();
  document.getElementById("payload").remove();
  window.report = new App(new Data(payload));
  document.body.dataset.ready = "true";
  if (document.body.dataset.live === "true") window.report.follow();
}

start().catch((error) => {
  const old = typeof DecompressionStream === "undefined" ? " This browser cannot unpack it; one of 2023 or later can." : "";
  document.getElementById("main").replaceChildren(h("p", {}, `The report could not be drawn: ${error.message}.${old}`));
  throw error;
});
