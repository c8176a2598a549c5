"""What an engine gets: devices, defaults, its share of memory, the limits of files and tasks.

Not here: the configuration of a model (`turbomind.models`), and what an engine does with what it
gets (`turbomind.engine`).
"""
