"use strict";
// The page's own part: the side panel, the title, the bars below messages, the address and the keys.
// Values come from Python in hidden Textboxes, which are polled, and go there through `action`.
(() => {
  const POLL = 100; // milliseconds
  const byId = (id) => document.getElementById(id);
  const field = (id) => document.querySelector(`#${id} textarea`);
  const value = (id) => field(id)?.value ?? "";
  const json = (id) => JSON.parse(value(id) || "null");
  const setValue = Object.getOwnPropertyDescriptor(HTMLTextAreaElement.prototype, "value").set;
  const address = () => new URLSearchParams(location.search).get("session") ?? "";
  const current = () => value("mark").split(":")[0];

  let view = { rounds: [], first: 0 };
  let asked = 0;
  let opened = ""; // the session of the address, until the mark is of it
  let openedAt = Infinity;
  let follows = true; // the end of the conversation stays in sight
  const seen = {};

  function make(tag, properties = {}, ...children) {
    const element = Object.assign(document.createElement(tag), properties);
    for (const name in properties) if (name.includes("-")) element.setAttribute(name, properties[name]);
    element.append(...children);
    return element;
  }

  const button = (text, onclick, more = {}) => make("button", { type: "button", textContent: text, onclick, ...more });

  function write(id, text) {
    setValue.call(field(id), text);
    field(id).dispatchEvent(new Event("input", { bubbles: true }));
  }

  const ask = (verb, values = {}) => write("action", JSON.stringify({ verb, ...values, number: (asked += 1) }));

  function visit(session) {
    if (session !== address()) history.pushState(null, "", session ? `./?session=${session}` : "./");
  }

  function open(session, closes = true) {
    [follows, opened, openedAt] = [true, session, performance.now()];
    visit(session);
    if (closes) closePanel();
    ask("open", { session });
    field("box")?.focus();
  }

  function closePanel() {
    if (innerWidth < 768) document.querySelector("#panel.open .toggle-button, .sidebar.open .toggle-button")?.click();
  }

  function tell(text) {
    byId("message")?.remove();
    const close = button("×", () => byId("message").remove(), { "aria-label": "Close" });
    document.body.append(make("div", { id: "message", role: "alert" }, make("span", { textContent: text }), close));
  }

  // --- the side panel -----------------------------------------------------------------------------

  function entry(one) {
    const onclick = (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      open(one.id);
    };
    const link = make("a", { href: `./?session=${one.id}`, title: `${one.title}\n${one.detail}`, onclick });
    link.append(make("span", { textContent: one.title || "New chat" }), make("small", { textContent: one.detail }));
    link.classList.toggle("running", one.running);
    if (one.id === current()) link.setAttribute("aria-current", "page");
    return make("li", {}, link);
  }

  function drawSessions() {
    const found = json("sessions") ?? { groups: [], more: false };
    const parts = found.groups.flatMap((group) => [
      make("h2", { textContent: group.name }),
      make("ul", {}, ...group.sessions.map(entry)),
    ]);
    if (found.more) parts.push(button("More", () => ask("more")));
    panel().querySelector("div").replaceChildren(...parts);
  }

  function panel() {
    if (byId("sessions-panel") === null) {
      const file = make("input", { type: "file", accept: ".zip", hidden: true, onchange: () => load(file.files[0]) });
      const buttons = [button("New chat", () => open(""), { id: "new-chat" }), button("Import", () => file.click()), file];
      const out = make("form", { method: "post", action: "./logout" }, make("button", { textContent: "Log out" }));
      if (document.querySelector("meta[name=lmchat-login]")?.content === "1") buttons.push(out);
      const nav = make("nav", { id: "sessions-panel", "aria-label": "Sessions" }, make("header", {}, ...buttons), make("div"));
      byId("panel-content").append(nav);
    }
    return byId("sessions-panel");
  }

  async function load(file) {
    const name = `imported-${Date.now().toString(36)}`; // the name in the file may be taken
    const answer = await fetch(`./page/v1/sessions/import?name=${name}`, { method: "POST", body: file });
    const found = await answer.json();
    if (answer.ok) open(found.id);
    else tell(found.error.message);
  }

  // --- the title and the bars below messages --------------------------------------------------------

  function drawView() {
    view = json("view") ?? view;
    const title = view.title ?? "New chat";
    document.title = view.session ? `${title} - lmchat` : "lmchat";
    byId("title")?.remove();
    byId("header").append(make("h1", { id: "title", textContent: title }));
    document.body.classList.toggle("is-new", !view.session);
    byId("earlier")?.remove();
    if (view.first > 0) {
      const more = button(`Show earlier messages (${view.first})`, () => ask("earlier"), { id: "earlier" });
      byId("conversation").prepend(more);
    }
    const files = byId("session-files");
    const remove = () => confirm(`Delete "${title}" and all its branches?`) && ask("delete");
    const links = [make("a", { href: `./page/v1/sessions/${view.session}/export`, textContent: "Export", download: "" })];
    files?.querySelector("div.files")?.remove();
    if (view.session) files?.append(make("div", { className: "files" }, ...links, button("Delete", remove)));
    if (view.unanswered && !value("box")) write("box", view.unanswered);
  }

  function editor(bar, name, text, save, verb, turn) {
    bar.querySelector("form")?.remove();
    const area = make("textarea", { value: text, "aria-label": name, rows: 4 });
    const done = make("button", { type: "submit", textContent: save });
    const form = make("form", { className: "editor" }, area, done, button("Cancel", () => form.remove()));
    form.onsubmit = (event) => {
      event.preventDefault();
      form.remove();
      ask(verb, { turn, text: area.value });
    };
    area.onkeydown = (event) => {
      if (event.key === "Escape") form.remove();
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
      event.stopPropagation();
    };
    bar.append(form);
    area.focus();
  }

  function barOf(round, isLast) {
    const turn = round.number;
    const bar = make("div", { className: "bar", role: "group", "aria-label": turn < 0 ? "Dropped round" : `Round ${turn + 1}` });
    const text = (textContent, className) => textContent && bar.append(make("span", { textContent, className }));
    const add = (name, act) => bar.append(button(name, act));
    bar.classList.toggle("is-last", isLast);
    if (turn < 0) {
      text("no longer in the prompt, because the context was full", "dropped");
      return bar;
    }
    if (isLast) text(view.status, "ending");
    if (view.running) return bar;
    if (isLast && view.ending) add("Continue", () => ask("continue"));
    if (round.branch) {
      const [index, count] = round.branch;
      const arrow = (mark, name, to) => {
        const rules = { "aria-label": name, title: name, disabled: to < 0 || to >= count };
        return button(mark, () => ask("switch", { turn, index: to }), rules);
      };
      const place = make("span", { textContent: `${index + 1} / ${count}` });
      const arrows = [arrow("‹", "Previous", index - 1), place, arrow("›", "Next", index + 1)];
      bar.append(make("span", { className: "branch" }, ...arrows));
    }
    if (isLast) add("Retry", () => ask("retry"));
    add("Edit question", () => editor(bar, "Edited question", round.question, "Ask again", "edit", turn));
    if (round.reply === null) return bar;
    add("Edit reply", () => editor(bar, "Edited reply", round.reply, "Save", "edit_reply", turn));
    add("Fork from here", () => ask("fork", { turn }));
    text(round.figures, "figures");
    return bar;
  }

  function drawBars() {
    const rows = [...document.querySelectorAll("#history .user-row, #last .user-row")];
    if (rows.length !== view.rounds.length) return; // the messages are of another view
    rows.forEach((row, place) => {
      const isLast = place === rows.length - 1;
      const under = row.nextElementSibling?.matches(".bot-row") ? row.nextElementSibling : row;
      const key = JSON.stringify([view.rounds[place], isLast && [view.running, view.ending, view.status]]);
      const bar = under.querySelector(":scope > .bar");
      if (bar?.dataset.key === key || bar?.contains(document.activeElement?.closest("form"))) return;
      bar?.remove();
      under.append(barOf(view.rounds[place], isLast));
      under.lastChild.dataset.key = key;
    });
  }

  // --- the loop -------------------------------------------------------------------------------------

  const draws = {
    mark() {
      openedAt = Infinity;
      visit(current());
      drawSessions();
    },
    view: drawView,
    sessions: drawSessions,
    notice() {
      openedAt = Infinity;
      tell(json("notice").text);
    },
  };

  function poll() {
    if (opened !== current() && performance.now() - openedAt > 1000) {
      openedAt += 1000;
      ask("open", { session: opened }); // Gradio was not ready for the first request
    }
    for (const id in draws) {
      if ((seen[id] ?? "") === value(id)) continue;
      seen[id] = value(id);
      draws[id]();
    }
    drawBars();
  }

  function start() {
    const needed = ["action", "box", "conversation", "header", "panel-content", "session-files"];
    if (!needed.every(byId)) return setTimeout(start, POLL);
    field("box").setAttribute("aria-label", "Message"); // the label also has the buttons' text
    const area = byId("conversation");
    const toEnd = () => follows && (area.scrollTop = area.scrollHeight);
    area.onscroll = () => (follows = area.scrollHeight - area.scrollTop - area.clientHeight < 60);
    new MutationObserver(toEnd).observe(area, { childList: true, subtree: true, characterData: true });
    closePanel();
    drawView();
    drawSessions();
    setInterval(poll, POLL);
    addEventListener("keydown", (event) => {
      const last = [...document.querySelectorAll(".bar.is-last button")];
      if (event.key === "Escape") document.querySelector("#box .stop-button")?.click();
      if (event.key !== "ArrowUp" || event.target !== field("box") || value("box")) return;
      last.find((one) => one.textContent === "Edit question")?.click();
      event.preventDefault();
    });
    addEventListener("popstate", () => open(address(), false));
    if (address()) open(address(), false);
  }

  start();
})();
