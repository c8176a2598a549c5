"""The durable store of sessions: SQLite in the data directory.


sqlite_store.py  the store
search.py        lists of sessions and the search in them
prefix_table.py  the prefixes, in pages of tokens, that sessions share
rows.py          sessions and turns as rows, and back
codec.py         values as bytes, exactly
schema.py        tables, versions, migrations
database.py      connections, transactions, checkpoints
error_texts.py   errors of SQLite as sentences
journal.py       leases and journals
tables.py        SQL of sessions and turns
verify.py        verification
running.py       turns that are being generated, and the pages that they need
search_index.py  removal of deleted words from the full-text index
checkpointer.py  when the log is copied into the file, and emptied after deletions
room.py          room on a full disk, which pages of KV leave
reserve_file.py  room for deletions on a full disk without such pages
owners.py        owners of leases, and whether they live

Not here: the protocol of a store (`lmchat.store.base`) and pages (`cpp/tiers`).
"""
