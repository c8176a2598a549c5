"""The store of sessions that outlives the process: SQLite in the user's home of `lmchat`.

sqlite_store.py  the store
search.py        lists of sessions and the search in them
beginnings.py    which pages of tokens sessions have in common
rows.py          sessions and turns as rows, and back
codec.py         values as bytes, exactly
schema.py        tables, versions, migrations
database.py      connections, transactions, what an error means, checkpoints
owners.py        which process holds a lease, and whether it lives
"""
