"""The chat page: durable sessions in a browser, mounted on the HTTP server.

A reply belongs to its session, not to the tab that shows it. Each tab has a *mark*: session,
revision, running reply. A verb starts its work and returns a new mark at once; a timer brings the
marks of changes made elsewhere; one generator shows what a mark stands for. So a stream, a reload,
a second tab and a turn of the terminal take one path. `static` has what the browser gets as it is.

Not here: HTTP and API keys (`lmchat.server`), sessions (`lmchat`). `cli` mounts the page.
"""
